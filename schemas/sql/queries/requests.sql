-- open_day
select open_request_day($1);

-- close_days
select close_request_days($1);

-- add_requests
-- Records of an account that was erased meanwhile are left out. The lock makes an erasure wait until they are written.
with held as materialized (
    select id, disabled and email = '' as is_erased from accounts where id = any($5::text[]) order by id for key share
)
insert into requests (
    at, ms, attempts, id, account, key, network, surface, method, status, reason, units, cache, bytes, block, error, blame, params,
    code, client_id, called, cost
)
select given.* from unnest(
    $1::timestamptz[], $2::double precision[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[], $9::text[],
    $10::integer[], $11::text[], $12::integer[], $13::text[], $14::bigint[], $15::bigint[], $16::text[], $17::text[], $18::text[],
    $19::text[], $20::text[], $21::text[], $22::bigint[]
) as given (
    at, ms, attempts, id, account, key, network, surface, method, status, reason, units, cache, bytes, block, error, blame, params,
    code, client_id, called, cost
)
left join held on held.id = given.account
where not coalesce(held.is_erased, false);

-- read_request
-- The newest record with this id, ours or the client's, of one account or of all. Here and below, a list of networks leaves out
-- records of others, but not those of the reader's own key.
select found.*, keys.name as key_name, accounts.name as account_name from (
    select at, id, account, key, network, surface, method, status, reason, units, cache, ms, bytes, block, error, blame,
        attempts, params, code, client_id, called, cost
    from requests
    where (id = $1 or client_id = $1 and client_id <> '') and ($2::text is null or account = $2)
        and ($3::text[] is null or network = any($3) or key = $4)
    order by at desc limit 1
) found left join keys on keys.id = found.key left join accounts on accounts.id = found.account;

-- count_same
-- The records with this id of a client, and their accounts. At most 10,001, so that it stays quick.
select count(*) as records, count(distinct account) as accounts from (
    select account from requests
    where client_id = $1 and client_id <> '' and ($2::text is null or account = $2)
        and ($3::text[] is null or network = any($3) or key = $4)
    limit 10001
) found;

-- count_requests
-- At most 10,001, so that it stays quick.
select count(*) from (select from requests
where ($1::text is null or account = $1) and ($2::text[] is null or network = any($2) or key = $3)
    and ($4::text is null or network = $4) and ($5::text is null or method = $5)
    and ($6::text is null or reason = $6) and ($7::integer is null or status = $7) and ($8::text is null or key = $8)
    and ($9::timestamptz is null or at > $9) and ($10::timestamptz is null or at <= $10) and ($11::text is null or code = $11)
    and ($12::text is null or client_id = $12 and client_id <> '') and ($13::text is null or strpos(attempts, $13) > 0)
limit 10001) found;

-- page_requests
-- $13: the beginning of an attempt of the wanted upstream.
select found.*, keys.name as key_name, accounts.name as account_name from (
    select at, id, account, key, network, surface, method, status, reason, units, cache, ms, bytes, block, error, blame,
        attempts, params, code, client_id, called, cost
    from requests
    where ($1::text is null or account = $1) and ($2::text[] is null or network = any($2) or key = $3)
        and ($4::text is null or network = $4) and ($5::text is null or method = $5)
        and ($6::text is null or reason = $6) and ($7::integer is null or status = $7) and ($8::text is null or key = $8)
        and ($9::timestamptz is null or at > $9) and ($10::timestamptz is null or at <= $10) and ($11::text is null or code = $11)
        and ($12::text is null or client_id = $12 and client_id <> '') and ($13::text is null or strpos(attempts, $13) > 0)
    order by at desc, id limit $14 offset $15
) found left join keys on keys.id = found.key left join accounts on accounts.id = found.account
order by at desc, found.id;

-- list_choices
-- The values of filters among the newest $4 records, the most frequent $5 of each.
with recent as materialized (
    select network, method, status, key, account, attempts from requests
    where ($1::text is null or account = $1) and ($2::text[] is null or network = any($2) or key = $3)
    order by at desc limit $4
), counted as (
    select 'network' as filter, network as value, count(*) as count from recent group by value
    union all select 'method', method, count(*) from recent group by method
    union all select 'status', status::text, count(*) from recent group by status
    union all select 'key', key, count(*) from recent group by key
    union all select 'account', account, count(*) from recent group by account
    union all select 'upstream', e ->> 0, count(*)
    from recent cross join lateral json_array_elements(attempts::json) as e where attempts <> '[]' group by e ->> 0
), ranked as (
    select filter, value, row_number() over (partition by filter order by count desc, value) as place
    from counted where value <> ''
)
select filter, value, coalesce(keys.name, accounts.name, '') as name
from ranked
left join keys on filter = 'key' and keys.id = value
left join accounts on filter = 'account' and accounts.id = value
where place <= $5 order by filter, place;

-- count_errors
-- Failed requests by status, code, method and key, most first, among the newest 100,000, with up to five upstreams that were asked
-- last. A failed batch is counted by its items.
with failed as materialized (
    select status, code, method, key, account, error, at,
        case when attempts <> '[]' then attempts::json -> -1 ->> 0 end as upstream
    from requests
    where ($1::text is null or account = $1) and ($2::text[] is null or network = any($2) or key = $3)
        and ($4::text is null or network = $4) and ($5::text is null or method = $5)
        and ($6::text is null or key = $6) and ($7::timestamptz is null or at > $7) and ($8::timestamptz is null or at <= $8)
        and reason = 'failed' and error <> ''
    order by at desc limit 100000
), counted as (
    select status, code, method, key, account, count(*) as count, max(at) as last_at, max(error) as example,
        coalesce((array_agg(distinct upstream) filter (where upstream is not null))[1:5], '{}') as upstreams
    from failed group by status, code, method, key, account order by count desc, last_at desc limit 200
)
select counted.*, keys.name as key_name, accounts.name as account_name
from counted left join keys on keys.id = counted.key left join accounts on accounts.id = counted.account
order by count desc, last_at desc;

-- read_delivery
-- A webhook delivery by the id of its event, one row per attempt, or one without.
select d.event_id as id, d.created_at, w.account_id, w.network, w.event_type, d.state, a.began_at, a.took_ms, a.outcome, a.status
from deliveries d join webhooks w on w.id = d.webhook_id left join attempts a on a.event_id = d.event_id
where d.event_id = $1 and ($2::text is null or w.account_id = $2) and ($3::text[] is null or w.network = any($3))
order by a.number;

-- count_attempts
-- Attempts by method and upstream, and by duration ($5: the upper edges of its buckets), among the newest 100,000 records after
-- $1. A sampled request stands for as many as the plan of its account samples one of ($2 to $4: plans, their numbers, the usual one).
-- $6: outcomes that are not the upstream's failure.
with recent as materialized (
    select r.network, r.method, r.attempts, r.reason, case when r.reason = 'sampled' then coalesce(p.every, $4) else 1 end as weight
    from (
        select network, method, account, reason, attempts from requests
        where at > $1 and attempts <> '[]' and surface not in ('batch', 'rest', 'webhook') order by at desc limit 100000
    ) r
    left join accounts a on a.id = r.account
    left join unnest($2::text[], $3::bigint[]) as p (plan, every) on p.plan = a.plan
)
select network, method, e ->> 0 as upstream, width_bucket((e ->> 2)::double precision, $5::double precision[]) as bucket,
    sum(weight)::bigint as calls, coalesce(sum(weight) filter (where e ->> 3 <> all($6::text[])), 0)::bigint as failures,
    count(*) filter (where reason = 'sampled') as sampled
from recent cross join lateral json_array_elements(attempts::json) as e
group by network, method, upstream, bucket;

-- count_captured
select count(*) from requests where account = any($1::text[]) and at >= $2 and surface in ('http', 'item', 'socket');

-- list_captured
-- Calls of these accounts that ended after one that was read before. A batch precedes its items.
select at, id, ms, network, surface, method, params from requests
where account = any($1::text[]) and (at, id) > ($2, $3) and surface in ('http', 'batch', 'item', 'socket')
order by at, id limit $4;
