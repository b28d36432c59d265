-- Delivery attempts by day, so that old ones are dropped as whole tables.
-- contract: attempts_remove_days drops days of this new table only; no version before 1.0.0 reads it

-- Attempts of this version and later ones. Those in `attempts` are deleted with their events, as before.
create table attempts_by_day (
    like attempts
) partition by range (began_at);

-- Attempts of days that have no table of their own. The columns of a unique index of all days would have to include the time.
create table attempts_of_other_days partition of attempts_by_day (unique (event_id, number)) default;

create view delivery_attempts as select * from attempts union all select * from attempts_by_day;

-- Add the table for the attempts of a day (UTC), unless it exists or attempts of that day are among those of other days.
-- The owner's rights are enough, so that the service itself need not be allowed to create tables.
create function attempts_add_day(day date) returns void language plpgsql security definer set search_path from current as $$
declare
    name text := 'attempts_' || to_char(day, 'YYYYMMDD');
begin
    if to_regclass(name) is null then
        execute format(
            'create table %I partition of attempts_by_day (unique (event_id, number)) for values from (%L) to (%L)',
            name, day::timestamp at time zone 'UTC', (day + 1)::timestamp at time zone 'UTC'
        );
    end if;
exception when check_violation or duplicate_table then
    return;
end $$;

-- Remove the tables of days that ended before this time, and return how many.
create function attempts_remove_days(before timestamptz) returns integer language plpgsql security definer set search_path from current as $$
declare
    name text;
    removed integer := 0;
begin
    for name in
        select relname from pg_inherits join pg_class on oid = inhrelid
        where inhparent = 'attempts_by_day'::regclass and relname ~ '^attempts_\d{8}$'
            and (to_date(right(relname, 8), 'YYYYMMDD') + 1)::timestamp at time zone 'UTC' <= before
    loop
        execute format('drop table %I', name);
        removed := removed + 1;
    end loop;
    return removed;
end $$;
