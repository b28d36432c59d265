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

-- lease
-- Lease a part of a budget ($1) for the period that begins on $2.
select granted, remaining from lease_budget($1, $2, $3, $4);

-- give_back
update budget_periods set used = greatest(0, used - $3) where budget = $1 and begins = $2;

-- used
-- The credits of budgets that are used or leased, for the periods that begin on these days.
select b.budget, b.used from budget_periods b
join unnest($1::text[], $2::date[]) as given (budget, begins) on (b.budget, b.begins) = (given.budget, given.begins);
