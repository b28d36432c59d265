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
-- Hosts that serve clients, except one. Gateways of the version before report no instance.
select count(distinct coalesce(report ->> 'instance', report ->> 'host')) from processes
where seen_at > now() - make_interval(secs => $1) and report ->> 'role' = 'gateway'
    and coalesce(report ->> 'instance', report ->> 'host') <> $2;

-- list_cordons
select upstream, label, reason, by_whom, created_at from cordons;

-- add_cordon
insert into cordons (upstream, label, reason, by_whom) values ($1, $2, $3, $4)
on conflict (upstream) do update set label = excluded.label, reason = excluded.reason, by_whom = excluded.by_whom, created_at = now();

-- drop_cordon
delete from cordons where upstream = $1;

-- list_followed
select network, first_block, block, block_time, fault, changed_at from followed_networks order by network;

-- count_deliveries
-- Unfinished deliveries. `late` counts those due for more than a minute and not claimed.
select count(*) filter (where state = 'due') as due,
    count(*) filter (where state = 'due' and due_at < now() - interval '1 minute') as late,
    count(*) filter (where state = 'over_quota') as over_quota,
    count(*) filter (where state = 'parked') as parked,
    min(due_at) filter (where state = 'due') as oldest_due_at
from deliveries where state in ('due', 'over_quota', 'parked');

-- count_webhooks
select status, count(*) as webhooks from webhooks where status <> 'deleted' group by status order by status;
