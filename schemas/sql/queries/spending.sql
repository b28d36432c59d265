-- add
-- Add one batch. The fixed order prevents deadlocks between processes.
insert into spending as s
select $1::date, given.*
from unnest($2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::bigint[], $8::bigint[], $9::bigint[])
    as given (upstream, network, method, account_id, key_id, calls, credits, nanos)
order by upstream, method, account_id, key_id
on conflict (day, upstream, method, account_id, key_id) do update set
    calls = s.calls + excluded.calls, credits = s.credits + excluded.credits, nanos = s.nanos + excluded.nanos;

-- read
-- Sums of the days from $1 to $2, by one column ($3), the largest first.
select case $3::text
        when 'upstream' then upstream when 'method' then method when 'network' then network
        when 'account' then account_id when 'key' then key_id when 'day' then day::text
    end as name,
    sum(calls)::bigint as calls, sum(credits)::bigint as credits, sum(nanos)::bigint as nanos
from spending
where day between $1 and $2 and ($4::text is null or account_id = $4)
group by 1 order by 4 desc, 3 desc, 1;

-- rows
-- Every row of the days from $1 to $2, up to $3.
select day, upstream, network, method, account_id, key_id, calls, credits, nanos from spending
where day between $1 and $2
order by day, upstream, method, account_id, key_id
limit $3;

-- calls
-- Calls since a day that were made for clients and for the service itself, by network and method.
select network, method, sum(calls)::bigint as calls from spending where day >= $1 group by 1, 2 order by 1, 2;

-- methods
-- What the calls of the days from $1 to $2 cost by network and method, the dearest first.
select network, method, sum(calls)::bigint as calls, sum(credits)::bigint as credits, sum(nanos)::bigint as nanos
from spending where day between $1 and $2 group by 1, 2 order by 5 desc, 4 desc, 1, 2;

-- accounts
-- What each account cost from $1 to $2, with its requests and units, the dearest $3 first. A deleted account has no name.
select s.account_id as id, coalesce(a.name, '') as name, coalesce(a.plan, '') as plan, s.calls, s.credits, s.nanos, u.requests, u.units
from (
    select account_id, sum(calls)::bigint as calls, sum(credits)::bigint as credits, sum(nanos)::bigint as nanos
    from spending where day between $1 and $2 and account_id <> '' group by 1 order by 4 desc, 3 desc, 1 limit $3
) s
left join accounts a on a.id = s.account_id
left join lateral (
    select coalesce(sum(requests), 0)::bigint as requests, coalesce(sum(units), 0)::bigint as units
    from usage_series e join usage on usage.series = e.id
    where e.account_id = s.account_id and e.key_id = '' and e.network = '' and e.method = '' and usage.step = 'day'
        and usage.at >= $1::date::timestamp at time zone 'UTC' and usage.at < ($2::date + 1)::timestamp at time zone 'UTC'
) u on true
order by s.nanos desc, s.credits desc, s.account_id;

-- lease
-- Lease a part of a budget ($1) for the period that begins on $2.
select granted, remaining from lease_budget($1, $2, $3, $4);

-- give_back
update budget_periods set used = greatest(0, used - $3) where budget = $1 and begins = $2;

-- used
-- The credits of budgets that are used or leased, for the periods that begin on these days.
select b.budget, b.used from budget_periods b
join unnest($1::text[], $2::date[]) as given (budget, begins) on (b.budget, b.begins) = (given.budget, given.begins);

-- accounts_over
-- The accounts that have spent at least $3 credits on these upstreams since a day.
select account_id from spending
where upstream = any($1::text[]) and day >= $2 and account_id <> ''
group by 1 having sum(credits) >= $3;

-- limits
-- The limits that operators have set.
select budget, credits, set_by, set_at from budget_limits;

-- set_limit
insert into budget_limits (budget, credits, set_by) values ($1, $2, $3)
on conflict (budget) do update set credits = excluded.credits, set_by = excluded.set_by, set_at = now();

-- clear_limit
delete from budget_limits where budget = $1;
