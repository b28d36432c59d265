-- The step after migrations that versions before it do not survive.

-- is_split
select is_split_by_day();

-- older_processes
-- Processes that reported within the given number of seconds and lack the migration.
select report ->> 'role' as role, report ->> 'host' as host, report ->> 'pid' as pid from processes
where seen_at > now() - make_interval(secs => $2) and coalesce(report ->> 'schema', '') < $1::text
order by 2, 1, 3;

-- validate_events
alter table events validate constraint events_before_days;

-- validate_deliveries
alter table deliveries validate constraint deliveries_before_days;

-- split
select split_by_day();
