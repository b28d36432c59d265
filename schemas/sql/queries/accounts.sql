-- create_account
-- A limit of null or -1 means the plan's.
insert into accounts (id, name, email, plan, requests_per_second, units_per_second, requests_per_day)
values ($1, $2, $3, $4, nullif($5::integer, -1), nullif($6::integer, -1), nullif($7::bigint, -1))
returning id, name, email, plan, requests_per_second, units_per_second, requests_per_day, created_at, disabled,
    record_params, changed_at, slot;

-- lock_emails
-- Serialise changes of email addresses until the end of the transaction.
select pg_advisory_xact_lock(hashtextextended('e-mails of accounts', 0));

-- is_email_taken
-- Whether another account or member has the email address. Accounts that shared one before this was checked may keep it.
select exists (select from accounts where lower(email) = lower($1) and id is distinct from $2)
    and not exists (select from accounts where lower(email) = lower($1) and id = $2)
    or exists (select from members where lower(email) = lower($1) and id is distinct from $2);

-- find_member_by_email
select id, account_id from members where lower(email) = lower($1);

-- list_accounts
select a.id, a.name, a.email, a.plan, a.requests_per_second, a.units_per_second, a.requests_per_day, a.created_at,
    a.disabled, a.record_params, a.changed_at, a.slot, (
    select count(*) from keys k
    where k.account_id = a.id and k.status = 'active' and (k.expires_at is null or k.expires_at > now())
) as active_keys
from accounts a order by a.created_at, a.id;

-- read_account
select id, name, email, plan, requests_per_second, units_per_second, requests_per_day, created_at, disabled, record_params,
    changed_at, slot
from accounts where id = $1;

-- find_account_by_email
select id, name, email, plan, requests_per_second, units_per_second, requests_per_day, created_at, disabled, record_params,
    changed_at, slot
from accounts where lower(email) = lower($1) order by created_at limit 1;

-- update_account
-- Null keeps a value; a limit of -1 restores the plan's.
update accounts set
    name = coalesce($2, name),
    email = coalesce($3, email),
    plan = coalesce($4, plan),
    requests_per_second = nullif(coalesce($5, requests_per_second), -1),
    units_per_second = nullif(coalesce($6, units_per_second), -1),
    requests_per_day = nullif(coalesce($7, requests_per_day), -1),
    disabled = coalesce($8, disabled),
    record_params = coalesce($9, record_params)
where id = $1
returning id, name, email, plan, requests_per_second, units_per_second, requests_per_day, created_at, disabled,
    record_params, changed_at, slot;

-- change_email
-- The address of a person: an account's first owner or a member.
with member as (
    update members set email = $2 where id = $1
)
update accounts set email = $2 where id = $1;

-- lock_account
-- Wait for those that write records of the account, and let others wait: they then see that it was erased.
select from accounts where id = $1 for update;

-- erase_account
-- End everything that acts for the account, and erase its personal data. The ledger of sponsored gas refers to the row.
with keys_end as (
    update keys set status = 'revoked', name = 'deleted', allowed_ips = '{}', allowed_origins = '{}', owner = '', note = ''
    where account_id = $1
), policies_end as (
    update gas_policies set status = 'deleted', revision = revision + 1, updated_at = now()
    where account_id = $1 and status <> 'deleted'
), sessions_end as (
    delete from sessions where account_id in (select id from people where account_id = $1)
), links_end as (
    delete from sign_in_links where account_id in (select id from people where account_id = $1)
), password_ends as (
    delete from account_passwords where account_id in (select id from people where account_id = $1)
), mails_end as (
    delete from mails where account_id = $1
), email_change_ends as (
    delete from email_changes where account_id in (select id from people where account_id = $1)
), second_factor_ends as (
    delete from account_second_factors where account_id in (select id from people where account_id = $1)
), members_end as (
    delete from members where account_id = $1
), invitations_end as (
    delete from invitations where account_id = $1
), visits_end as (
    delete from account_visits where account_id = $1
), actions_end as (
    delete from actions where account_id = $1
), alert_settings_end as (
    delete from alert_settings where account_id = $1
), alerts_end as (
    delete from alerts where account_id = $1
), alert_webhook_ends as (
    update webhooks set status = 'deleted', updated_at = now() where account_id = $1 and network = '-'
), requests_end as (
    delete from requests where account = $1
)
update accounts set name = 'deleted', email = '', disabled = true where id = $1
returning id, name, email, plan, requests_per_second, units_per_second, requests_per_day, created_at, disabled,
    record_params, changed_at, slot;

-- count_accounts
select count(*) from accounts a
where $1 = '' or position(lower($1) in lower(a.id || ' ' || a.name || ' ' || a.email)) > 0
    or exists (select from keys k where k.account_id = a.id and (starts_with(k.id, $1) or position(lower($1) in lower(k.hint)) > 0))
    or exists (select from members m where m.account_id = a.id and position(lower($1) in lower(m.email)) > 0)
    or a.id in (select r.account from requests r where r.id = $1 or r.client_id = $1 and r.client_id <> '');

-- page_accounts
-- Accounts whose id, name, email address, member or key matches the text, or that sent the request with this id, newest first,
-- with today's requests and leased quota.
select a.id, a.name, a.email, a.plan, a.requests_per_second, a.units_per_second, a.requests_per_day, a.created_at,
    a.disabled, a.record_params, a.changed_at, a.slot, (
    select count(*) from keys k
    where k.account_id = a.id and k.status = 'active' and (k.expires_at is null or k.expires_at > now())
) as active_keys,
    coalesce(u.requests, 0) as asked_today, coalesce(q.used, 0) as leased_today
from accounts a
left join quota_days q on q.account_id = a.id and q.day = $2
left join usage_series s on s.account_id = a.id and s.key_id = '' and s.network = '' and s.method = ''
left join usage u on u.step = 'day' and u.series = s.id and u.at = $2::date::timestamp at time zone 'UTC'
where $1 = '' or position(lower($1) in lower(a.id || ' ' || a.name || ' ' || a.email)) > 0
    or exists (select from keys k where k.account_id = a.id and (starts_with(k.id, $1) or position(lower($1) in lower(k.hint)) > 0))
    or exists (select from members m where m.account_id = a.id and position(lower($1) in lower(m.email)) > 0)
    or a.id in (select r.account from requests r where r.id = $1 or r.client_id = $1 and r.client_id <> '')
order by a.created_at desc, a.id limit $3 offset $4;

-- list_names
select id, name from accounts where id = any($1::text[]);

-- read_usage_of_day
select coalesce((select used from quota_days where account_id = $1 and day = $2), 0);

-- lease_quotas
-- One lease per account; the granted amounts are returned in the order of the list.
select lease_quota(account, $4, wanted, day_limit)
from unnest($1::text[], $2::bigint[], $3::bigint[]) with ordinality as want (account, wanted, day_limit, place)
order by place;

-- return_quotas
-- Lock the rows in the same order as leases do, to avoid a deadlock.
with held as materialized (
    select account_id from quota_days where account_id = any($1::text[]) and day = $3 order by account_id collate "C" for update
)
update quota_days q set used = greatest(0, q.used - back.amount)
from held, unnest($1::text[], $2::bigint[]) as back (account, amount)
where held.account_id = back.account and q.account_id = back.account and q.day = $3;

-- read_used
-- How much of each limit of its plan the account uses.
select
    (select count(*) from keys where account_id = $1 and status <> 'revoked' and expires_at is null) as keys,
    (select count(*) from webhooks where account_id = $1 and status <> 'deleted' and network <> '-') as webhooks,
    (select count(*) from gas_policies where account_id = $1 and status <> 'deleted') as policies,
    (select coalesce(sum(wallets), 0)::bigint from wallet_counts where account_id = $1) as wallets,
    (select coalesce(sum(used), 0)::bigint from delivery_days where account_id = $1 and day = $2) as webhook_deliveries_per_day,
    -- With those above the limit, which were dropped.
    (select coalesce(sum(stored + dropped), 0)::bigint from event_days where account_id = $1 and day = $2) as webhook_events_per_day,
    -- Kept in picodollars.
    (select coalesce(sum(used), 0)::float8 / 1e12 from gas_account_days where account_id = $1 and day = $2) as sponsored_usd_per_day;

-- start_capture
-- Record all requests of these accounts (null: of all) for this many seconds. Those that do not record params are left out.
update accounts set captured_until = now() + make_interval(secs => $2)
where record_params and not disabled and ($1::text[] is null or id = any($1))
returning id;

-- end_capture
update accounts set captured_until = null where id = any($1::text[]);
