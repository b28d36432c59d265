-- create_key
-- A limit of null or -1 means the account's.
insert into keys (
    id, account_id, lineage_id, name, mode, digest, hint, scopes, requests_per_second, units_per_second,
    allowed_ips, allowed_origins, allowed_networks, allowed_methods, allowed_contracts, previous_digest, pepper, directives,
    owner, note, expires_at, allow_in_url, private_transactions
)
values (
    $1, $2, $1, $3, $4, $5, $6, $7, nullif($8::integer, -1), nullif($9::integer, -1), $10, $11, $12, $13, $14, $15,
    coalesce((select number from peppers where check_value = $16), 1), $17, coalesce($18, ''), coalesce($19, ''),
    nullif($20::timestamptz, timestamptz '9999-01-01T00:00:00Z'), coalesce($21, false), coalesce($22, false)
)
returning id, account_id, lineage_id, slot, name, mode, hint, scopes, status, expires_at, requests_per_second,
    units_per_second, allowed_ips, allowed_origins, allowed_networks, allowed_methods, allowed_contracts, owner, note,
    created_at, changed_at, directives, fault, allow_in_url, private_transactions;

-- rotate_key
-- The successor inherits lineage, slot, scopes, limits, allowlists and directives, and the expiry that its holder chose.
insert into keys (
    id, account_id, lineage_id, slot, name, mode, digest, hint, scopes, requests_per_second, units_per_second,
    allowed_ips, allowed_origins, allowed_networks, allowed_methods, allowed_contracts, owner, note, expires_at,
    previous_digest, pepper, directives, fault, allow_in_url, private_transactions
)
select $2, account_id, lineage_id, slot, name, mode, $3, $4, scopes, requests_per_second, units_per_second,
    allowed_ips, allowed_origins, allowed_networks, allowed_methods, allowed_contracts, owner, note,
    case when not exists (
        select from keys newer where newer.lineage_id = keys.lineage_id and newer.created_at > keys.created_at
    ) then expires_at end, $5,
    coalesce((select number from peppers where check_value = $6), 1), directives, fault, allow_in_url,
    private_transactions
from keys where id = $1 and status = 'active' and (expires_at is null or expires_at > now())
returning id, account_id, lineage_id, slot, name, mode, hint, scopes, status, expires_at, requests_per_second,
    units_per_second, allowed_ips, allowed_origins, allowed_networks, allowed_methods, allowed_contracts, owner, note,
    created_at, changed_at, directives, fault, allow_in_url, private_transactions;

-- lock_keys
-- Serialise creating keys of an account until the end of the transaction.
select plan from accounts where id = $1 for no key update;

-- count_keys
-- Usable keys of an account: the newest of each lineage, and those that end because they were rotated.
select count(*) filter (where is_newest) as lasting, count(*) filter (where not is_newest) as ending from (
    select created_at = max(created_at) over (partition by lineage_id) as is_newest from keys
    where account_id = $1 and status <> 'revoked' and (expires_at is null or expires_at > now())
) usable;

-- expire_key
update keys set expires_at = least(coalesce(expires_at, 'infinity'), now() + make_interval(secs => $2))
where id = $1
returning id, account_id, lineage_id, slot, name, mode, hint, scopes, status, expires_at, requests_per_second,
    units_per_second, allowed_ips, allowed_origins, allowed_networks, allowed_methods, allowed_contracts, owner, note,
    created_at, changed_at, directives, fault, allow_in_url, private_transactions;

-- set_key_status
-- A revoked key stays revoked, and its invitations end.
with invitations_end as (
    delete from invitations where invited_by = $1 and $2 = 'revoked'
)
update keys set status = $2 where id = $1 and status <> 'revoked'
returning id, account_id, lineage_id, slot, name, mode, hint, scopes, status, expires_at, requests_per_second,
    units_per_second, allowed_ips, allowed_origins, allowed_networks, allowed_methods, allowed_contracts, owner, note,
    created_at, changed_at, directives, fault, allow_in_url, private_transactions;

-- lock_key
-- A key as it is stored, until the end of the transaction.
select id, account_id, mode, scopes, status, expires_at, requests_per_second, units_per_second, allowed_ips, allowed_origins,
    allowed_networks, allowed_methods, allowed_contracts, directives, allow_in_url, private_transactions
from keys where id = $1 for update;

-- update_key
-- Null keeps a value; a limit of -1 restores the account's, and the directive `default` the usual ones.
update keys set
    name = coalesce($2, name),
    scopes = coalesce($3, scopes),
    requests_per_second = nullif(coalesce($4, requests_per_second), -1),
    units_per_second = nullif(coalesce($5, units_per_second), -1),
    allowed_ips = coalesce($6, allowed_ips),
    allowed_origins = coalesce($7, allowed_origins),
    directives = case when $8::text[] = array['default'] then null else coalesce($8, directives) end,
    fault = nullif(coalesce($9, fault), ''),
    allowed_networks = coalesce($10, allowed_networks),
    allowed_methods = coalesce($11, allowed_methods),
    allowed_contracts = coalesce($12, allowed_contracts),
    owner = coalesce($13, owner),
    note = coalesce($14, note),
    expires_at = nullif(coalesce($15, expires_at), timestamptz '9999-01-01T00:00:00Z'),
    allow_in_url = coalesce($16, allow_in_url),
    private_transactions = coalesce($17, private_transactions)
where id = $1 and status <> 'revoked'
returning id, account_id, lineage_id, slot, name, mode, hint, scopes, status, expires_at, requests_per_second,
    units_per_second, allowed_ips, allowed_origins, allowed_networks, allowed_methods, allowed_contracts, owner, note,
    created_at, changed_at, directives, fault, allow_in_url, private_transactions;

-- read_key
select k.id, k.account_id, k.lineage_id, k.slot, k.name, k.mode, k.hint, k.scopes, k.status, k.expires_at,
    k.requests_per_second, k.units_per_second, k.allowed_ips, k.allowed_origins, k.allowed_networks, k.allowed_methods,
    k.allowed_contracts, k.owner, k.note, k.created_at, k.changed_at, k.directives, k.fault, k.allow_in_url,
    k.private_transactions,
    a.name as account_name, a.plan
from keys k join accounts a on a.id = k.account_id where k.id = $1;

-- list_keys
select k.id, k.account_id, k.lineage_id, k.slot, k.name, k.mode, k.hint, k.scopes, k.status, k.expires_at,
    k.requests_per_second, k.units_per_second, k.allowed_ips, k.allowed_origins, k.allowed_networks, k.allowed_methods,
    k.allowed_contracts, k.owner, k.note, k.created_at, k.changed_at, k.directives, k.fault, k.allow_in_url,
    k.private_transactions,
    a.name as account_name, a.plan
from keys k join accounts a on a.id = k.account_id
where ($1::text is null or k.account_id = $1)
order by k.created_at, k.id;

-- name_keys
select k.id, k.name, a.name as account from keys k join accounts a on a.id = k.account_id where k.id = any($1::text[]);

-- load_keys
-- Everything that admission needs. Keys that can never work again are left out.
select k.id, k.lineage_id, k.slot, k.mode, k.digest, k.previous_digest, k.scopes, k.account_id, k.allowed_ips, k.allowed_origins,
    k.allowed_networks, k.allowed_methods, k.allowed_contracts, k.directives, k.fault, k.allow_in_url,
    k.private_transactions,
    case when a.disabled and k.status = 'active' then 'disabled' else k.status end as status,
    extract(epoch from k.expires_at - now())::float8 as expires_in_s,
    k.requests_per_second, k.units_per_second,
    a.slot as account_slot, a.requests_per_second as account_requests_per_second, a.units_per_second as account_units_per_second,
    a.plan, a.requests_per_day, a.record_params,
    extract(epoch from a.captured_until - now())::float8 as captured_for_s, coalesce(q.used, 0) as used_today
from keys k
join accounts a on a.id = k.account_id
left join quota_days q on q.account_id = a.id and q.day = $1
where k.status <> 'revoked' and (k.expires_at is null or k.expires_at > now());

-- load_changed_keys
-- Keys that changed, or whose account did, by id or since a time.
select k.id, k.lineage_id, k.slot, k.mode, k.digest, k.previous_digest, k.scopes, k.account_id, k.allowed_ips, k.allowed_origins,
    k.allowed_networks, k.allowed_methods, k.allowed_contracts, k.directives, k.fault, k.allow_in_url,
    k.private_transactions,
    case when a.disabled and k.status = 'active' then 'disabled' else k.status end as status,
    extract(epoch from k.expires_at - now())::float8 as expires_in_s,
    k.requests_per_second, k.units_per_second,
    a.slot as account_slot, a.requests_per_second as account_requests_per_second, a.units_per_second as account_units_per_second,
    a.plan, a.requests_per_day, a.record_params,
    extract(epoch from a.captured_until - now())::float8 as captured_for_s, coalesce(q.used, 0) as used_today
from keys k
join accounts a on a.id = k.account_id
left join quota_days q on q.account_id = a.id and q.day = $1
where k.id = any($2::text[]) or k.account_id = any($3::text[]) or k.changed_at > $4 or a.changed_at > $4;

-- read_clock
select clock_timestamp();
