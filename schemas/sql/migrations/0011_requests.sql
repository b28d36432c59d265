-- Records of requests, by day, and whether those of an account have params.
-- contract: close_request_days drops days of this new table only; no version before 1.0.0 reads it

alter table accounts add column record_params boolean not null default false;

create table requests (
    at timestamptz not null,
    id text not null,
    account text not null,
    key text not null,
    network text not null,
    surface text not null,
    method text not null,
    status integer not null,
    reason text not null,
    units integer not null,
    cache text not null,
    ms double precision not null,
    bytes bigint not null,
    block bigint not null,
    error text not null,
    blame text not null,
    attempts text not null,
    params text
) partition by range (at);

create index requests_by_id on requests (id, at desc);
create index requests_of_account on requests (account, at desc);

create function open_request_day(day date) returns void language plpgsql as $$
declare
    name text := 'requests_' || to_char(day, 'YYYYMMDD');
begin
    perform pg_advisory_xact_lock(hashtext('requests'));
    if to_regclass(name) is null then
        execute format('create table %I partition of requests for values from (%L) to (%L)',
            name, day::timestamp at time zone 'utc', (day + 1)::timestamp at time zone 'utc');
    end if;
end $$;

create function close_request_days(before date) returns void language plpgsql as $$
declare
    name text;
begin
    perform pg_advisory_xact_lock(hashtext('requests'));
    for name in
        select c.relname from pg_inherits i join pg_class c on c.oid = i.inhrelid
        where i.inhparent = 'requests'::regclass and c.relname < 'requests_' || to_char(before, 'YYYYMMDD')
    loop
        execute format('drop table %I', name);
    end loop;
end $$;
