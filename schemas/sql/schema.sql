-- The whole database as it is after every migration, for reading and for review. Nothing runs this file: migrations/ makes
-- the database, and a test compares the two. Whoever adds a migration writes here what it leads to.

-- Accounts and keys

-- Who pays. A limit of its own goes before the plan's; null: the plan's. A day of 0 has no limit.
create table accounts (
    id text primary key,
    name text not null,
    email text not null,
    plan text not null,
    requests_per_second integer check (requests_per_second > 0),
    units_per_second integer check (units_per_second > 0),
    requests_per_day bigint check (requests_per_day >= 0),
    created_at timestamptz not null default now(),
    changed_at timestamptz not null default now()
);

create index accounts_by_change on accounts (changed_at);

-- A key's place among the buckets that a host's workers share.
create sequence key_slots minvalue 0 start 0;

-- What opens the service. Only the keyed digest of a key is kept, and the hint that may be shown of it. Keys are never
-- deleted: a revoked one stays revoked.
create table keys (
    id text primary key,
    account_id text not null references accounts (id),
    -- The first key of a line of rotations: what belongs to a key belongs to its lineage.
    lineage_id text not null,
    -- A rotated key keeps its predecessor's slot, so the two share one allowance.
    slot bigint not null default nextval('key_slots'),
    name text not null,
    mode text not null check (mode in ('live', 'test')),
    digest bytea not null unique,
    hint text not null,
    -- Empty: all scopes.
    scopes text[] not null default '{}',
    status text not null default 'active' check (status in ('active', 'disabled', 'revoked')),
    -- When a key that was rotated ends; null: never.
    expires_at timestamptz,
    -- Its own limits; null: its account's, then the plan's.
    requests_per_second integer check (requests_per_second > 0),
    units_per_second integer check (units_per_second > 0),
    created_at timestamptz not null default now(),
    changed_at timestamptz not null default now()
);

create index keys_of_account on keys (account_id, created_at);
create index keys_by_change on keys (changed_at);

-- Changes: stamped with the time at which they were made, not at which their transaction began, and told to whoever listens
-- on penstock_accounts and penstock_keys. A new account is told of by its first key.

create function stamp_change() returns trigger language plpgsql as $$
begin
    new.changed_at := clock_timestamp();
    return new;
end $$;

create function notice_change() returns trigger language plpgsql as $$
begin
    perform pg_notify('penstock_' || tg_table_name, new.id);
    return null;
end $$;

create trigger accounts_stamp before update on accounts for each row execute function stamp_change();
create trigger accounts_notice after update on accounts for each row execute function notice_change();
create trigger keys_stamp before insert or update on keys for each row execute function stamp_change();
create trigger keys_notice after insert or update on keys for each row execute function notice_change();

-- Daily quotas

-- What an account has used of a day, or workers have leased of it. Days end at 00:00 UTC.
create table quota_days (
    account_id text not null references accounts (id),
    day date not null,
    used bigint not null default 0 check (used >= 0),
    primary key (account_id, day)
);

-- Leases a part of an account's day: how much of what was wanted is granted.
create function lease_quota(account text, of_day date, wanted bigint, day_limit bigint) returns bigint
language plpgsql as $$
declare
    before bigint;
    granted bigint;
begin
    insert into quota_days (account_id, day) values (account, of_day) on conflict do nothing;
    select used into before from quota_days where account_id = account and day = of_day for update;
    granted := greatest(0, least(wanted, day_limit - before));
    update quota_days set used = used + granted where account_id = account and day = of_day;
    return granted;
end $$;

-- The migrations themselves

-- Which files have been applied; kept by the runner.
create table schema_migrations (
    name text primary key,
    applied_at timestamptz not null default now()
);
