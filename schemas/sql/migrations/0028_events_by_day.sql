-- Events and deliveries by day, so that old ones are dropped as whole tables.
--
-- This file adds what both forms need. split_by_day changes the form, which versions before this one do not survive: on a new
-- database `migrate` calls it at once, otherwise `migrate --finish`, when no process of such a version is left.

-- The day of the event's block, or that on which it was stored. -infinity until the tables are split.
alter table events add column day date not null default '-infinity';

-- `day`: that of its event. `table_day`: infinity while it is unfinished, then its day. -infinity until the tables are split.
alter table deliveries add column day date not null default '-infinity';
alter table deliveries add column table_day date not null default '-infinity';

-- Rows of days that have no table of their own.
create table events_of_other_days (
    like events including defaults including constraints,
    primary key (id)
);
create table deliveries_of_other_days (
    like deliveries including defaults including constraints,
    primary key (event_id)
);
alter table events_of_other_days alter column day set default (now() at time zone 'UTC')::date;
alter table deliveries_of_other_days
    alter column day set default (now() at time zone 'UTC')::date, alter column table_day set default 'infinity';

-- Once validated, they prove without a scan that the tables can become the partitions of rows from before.
alter table events add constraint events_before_days check (day = '-infinity') not valid;
alter table deliveries add constraint deliveries_before_days check (table_day = '-infinity') not valid;

-- Those that may be unfinished.
create view open_deliveries as select * from deliveries where table_day in ('-infinity', 'infinity');

-- The day under which an event is stored. Null: its block has none, or it has no block.
create function event_day(of_block date) returns date language sql stable as $$
    select '-infinity'::date
$$;

-- The new `table_day` of a delivery in this state. Rows from before stay where they are.
create function delivery_table(table_day date, day date, state text) returns date language sql immutable as $$
    select case
        when table_day = '-infinity' then table_day
        when state in ('delivered', 'failed', 'dropped') then day
        else 'infinity'
    end
$$;

create function is_split_by_day() returns boolean language sql stable as $$
    select exists (select from pg_partitioned_table where partrelid = to_regclass('events'))
$$;

-- Add the table for a day (UTC) to events or deliveries, unless it exists or rows of that day are among those of other days.
-- The owner's rights are enough, so that the service itself need not be allowed to create tables.
create function add_event_day(parent text, day date) returns void
language plpgsql security definer set search_path from current as $$
declare
    name text := parent || '_' || to_char(day, 'YYYYMMDD');
    details text := case parent
        when 'events' then 'primary key (id)'
        -- Only finished ones, so that a statement that confuses the tables fails.
        when 'deliveries' then 'primary key (event_id), check (state in (''delivered'', ''failed'', ''dropped''))'
    end;
begin
    if is_split_by_day() and to_regclass(name) is null then
        execute format(
            'create table %I partition of %I (%s) for values from (%L) to (%L)', name, parent, details, day, day + 1
        );
    end if;
exception when check_violation or duplicate_table then
    return;
end $$;

-- The tables of events or deliveries of days that ended before this time.
create function old_event_days(parent text, before timestamptz, out name text, out day date) returns setof record
language sql stable as $$
    select * from (
        select relname, to_date(right(relname, 8), 'YYYYMMDD') as day from pg_inherits join pg_class on oid = inhrelid
        where inhparent = to_regclass(parent) and relname ~ '_\d{8}$'
    ) days where (days.day + 1)::timestamp at time zone 'UTC' <= before
$$;

-- Drop the events of days that ended before this time and return how many days. A day stays while one of its events is newer.
-- Events that are still to be sent move to those of other days; other deliveries that refer to the day are deleted.
create function events_remove_days(before timestamptz) returns integer
language plpgsql security definer set search_path from current as $$
declare
    old record;
    is_needed boolean;
    removed integer := 0;
begin
    for old in select * from old_event_days('events', before) loop
        execute format('select exists (select from %I where created_at >= $1)', old.name) into is_needed using before;
        continue when is_needed;
        -- From here on no delivery of these events is added, redelivered or claimed.
        lock table events in access exclusive mode;
        delete from deliveries_of_other_days d where d.day = old.day;
        delete from deliveries d where table_day = 'infinity' and d.day = old.day and state not in ('due', 'over_quota');
        execute format('alter table events detach partition %I', old.name);
        execute format(
            'insert into events select * from %I where id in (
                select event_id from deliveries d where table_day = ''infinity'' and d.day = $1
            )', old.name
        ) using old.day;
        execute format('drop table %I', old.name);
        removed := removed + 1;
    end loop;
    return removed + remove_if_empty('events_before');
end $$;

-- Drop the deliveries of days whose events were dropped, and return how many days.
create function deliveries_remove_days(before timestamptz) returns integer
language plpgsql security definer set search_path from current as $$
declare
    old record;
    is_needed boolean;
    removed integer := 0;
begin
    for old in select * from old_event_days('deliveries', before) loop
        execute format('select exists (select from %I where created_at >= $1)', old.name) into is_needed using before;
        continue when is_needed or to_regclass('events_' || right(old.name, 8)) is not null;
        execute format('drop table %I', old.name);
        removed := removed + 1;
    end loop;
    return removed + remove_if_empty('deliveries_before');
end $$;

-- Drop the table of rows from before the split once it has none, and return how many tables were dropped.
create function remove_if_empty(name text) returns integer language plpgsql as $$
declare
    has_rows boolean := true;
begin
    if to_regclass(name) is not null then
        execute format('select exists (select from %I)', name) into has_rows;
    end if;
    if has_rows then
        return 0;
    end if;
    execute format('drop table %I', name);
    return 1;
end $$;

-- Make events and deliveries tables by day. The tables so far become the partitions of rows from before; empty ones are dropped.
-- Takes milliseconds, if the constraints events_before_days and deliveries_before_days are validated.
create function split_by_day() returns void language plpgsql as $$
begin
    perform lock_event_tables();
    if not is_split_by_day() then
        perform split_table('events', 'day');
        perform split_table('deliveries', 'table_day');
        create or replace function event_day(of_block date) returns date language sql stable as $function$
    select coalesce(of_block, (now() at time zone 'UTC')::date)
$function$;
    end if;
end $$;

-- Transactions of the service lock these tables in different orders: give up before one that waits could fail.
create function lock_event_tables() returns void language plpgsql as $$
begin
    set local lock_timeout = '200ms';
    for attempt in 1..100 loop
        begin
            lock table events, deliveries in access exclusive mode;
            return;
        exception when lock_not_available or deadlock_detected then
            perform pg_sleep(0.05);
        end;
    end loop;
    raise lock_not_available using message = 'the tables of events are busy', hint = 'run it again';
end $$;

-- Let a partitioned table with the same columns, indexes and rights take the place of one of both.
create function split_table(name text, key text) returns void language plpgsql as $$
declare
    before text := name || '_before';
    others text := name || '_of_other_days';
    indexes text[] := array(
        select pg_get_indexdef(indexrelid) from pg_index where indrelid = name::regclass and not indisunique order by 1
    );
    each text;
    has_rows boolean;
    holder record;
begin
    for each in select c.relname from pg_index join pg_class c on c.oid = indexrelid where indrelid = name::regclass loop
        execute format('alter index %I rename to %I', each, replace(each, name, before));
    end loop;
    execute format('alter table %I rename to %I', name, before);
    execute format('create table %I (like %I including defaults including constraints) partition by range (%I)', name, others, key);
    execute format('alter table %I attach partition %I default', name, others);
    if name = 'deliveries' then
        create table deliveries_open partition of deliveries (primary key (event_id)) for values from ('infinity') to (maxvalue)
            with (fillfactor = 70);
    end if;
    foreach each in array indexes loop
        execute each;
    end loop;
    for holder in
        select grantee::regrole as role, privilege_type as granted from pg_class, aclexplode(relacl)
        where oid = before::regclass and grantee not in (0, relowner)
    loop
        execute format('grant %s on %I to %s', holder.granted, name, holder.role);
    end loop;
    if name = 'deliveries' then
        create or replace view open_deliveries as select * from deliveries where table_day in ('-infinity', 'infinity');
    end if;
    execute format('select exists (select from %I)', before) into has_rows;
    if has_rows then
        execute format('alter table %I attach partition %I for values from (minvalue) to (''1970-01-01'')', name, before);
    else
        execute format('drop table %I', before);
    end if;
end $$;
