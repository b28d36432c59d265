-- Webhooks: who wants to be told of what, what has happened, and how it was told.

-- How often the webhooks of a network were changed. Whoever changes one counts this up, and only then touches the webhook;
-- whoever writes a block's events holds it (for share). So a change is seen by all of a block's events, or by none.
create table webhook_versions (
    network text primary key,
    version bigint not null
);

create sequence webhook_numbers;

create table webhooks (
    -- What other tables know it by, where there are many rows.
    number bigint not null unique,
    id text primary key,
    account_id text not null references accounts (id),
    network text not null,
    -- Whether the network's coins are worth something: keys for tests do not reach such a webhook.
    live boolean not null,
    url text not null,
    event_type text not null,
    -- The filter, without its addresses.
    config json not null,
    -- How many addresses it watches; null: its filter has no such list.
    addresses integer,
    status text not null default 'active' check (status in ('active', 'paused', 'disabled', 'deleted')),
    -- Why it is not active: its owner, failures, the receiver is gone (410), or the operator.
    reason text check (reason in ('owner', 'failures', 'gone', 'operator')),
    -- Sealed: nonce and AES-GCM, with the webhook's id as what it belongs to. After a rotation the old one signs for a while.
    secret bytea not null,
    old_secret bytea,
    old_secret_until timestamptz,
    -- The network's version at its last change, and at the last change of all its addresses: later ones are in watch_changes.
    version bigint not null,
    addresses_version bigint not null,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now()
);

create index webhooks_of_account on webhooks (account_id, created_at desc, id) where status <> 'deleted';
create index webhooks_by_version on webhooks (network, version);
create index webhooks_deleted on webhooks (number) where status = 'deleted';

create table watched_addresses (
    webhook bigint not null,
    address bytea not null,
    primary key (webhook, address)
);

-- The last hour's additions and removals: whoever has a webhook's addresses in memory reads these instead of all.
create table watch_changes (
    webhook bigint not null,
    version bigint not null,
    address bytea not null,
    added boolean not null,
    changed_at timestamptz not null default now()
);

create index watch_changes_by_version on watch_changes (webhook, version);

-- Counts a network's version up, and tells those who keep its webhooks in memory.
create function change_webhooks(of_network text) returns bigint language plpgsql as $$
declare
    found_version bigint;
begin
    insert into webhook_versions as v (network, version) values (of_network, 1)
    on conflict (network) do update set version = v.version + 1
    returning v.version into found_version;
    perform pg_notify('penstock_webhooks', of_network);
    return found_version;
end $$;

-- Blocks whose calls are still to be looked into, because somebody watches transfers inside transactions.
create table trace_jobs (
    network text not null,
    block bigint not null,
    block_hash bytea not null,
    tries integer not null default 0,
    primary key (network, block)
);

-- What has happened, for one webhook. One that lacks nothing and waits for no block has a delivery.
create table events (
    -- From what happened and for whom: the same event has the same id.
    id text primary key,
    webhook_id text not null,
    network text not null,
    -- As the body says.
    type text not null,
    -- Where it is on the chain; null: nowhere yet, or a test.
    block bigint,
    block_hash bytea,
    -- What is posted, byte for byte. Not changed any more once it lacks nothing.
    body bytea not null,
    -- What must be found out first, as JSON.
    lacks json,
    -- The block that must be there first.
    after_block bigint,
    -- The event that this one takes back; and whether it was taken back itself.
    takes_back text,
    taken_back boolean not null default false,
    test boolean not null default false,
    created_at timestamptz not null default now()
);

create index events_by_block on events (network, block) where block is not null and not taken_back;
create index events_held on events (network, after_block) where after_block is not null;
create index events_lacking on events (network, created_at, id) where lacks is not null;
create index events_by_age on events (created_at);

-- The outbox: one row for each event that is to be told, or was.
create table deliveries (
    event_id text primary key,
    webhook_id text not null,
    -- due: to be sent from due_at on. Whoever takes it moves due_at to the end of a short lease, and counts claim up.
    -- over_quota: the account's day is used up; due_at is the next. parked: its webhook is not active. The other three are ends.
    state text not null default 'due'
        check (state in ('due', 'over_quota', 'parked', 'delivered', 'failed', 'dropped')),
    due_at timestamptz not null default clock_timestamp(),
    claim bigint not null default 0,
    -- Failed attempts since it was made, or was last asked for anew: its place in the schedule.
    tries smallint not null default 0,
    -- Whether it was taken from the account's day already: attempts after the first cost nothing.
    counted boolean not null default false,
    created_at timestamptz not null default clock_timestamp(),
    finished_at timestamptz
) with (fillfactor = 70);

create index deliveries_due on deliveries (webhook_id, due_at) where state in ('due', 'over_quota');
create index deliveries_parked on deliveries (webhook_id, created_at) where state = 'parked';
create index deliveries_of_webhook on deliveries (webhook_id, created_at desc, event_id);

-- Without a reference to its delivery, which would cost every attempt a look-up: what removes the one removes the other.
create table attempts (
    event_id text not null,
    -- The claim that it was made under: from 1, over all rounds. One that is missing began, and how it ended nobody knows.
    number bigint not null,
    began_at timestamptz not null,
    took_ms integer not null,
    -- How it ended, in a word.
    outcome text not null,
    -- The receiver's HTTP status, where it gave one; and how its reply begins, where that was no 2xx.
    status smallint,
    excerpt text,
    primary key (event_id, number)
);

-- What an account has used of its deliveries, by UTC day.
create table delivery_days (
    account_id text not null references accounts (id),
    day date not null,
    used bigint not null default 0 check (used >= 0),
    -- Whether its owner was told, in the log, that it is used up.
    told boolean not null default false,
    primary key (account_id, day)
);

-- Takes from an account's day as many deliveries as are wanted and left. `tell`: that they are used up is not in the log yet.
create function take_deliveries(account text, of_day date, wanted bigint, day_limit bigint, out granted bigint, out tell boolean)
language plpgsql as $$
declare
    d delivery_days;
begin
    insert into delivery_days (account_id, day) values (account, of_day) on conflict do nothing;
    select * into d from delivery_days where account_id = account and day = of_day for update;
    granted := greatest(0, least(wanted, day_limit - d.used));
    tell := granted < wanted and not d.told;
    update delivery_days set used = used + granted, told = told or granted < wanted
    where account_id = account and day = of_day;
end $$;

-- Letters to the holders of accounts, written in the transaction that they tell of.
create table mails (
    id bigint generated always as identity primary key,
    account_id text not null references accounts (id),
    kind text not null check (kind in ('webhook_paused')),
    -- What it tells of.
    about json not null,
    -- As with deliveries: whoever takes it moves this to the end of a lease.
    due_at timestamptz not null default clock_timestamp(),
    tries smallint not null default 0,
    created_at timestamptz not null default now(),
    -- Null: not sent yet. It was sent, or given up.
    ended_at timestamptz,
    sent boolean not null default false
);

create index mails_due on mails (due_at) where ended_at is null;
