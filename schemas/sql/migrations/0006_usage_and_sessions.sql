-- What keys have used, who is signed in, and what workers say of themselves.

-- All keys of a disabled account are refused, and nobody is signed in to it.
alter table accounts add column disabled boolean not null default false;

-- Where a key may be used from: blocks of addresses, and origins of browsers. Empty: anywhere.
alter table keys
    add column allowed_ips text[] not null default '{}',
    add column allowed_origins text[] not null default '{}';

create table account_passwords (
    account_id text primary key references accounts (id),
    hash text not null,
    changed_at timestamptz not null default now()
);

-- An operator's credential for the dashboard, made on the command line. A revoked one ends its sessions.
create table admin_tokens (
    id text primary key,
    name text not null,
    digest bytea not null unique,
    hint text not null,
    created_at timestamptz not null default now(),
    last_used_at timestamptz,
    revoked_at timestamptz
);

-- Who is signed in: an account's holder or an operator. The cookie's token is not here, only its digest.
create table sessions (
    digest bytea primary key,
    account_id text references accounts (id),
    admin_token_id text references admin_tokens (id),
    created_at timestamptz not null default now(),
    seen_at timestamptz not null default now(),
    expires_at timestamptz not null,
    check (num_nonnulls(account_id, admin_token_id) = 1)
);

create index sessions_of_account on sessions (account_id) where account_id is not null;
create index sessions_by_end on sessions (expires_at);

-- Links that sign in once. Whoever uses one takes its row.
create table sign_in_links (
    digest bytea primary key,
    account_id text not null references accounts (id),
    created_at timestamptz not null default now(),
    expires_at timestamptz not null
);

create index sign_in_links_by_end on sign_in_links (expires_at);

-- Tries to sign in, by address and by e-mail, as digests: for each the moment up to which its bucket is used.
create unlogged table sign_in_tries (
    subject bytea primary key,
    edge timestamptz not null
);

-- One of these for each key, network and method that was used. And, so that a chart of an account reads few rows, its sums: over
-- all three (all are empty), and of each key, each network and each method (the other two are empty).
create table usage_series (
    id integer generated always as identity primary key,
    account_id text not null,
    key_id text not null,
    network text not null,
    method text not null,
    unique (account_id, key_id, network, method)
);

-- What was used in a minute, in an hour and in a day: written at once for all three, so that a chart of any length reads few
-- rows. t0 to t14 count the replies by the time that they took (core/usage has the edges).
create table usage (
    step text not null,
    series integer not null,
    at timestamptz not null,
    requests bigint not null,
    errors bigint not null,
    units bigint not null,
    hits bigint not null,
    t0 bigint not null, t1 bigint not null, t2 bigint not null, t3 bigint not null, t4 bigint not null,
    t5 bigint not null, t6 bigint not null, t7 bigint not null, t8 bigint not null, t9 bigint not null,
    t10 bigint not null, t11 bigint not null, t12 bigint not null, t13 bigint not null, t14 bigint not null,
    primary key (step, series, at)
) partition by list (step);

-- Room in each page for the next version of a row: the newest of each series is written again every few seconds.
create table usage_minutes partition of usage for values in ('minute') with (fillfactor = 80);
create table usage_hours partition of usage for values in ('hour') with (fillfactor = 60);
create table usage_days partition of usage for values in ('day') with (fillfactor = 60);

-- Small, and enough to find what is too old.
create index usage_by_time on usage using brin (at) with (autosummarize = on);

-- The last batch that each worker wrote: one that is sent again, because nobody knows how it ended, is not counted twice.
create table usage_batches (
    worker text primary key,
    number bigint not null,
    written_at timestamptz not null default now()
);

-- What each worker of the fleet sees: its connections, and the health of its upstreams.
create unlogged table worker_views (
    worker text primary key,
    seen_at timestamptz not null default now(),
    view json not null
);

-- Upstreams that take no calls, because an operator said so. Known by a digest of network and address, so that one that is moved
-- in the settings is still the same.
create table cordons (
    upstream text primary key,
    label text not null,
    reason text not null,
    by_whom text not null,
    created_at timestamptz not null default now()
);

create function notice_cordons() returns trigger language plpgsql as $$
begin
    perform pg_notify('penstock_cordons', '');
    return null;
end $$;

create trigger cordons_notice after insert or update or delete on cordons
for each statement execute function notice_cordons();
