-- Minutes of usage by day, so that old ones are dropped as whole tables, and the hours whose sums are out of date.

-- The table of all minutes so far becomes the default partition: it keeps its rows, and takes those of days without a table.
alter table usage detach partition usage_minutes;
create table usage_daily_minutes partition of usage for values in ('minute') partition by range (at);
alter table usage_daily_minutes attach partition usage_minutes default;

-- Hours with new minutes. One worker of the fleet adds them up to hours and days. `version` counts the changes.
create table usage_changed_hours (
    hour timestamptz primary key,
    version bigint not null default 1
);

-- When a worker last did a task that one worker of the fleet does for all.
create table usage_upkeep (
    task text primary key,
    done_at timestamptz not null
);

-- Add the table for the minutes of a day (UTC), unless it exists or rows of that day are in the default partition.
-- The owner's rights are enough, so that the service itself need not be allowed to create tables.
create function usage_add_day(day date) returns void language plpgsql security definer set search_path from current as $$
declare
    name text := 'usage_minutes_' || to_char(day, 'YYYYMMDD');
begin
    if to_regclass(name) is null then
        execute format(
            'create table %I partition of usage_daily_minutes for values from (%L) to (%L) with (fillfactor = 80)',
            name, day::timestamp at time zone 'UTC', (day + 1)::timestamp at time zone 'UTC'
        );
    end if;
exception when check_violation then
    return;
end $$;

-- Remove the tables of days that ended before this time, and return how many.
create function usage_remove_days(before timestamptz) returns integer language plpgsql security definer set search_path from current as $$
declare
    name text;
    removed integer := 0;
begin
    for name in
        select relname from pg_inherits join pg_class on oid = inhrelid
        where inhparent = 'usage_daily_minutes'::regclass and relname ~ '^usage_minutes_\d{8}$'
            and (to_date(right(relname, 8), 'YYYYMMDD') + 1)::timestamp at time zone 'UTC' <= before
    loop
        execute format('drop table %I', name);
        removed := removed + 1;
    end loop;
    return removed;
end $$;
