-- find_series
-- Ids of the given series, in their order; missing ones are created. Existing series are excluded from the insert,
-- because an upsert consumes a sequence number even on conflict.
with given as materialized (
    select * from unnest($1::text[], $2::text[], $3::text[], $4::text[]) with ordinality as g (account_id, key_id, network, method, place)
), known as materialized (
    select s.* from given join usage_series s using (account_id, key_id, network, method)
), made as (
    insert into usage_series (account_id, key_id, network, method)
    select account_id, key_id, network, method from given
    where not exists (select from known k where (k.account_id, k.key_id, k.network, k.method) = (given.account_id, given.key_id, given.network, given.method))
    order by account_id, key_id, network, method
    on conflict (account_id, key_id, network, method) do update set method = excluded.method
    returning *
)
select id from given join (select * from known union all select * from made) found using (account_id, key_id, network, method)
order by place;

-- lock_erased
-- The accounts that were erased. The lock makes an erasure of the others wait until their usage is written.
with held as materialized (
    select id, disabled and email = '' as is_erased from accounts where id = any($1::text[]) order by id for key share
)
select id from held where is_erased;

-- begin_batch
-- Returns no row if this batch was already written.
insert into usage_batches as b (worker, number) values ($1, $2)
on conflict (worker) do update set number = excluded.number, written_at = now() where b.number < excluded.number
returning number;

-- add_minutes
-- Add one batch to the minutes. The fixed order prevents deadlocks between hosts.
insert into usage as u
select 'minute', given.*
from unnest(
    $1::integer[], $2::timestamptz[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[],
    $8::bigint[], $9::bigint[], $10::bigint[], $11::bigint[], $12::bigint[], $13::bigint[], $14::bigint[], $15::bigint[],
    $16::bigint[], $17::bigint[], $18::bigint[], $19::bigint[], $20::bigint[], $21::bigint[], $22::bigint[], $23::bigint[],
    $24::bigint[]
) as given (
    series, at, requests, errors, units, hits, t0, t1, t2, t3, t4, t5, t6, t7, t8, t9, t10, t11, t12, t13, t14, faults,
    upstream_faults, joins
)
order by series, at
on conflict (step, series, at) do update set
    requests = u.requests + excluded.requests, errors = u.errors + excluded.errors,
    units = u.units + excluded.units, hits = u.hits + excluded.hits,
    t0 = u.t0 + excluded.t0, t1 = u.t1 + excluded.t1, t2 = u.t2 + excluded.t2, t3 = u.t3 + excluded.t3,
    t4 = u.t4 + excluded.t4, t5 = u.t5 + excluded.t5, t6 = u.t6 + excluded.t6, t7 = u.t7 + excluded.t7,
    t8 = u.t8 + excluded.t8, t9 = u.t9 + excluded.t9, t10 = u.t10 + excluded.t10, t11 = u.t11 + excluded.t11,
    t12 = u.t12 + excluded.t12, t13 = u.t13 + excluded.t13, t14 = u.t14 + excluded.t14,
    faults = u.faults + excluded.faults, upstream_faults = u.upstream_faults + excluded.upstream_faults,
    joins = u.joins + excluded.joins;

-- mark_hours
-- Note the hours of a batch: their sums are out of date. The last statement of its transaction, because others wait for it.
insert into usage_changed_hours as changed (hour)
select distinct date_trunc('hour', at, 'UTC') from unnest($1::timestamptz[]) as at order by 1
on conflict (hour) do update set version = changed.version + 1;

-- claim_upkeep
-- Returns no row if a worker did the task less than $2 seconds ago.
insert into usage_upkeep as u (task, done_at) values ($1, now())
on conflict (task) do update set done_at = excluded.done_at where u.done_at < now() - make_interval(secs => $2)
returning task;

-- changed_hours
select hour, version from usage_changed_hours order by hour;

-- sum_up
-- Set the rows of a step that begin at $3 to the sums of the smaller step $2 until $4. Sums never shrink: minutes may be
-- gone already, and processes of the previous version add to hours and days themselves.
insert into usage as u
select $1, series, $3, sum(requests), sum(errors), sum(units), sum(hits),
    sum(t0), sum(t1), sum(t2), sum(t3), sum(t4), sum(t5), sum(t6), sum(t7), sum(t8), sum(t9), sum(t10), sum(t11),
    sum(t12), sum(t13), sum(t14), sum(faults), sum(upstream_faults), sum(joins)
from usage where step = $2 and at >= $3 and at < $4
group by series
order by series
on conflict (step, series, at) do update set
    requests = excluded.requests, errors = excluded.errors, units = excluded.units, hits = excluded.hits,
    t0 = excluded.t0, t1 = excluded.t1, t2 = excluded.t2, t3 = excluded.t3, t4 = excluded.t4, t5 = excluded.t5,
    t6 = excluded.t6, t7 = excluded.t7, t8 = excluded.t8, t9 = excluded.t9, t10 = excluded.t10, t11 = excluded.t11,
    t12 = excluded.t12, t13 = excluded.t13, t14 = excluded.t14, faults = excluded.faults,
    upstream_faults = excluded.upstream_faults, joins = excluded.joins
where excluded.requests > u.requests;

-- settle_hour
-- Forget the mark of an hour that has not changed since, some time after its end: a process of the previous version may
-- add to an hour while it is summed up, which is corrected the next time.
delete from usage_changed_hours where hour = $1 and version = $2 and hour < now() - interval '70 minutes';

-- bound_locks
-- For this transaction: give up soon if a table is in use, because others wait behind this statement.
select set_config('lock_timeout', '2s', true);

-- add_days
-- Tables for the minutes of the days ahead.
select usage_add_day((now() at time zone 'UTC')::date + ahead) from generate_series(1, 2) as ahead;

-- remove_days
select usage_remove_days($1);

-- tune_planner
-- For this transaction: aggregate in memory, and skip JIT for short queries.
select set_config('work_mem', '64MB', true), set_config('jit', 'off', true);

-- chart
-- Usage over time, grouped by account, key, network, method or nothing. $6 to $8 select the series that are split by
-- key, network and method: if one dimension is enough, its sums are read instead of every combination. The $12
-- groups with the most requests are named; the rest is one group with a null name.
with wanted as materialized (
    select id, case $5::text when 'account' then account_id when 'key' then key_id when 'network' then network
        when 'method' then method else '' end as name
    from usage_series
    where ($4::text is null or account_id = $4)
        and (key_id <> '') = $6 and (network <> '') = $7 and (method <> '') = $8
        and ($9::text is null or key_id = $9) and ($10::text is null or network = $10) and ($11::text is null or method = $11)
), sums as materialized (
    select u.at, w.name, sum(requests)::bigint as requests, sum(errors)::bigint as errors, sum(units)::bigint as units,
        sum(hits)::bigint as hits, sum(t0)::bigint as t0, sum(t1)::bigint as t1, sum(t2)::bigint as t2, sum(t3)::bigint as t3, sum(t4)::bigint as t4,
        sum(t5)::bigint as t5, sum(t6)::bigint as t6, sum(t7)::bigint as t7, sum(t8)::bigint as t8, sum(t9)::bigint as t9,
        sum(t10)::bigint as t10, sum(t11)::bigint as t11, sum(t12)::bigint as t12, sum(t13)::bigint as t13, sum(t14)::bigint as t14,
        sum(faults)::bigint as faults, sum(upstream_faults)::bigint as upstream_faults, sum(joins)::bigint as joins
    from wanted w join usage u on u.series = w.id
    where u.step = $1 and u.at >= $2 and u.at < $3
    group by u.at, w.name
), ranked as (
    select name, row_number() over (order by sum(requests) desc, name) <= $12::integer as is_shown from sums group by name
)
select extract(epoch from s.at)::bigint as at, case when is_shown then name end as name, sum(requests)::bigint as requests,
    sum(errors)::bigint as errors, sum(units)::bigint as units, sum(hits)::bigint as hits,
    array[sum(t0), sum(t1), sum(t2), sum(t3), sum(t4), sum(t5), sum(t6), sum(t7), sum(t8), sum(t9), sum(t10), sum(t11),
        sum(t12), sum(t13), sum(t14)]::bigint[] as took, sum(faults)::bigint as faults, sum(upstream_faults)::bigint as upstream_faults,
    sum(joins)::bigint as joins
from sums s join ranked using (name)
group by s.at, 2;

-- methods
-- Calls of all accounts since $2 by network and method.
select s.network, s.method, sum(requests)::bigint as requests, sum(errors)::bigint as errors, sum(units)::bigint as units,
    sum(hits)::bigint as hits, sum(faults)::bigint as faults, sum(upstream_faults)::bigint as upstream_faults,
    sum(joins)::bigint as joins,
    array[sum(t0), sum(t1), sum(t2), sum(t3), sum(t4), sum(t5), sum(t6), sum(t7), sum(t8), sum(t9), sum(t10), sum(t11),
        sum(t12), sum(t13), sum(t14)]::bigint[] as took
from usage_series s join usage u on u.series = s.id
where s.key_id <> '' and s.network not in ('', '-') and s.method <> '' and u.step = $1 and u.at >= $2
group by s.network, s.method;

-- rows
-- Usage of an account in a period, oldest first, optionally of one key, network or method.
select u.at, s.key_id, k.name as key_name, nullif(s.network, '-') as network, s.method, requests, errors, units, hits,
    faults, upstream_faults, joins, array[t0, t1, t2, t3, t4, t5, t6, t7, t8, t9, t10, t11, t12, t13, t14] as took
from usage_series s join usage u on u.series = s.id left join keys k on k.id = s.key_id
where s.account_id = $4 and s.key_id <> '' and s.method <> '' and u.step = $1 and u.at >= $2 and u.at < $3
    and ($6::text is null or s.key_id = $6) and ($7::text is null or s.network = $7) and ($8::text is null or s.method = $8)
order by u.at, s.key_id, s.network, s.method
limit $5;

-- last_used
-- Last use of each key of an account: to the minute if recent, then to the hour, then to the day.
select s.key_id, max(coalesce(minute.at, hour.at, day.at)) as at
from usage_series s
left join lateral (select at from usage where step = 'minute' and series = s.id order by at desc limit 1) minute on true
left join lateral (select at from usage where step = 'hour' and series = s.id order by at desc limit 1) hour on true
left join lateral (select at from usage where step = 'day' and series = s.id order by at desc limit 1) day on true
where s.account_id = $1 and s.key_id <> '' and s.method = ''
group by s.key_id;

-- requests_of_day
-- From minutes, as charts are: the day's row is added up only now and then. It counts alone where minutes are not kept for a day.
select greatest(
    coalesce(sum(u.requests) filter (where u.step = 'minute'), 0), coalesce(max(u.requests) filter (where u.step = 'day'), 0)
)::bigint
from usage_series s join usage u on u.series = s.id
where s.account_id = $1 and s.key_id = '' and s.network = '' and s.method = ''
    and (u.step = 'day' and u.at = $2 or u.step = 'minute' and u.at >= $2 and u.at < $2 + interval '1 day');

-- try_lock
-- Held by one worker of the fleet at a time, until the end of the transaction.
select pg_try_advisory_xact_lock($1::integer, $2::integer);

-- delete_old_minutes
delete from usage_minutes where ctid = any(array(select ctid from usage_minutes where at < $1 limit $2));

-- delete_old_hours
delete from usage_hours where ctid = any(array(select ctid from usage_hours where at < $1 limit $2));

-- delete_old_days
delete from usage_days where ctid = any(array(select ctid from usage_days where at < $1 limit $2));

-- delete_old_batches
delete from usage_batches where written_at < now() - interval '2 days';
