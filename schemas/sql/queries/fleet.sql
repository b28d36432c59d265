-- write_view
insert into worker_views (worker, view) values ($1, $2)
on conflict (worker) do update set view = excluded.view, seen_at = now();

-- delete_view
delete from worker_views where worker = $1;

-- delete_old_views
delete from worker_views where seen_at < now() - interval '1 minute';

-- list_views
-- Views of workers that reported within the given number of seconds.
select worker, seen_at, view from worker_views where seen_at > now() - make_interval(secs => $1) order by worker;

-- write_process
insert into processes (id, report) values ($1, $2)
on conflict (id) do update set report = excluded.report, seen_at = now();

-- delete_process
delete from processes where id = $1 or seen_at < now() - interval '1 minute';

-- list_processes
-- Processes that reported within the given number of seconds.
select report from processes where seen_at > now() - make_interval(secs => $1)
order by report ->> 'host', report ->> 'role', (report ->> 'pid')::bigint;

-- count_hosts
-- Hosts that serve clients, except one.
select count(distinct report ->> 'instance') from processes
where seen_at > now() - make_interval(secs => $1) and report ->> 'role' = 'gateway' and report ->> 'instance' <> $2;

-- list_cordons
select upstream, label, reason, by_whom, created_at from cordons;

-- add_cordon
insert into cordons (upstream, label, reason, by_whom) values ($1, $2, $3, $4)
on conflict (upstream) do update set label = excluded.label, reason = excluded.reason, by_whom = excluded.by_whom, created_at = now();

-- drop_cordon
delete from cordons where upstream = $1;

-- list_method_cordons
select upstream, method, label, reason from method_cordons order by label, method;

-- add_method_cordon
insert into method_cordons (upstream, method, label, reason, by_whom) values ($1, $2, $3, $4, $5)
on conflict (upstream, method) do update set
    label = excluded.label, reason = excluded.reason, by_whom = excluded.by_whom, created_at = now();

-- drop_method_cordon
delete from method_cordons where upstream = $1 and method = $2;

-- list_shares
select upstream, label, share, reason, changed_at from canary_shares;

-- set_share
insert into canary_shares (upstream, label, share, reason) values ($1, $2, $3, $4)
on conflict (upstream) do update set
    label = excluded.label, share = excluded.share, reason = excluded.reason, changed_at = now();

-- list_followed
select network, first_block, block, block_time, fault, stuck, changed_at from followed_networks order by network;

-- count_deliveries
-- Unfinished deliveries. `late` counts those due for more than a minute and not claimed.
select count(*) filter (where state = 'due') as due,
    count(*) filter (where state = 'due' and due_at < now() - interval '1 minute') as late,
    count(*) filter (where state = 'over_quota') as over_quota,
    count(*) filter (where state = 'parked') as parked,
    min(due_at) filter (where state = 'due') as oldest_due_at
from open_deliveries where state in ('due', 'over_quota', 'parked');

-- count_webhooks
select status, count(*) as webhooks from webhooks where status <> 'deleted' group by status order by status;

-- has_samples
select exists (select from upstream_samples where at >= $1::timestamptz);

-- add_samples
-- The first worker that writes a moment wins.
insert into upstream_samples (at, upstream, network, label, state, breaker, lag_blocks, error_rate, p50_ms, p99_ms)
select $1::timestamptz, * from unnest(
    $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::bigint[], $8::double precision[], $9::double precision[],
    $10::double precision[]
) on conflict do nothing;

-- delete_old_samples
delete from upstream_samples where at < now() - interval '3 days';

-- read_samples
-- The samples of an upstream, in steps of $4 seconds.
select date_bin(make_interval(secs => $4::double precision), at, $2::timestamptz) as at, avg(p50_ms) as p50_ms, max(p99_ms) as p99_ms,
    avg(error_rate) as error_rate, max(lag_blocks) as lag_blocks,
    avg(case when breaker = 'closed' then 0.0 else 1.0 end)::double precision as breaker_open, max(label) as label, max(network) as network
from upstream_samples where upstream = $1 and at >= $2 and at < $3::timestamptz
group by 1 order by 1;

-- list_samples
-- The samples of all upstreams since a time, oldest first.
select at, network, label, lag_blocks, error_rate, p50_ms from upstream_samples where at >= $1 order by label, at limit $2;

-- last_states
-- The newest sampled state of each upstream in the last day.
select distinct on (upstream) upstream, state from upstream_samples where at > now() - interval '1 day' order by upstream, at desc;

-- list_changes
-- Changes of state in the last day, newest first.
select upstream, network, label, at, before, state from (
    select upstream, network, label, at, state, lag(state) over (partition by upstream order by at) as before
    from upstream_samples where at > now() - interval '1 day'
) sampled where before <> state order by at desc, upstream limit $1;
