-- The schema of 1.0.0.

-- Accounts and keys

-- Indexes into the rate limit buckets that a host's workers share.
create sequence key_slots minvalue 0 start 0;

-- Customers. A limit of null means the plan's limit; 0 requests per day means no limit.
create table accounts (
    id text primary key,
    name text not null,
    email text not null,
    plan text not null,
    requests_per_second integer check (requests_per_second > 0),
    units_per_second integer check (units_per_second > 0),
    requests_per_day bigint check (requests_per_day >= 0),
    created_at timestamptz not null default now(),
    -- Keys and sessions of a disabled account are rejected.
    disabled boolean not null default false,
    -- Whether records of its requests have params.
    record_params boolean not null default false,
    -- Until then all its requests are recorded (`penstock capture`). Null: only the usual ones.
    captured_until timestamptz,
    changed_at timestamptz not null default now(),
    -- The buckets that all its keys share.
    slot bigint not null default nextval('key_slots')
);

create index accounts_by_change on accounts (changed_at);
create index accounts_by_email on accounts (lower(email));

-- API keys. Only a keyed digest and a displayable hint are stored. Rows are never deleted: a revoked key stays revoked.
create table keys (
    id text primary key,
    account_id text not null references accounts (id),
    -- The first key in a chain of rotations. Resources of a key belong to its lineage.
    lineage_id text not null,
    -- Used if the key has lower limits than its account. A rotated key keeps its predecessor's slot.
    slot bigint not null default nextval('key_slots'),
    name text not null,
    mode text not null check (mode in ('live', 'test')),
    digest bytea not null unique,
    hint text not null,
    -- Empty means all scopes.
    scopes text[] not null default '{}',
    status text not null default 'active' check (status in ('active', 'disabled', 'revoked')),
    -- When the key ends, as its holder chose or because it was rotated. Null means never.
    expires_at timestamptz,
    -- Limits of the key. Null means the account's, then the plan's.
    requests_per_second integer check (requests_per_second > 0),
    units_per_second integer check (units_per_second > 0),
    -- CIDR blocks and browser origins from which the key can be used. Empty means anywhere.
    allowed_ips text[] not null default '{}',
    allowed_origins text[] not null default '{}',
    -- Networks, methods of JSON-RPC and contracts that the key can be used for. Empty means all.
    allowed_networks text[] not null default '{}',
    allowed_methods text[] not null default '{}',
    allowed_contracts text[] not null default '{}',
    -- Whether requests may have the key in their URL, which is easily logged or copied.
    allow_in_url boolean not null default false,
    -- Whether its transactions go to relays only, and never to the public mempool.
    private_transactions boolean not null default false,
    -- For people: who answers for the key, and what it is for.
    owner text not null default '',
    note text not null default '',
    created_at timestamptz not null default now(),
    changed_at timestamptz not null default now(),
    -- While the pepper is rotated: the digest under the other pepper.
    previous_digest bytea,
    -- The number of the pepper that `digest` was made with.
    pepper integer not null default 1,
    -- The directives that requests with the key may use. Null means the usual ones.
    directives text[],
    -- How replies to a test key are spoiled, as in X-Fault. Null means not at all.
    fault text
);

create index keys_of_account on keys (account_id, created_at);
create index keys_by_change on keys (changed_at);

-- Change notifications. Changes are stamped with the time of the statement, not of the transaction, and notified on the
-- channels penstock_accounts and penstock_keys. A new account is announced by its first key.

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

-- Peppers that keys of this database were made with, as check values that reveal nothing about them. A pepper is retired at
-- the end of its rotation.
create table peppers (
    number integer primary key,
    check_value bytea not null unique,
    since timestamptz not null default clock_timestamp(),
    retired_at timestamptz
);

-- Daily quotas

-- Requests that an account has used, or that workers have leased, per UTC day.
create table quota_days (
    account_id text not null references accounts (id),
    day date not null,
    used bigint not null default 0 check (used >= 0),
    primary key (account_id, day)
);

-- Lease a part of an account's daily quota; returns the granted amount.
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

-- Blocks and holdings

-- The follower's cursor of each network. Other tables refer to a network by its number, which takes two bytes.
create table followed_networks (
    number smallint generated always as identity primary key,
    network text not null unique,
    -- The first block written by the follower; earlier ones come from back-fills. Null if never followed.
    first_block bigint,
    -- The last block written. Writers compare and set both columns, so no block is written twice.
    block bigint,
    block_hash bytea,
    block_time timestamptz,
    -- Why the follower has stopped. Null while it runs.
    fault text,
    changed_at timestamptz not null default now(),
    -- False once blocks were written without holdings, because those are in another database.
    indexes_holdings boolean not null default true,
    -- Why the follower makes no progress although it goes on trying. Null while it moves.
    stuck text,
    -- How many blocks one table of transfers has. Null before the first.
    transfer_span bigint
);

-- Blocks that a reorganisation can still remove.
create table recent_blocks (
    network smallint not null references followed_networks (number),
    number bigint not null,
    hash bytea not null,
    primary key (network, number)
);

-- Sums of transfers. Negative if the index starts after the first transfer, or if the contract breaks the standard.
-- Rows at zero stay, because a contract can pay interest without an event. Each network has separate tables.
create table token_holdings (
    network smallint not null,
    holder bytea not null,
    contract bytea not null,
    amount numeric not null,
    primary key (network, holder, contract)
) partition by list (network);

-- Holders of a contract. Without the amount: a row whose indexed columns stay the same is updated in place.
create index token_holders on token_holdings (network, contract);

-- One row per token and holder. Rows at zero are deleted.
create table nft_holdings (
    network smallint not null,
    -- 721 or 1155.
    standard smallint not null,
    holder bytea not null,
    contract bytea not null,
    token_id numeric not null,
    amount numeric not null,
    primary key (network, holder, contract, token_id)
) partition by list (network);

create index nft_holders on nft_holdings (network, contract, holder) include (amount);
create index nft_holdings_at_zero on nft_holdings (network) where amount = 0;
-- Holders of a token that can have many.
create index nft_holders_of_token on nft_holdings (network, contract, token_id) where standard = 1155;

-- Add the tables for the holdings of a network when its row is added. The parts are attached when they are complete, which
-- blocks no reads. The owner's rights are enough, so that the service itself need not be allowed to create tables.
create function holdings_add_network() returns trigger language plpgsql security definer set search_path from current
set lock_timeout = '2s' as $$
declare
    parent text;
    part text;
begin
    foreach parent in array array['token_holdings', 'nft_holdings'] loop
        part := parent || '_' || new.number;
        execute format('create table %I (like %I including all) partition by hash (holder)', part, parent);
        for remainder in 0..7 loop
            execute format(
                'create table %I partition of %I for values with (modulus 8, remainder %s) with (fillfactor = 90)',
                part || '_' || remainder, part, remainder
            );
        end loop;
        execute format('alter table %I attach partition %I for values in (%s)', parent, part, new.number);
    end loop;
    return null;
end $$;

create trigger holdings_add_network after insert on followed_networks
for each row execute function holdings_add_network();

-- Changes that each recent block made to holdings, to undo them after a reorganisation. Not compressed, because they
-- are written far more often than read.
create table holding_changes (
    network smallint not null,
    block bigint not null,
    changes bytea not null,
    primary key (network, block)
);

alter table holding_changes alter column changes set storage external;

-- Sums of transfers that a back-fill has read and not merged into the holdings yet, packed.
create table staged_holdings (
    network smallint not null references followed_networks (number),
    id bigint generated always as identity,
    -- Those of holders whose first byte is below this are in the holdings already.
    merged smallint not null default 0,
    changes bytea not null,
    primary key (network, id)
);

alter table staged_holdings alter column changes set storage external;

-- Blocks below the follower's first that were indexed later, for all contracts (empty) or for a single one.
create table backfills (
    network smallint not null references followed_networks (number),
    contract bytea not null default '',
    covered int8multirange not null,
    primary key (network, contract)
);

-- Transfers

-- One row per transfer, in one table per network and range of blocks. No column is null, which would cost eight bytes a row:
-- contract is empty for the native coin, recipient for a transaction that creates a contract, token_id for fungible tokens.
-- There is no unique index: coverage is changed in the same transaction as the rows, so that none is written twice.
create table transfers (
    block bigint not null,
    -- The order within a block; core/transfer_history defines it.
    place bigint not null,
    -- The position of its transaction's hash in transfer_blocks.transactions, counted from 0.
    tx integer not null,
    network smallint not null,
    -- 1: native, 2: internal, 20, 721, 1155.
    category smallint not null,
    sender bytea not null,
    recipient bytea not null,
    contract bytea not null,
    -- Unsigned, big-endian, without zero bytes in front: two thirds of a numeric, and empty for 0.
    amount bytea not null,
    token_id bytea not null
) partition by list (network);

-- One number of 30 bits of an address's hash and 34 of the block (17 billion) makes an entry a third smaller than the two columns
-- would. It orders the transfers of an address by block; readers compare the whole address.
create index transfers_of_sender on transfers ((hashtextextended(encode(sender, 'hex'), 0) << 34 | block));
create index transfers_of_recipient on transfers ((hashtextextended(encode(recipient, 'hex'), 0) << 34 | block));
-- One entry per 32 pages: finds the rows of a block, and the pages that may have rows of a contract.
create index transfers_by_block on transfers using brin (
    block, contract bytea_bloom_ops (n_distinct_per_range = 500, false_positive_rate = 0.01)
) with (pages_per_range = 32, autosummarize = on);

-- The blocks that have transfers.
create table transfer_blocks (
    number bigint not null,
    -- Seconds since 1970.
    time bigint not null,
    network smallint not null,
    hash bytea not null,
    -- The hashes of the transactions that have transfers, 32 bytes each.
    transactions bytea not null,
    primary key (network, number)
) partition by list (network);

-- Hashes cannot be compressed, and a part of them is read without the rest.
alter table transfer_blocks alter column transactions set storage external;

-- The blocks whose transfers of a category are all in the table: those from `since` to the follower's block, and those in
-- `covered`. `since` is null while the follower does not write the category.
create table transfer_coverage (
    network smallint not null references followed_networks (number),
    category smallint not null,
    since bigint,
    covered int8multirange not null default '{}',
    primary key (network, category)
);

create function transfers_add_network() returns trigger language plpgsql security definer set search_path from current
set lock_timeout = '2s' as $$
declare
    part text;
begin
    part := 'transfers_' || new.number;
    execute format('create table %I (like transfers including all) partition by range (block)', part);
    execute format('alter table transfers attach partition %I for values in (%s)', part, new.number);
    part := 'transfer_blocks_' || new.number;
    execute format('create table %I (like transfer_blocks including all) partition by range (number)', part);
    execute format('alter table transfer_blocks attach partition %I for values in (%s)', part, new.number);
    return null;
end $$;

create trigger transfers_add_network after insert on followed_networks
for each row execute function transfers_add_network();

-- Add the tables for the transfers of these blocks, unless they exist. `width`: the blocks per table, if the network has none
-- yet. The tables are attached when they are complete, which blocks no reads. The owner's rights are enough.
create function transfers_open(of_network smallint, low bigint, high bigint, width bigint) returns void
language plpgsql security definer set search_path from current set lock_timeout = '2s' as $$
declare
    span bigint;
    parent text;
    part text;
begin
    if high >> 34 > 0 then
        raise exception 'block % is too high: the index has 34 bits for its number', high;
    end if;
    select transfer_span into span from followed_networks where number = of_network;
    if span is null then
        update followed_networks set transfer_span = coalesce(transfer_span, width) where number = of_network
        returning transfer_span into span;
    end if;
    for piece in low / span .. high / span loop
        foreach parent in array array['transfers_' || of_network, 'transfer_blocks_' || of_network] loop
            part := parent || '_' || piece;
            if to_regclass(part) is null then
                execute format('create table %I (like %I including all)', part, parent);
                execute format(
                    'alter table %I attach partition %I for values from (%s) to (%s)', parent, part, piece * span, (piece + 1) * span
                );
            end if;
        end loop;
    end loop;
end $$;

-- Remove the tables of blocks that are all below this one, and return how many. Waits a second for readers at most.
create function transfers_drop(of_network smallint, below bigint) returns integer
language plpgsql security definer set search_path from current set lock_timeout = '1s' as $$
declare
    span bigint;
    part text;
    removed integer := 0;
begin
    select transfer_span into span from followed_networks where number = of_network;
    for part in
        select relname from pg_inherits join pg_class on oid = inhrelid
        where inhparent in (to_regclass('transfers_' || of_network), to_regclass('transfer_blocks_' || of_network))
            and (substring(relname from '\d+$')::bigint + 1) * span <= below
    loop
        execute format('drop table %I', part);
        removed := removed + 1;
    end loop;
    if removed > 0 then
        update transfer_coverage set
            covered = covered * int8multirange(int8range(below / span * span, null)),
            since = case when since is not null then greatest(since, below / span * span) end
        where network = of_network;
    end if;
    return removed;
end $$;

-- The same in a transaction that must not fail: without effect while readers are in the way, to be called again.
create function transfers_expire(of_network smallint, below bigint) returns integer language plpgsql as $$
begin
    return transfers_drop(of_network, below);
exception when lock_not_available then
    return 0;
end $$;

-- Delete the transfers of blocks above this one. Only the newest pages are read, whatever the planner knows about them.
create function transfers_delete_above(of_network smallint, last bigint) returns void
language sql set enable_seqscan = off as $$
    delete from transfers where network = of_network and block > last;
    delete from transfer_blocks where network = of_network and number > last;
$$;

-- Transfers of a contract in a range of blocks, in any order. Reads the pages that may have some, and stops at `most` rows.
create function transfers_of_contract(of_network smallint, of_contract bytea, low bigint, high bigint, most integer)
returns setof transfers language sql stable set enable_seqscan = off set enable_indexscan = off as $$
    select * from transfers where network = of_network and contract = of_contract and block between low and high limit most;
$$;

-- Transfers of one transaction of a block, in any order.
create function transfers_of_transaction(of_network smallint, of_block bigint, of_tx integer)
returns setof transfers language sql stable set enable_seqscan = off set enable_indexscan = off as $$
    select * from transfers where network = of_network and block = of_block and tx = of_tx;
$$;

-- The first block with transfers at this time or later; null if there is none. Times grow with the blocks, so it halves the
-- range of blocks until they meet.
create function transfers_block_at(of_network smallint, at bigint) returns bigint language plpgsql stable as $$
declare
    low bigint;
    high bigint;
    middle bigint;
    found record;
begin
    select min(number), max(number) + 1 into low, high from transfer_blocks where network = of_network;
    while low < high loop
        middle := (low + high) / 2;
        select number, time into found from transfer_blocks where network = of_network and number >= middle order by number limit 1;
        if found.number is null or found.time >= at then
            high := middle;
        else
            low := found.number + 1;
        end if;
    end loop;
    return (select number from transfer_blocks where network = of_network and number >= high and time >= at order by number limit 1);
end $$;

-- Migrations

-- Applied migration files, maintained by the migration runner, which creates the table before it applies this file.
create table if not exists schema_migrations (
    name text primary key,
    applied_at timestamptz not null default now()
);

-- Wallets and operations

create table wallets (
    -- The lineage of the key that created it.
    lineage_id text not null,
    network text not null,
    address bytea not null check (length(address) = 20),
    owner bytea not null check (length(owner) = 20),
    salt bytea not null check (length(salt) = 32),
    -- EntryPoint version, and the contract that deploys the wallet.
    version text not null,
    factory bytea not null,
    created_at timestamptz not null default now(),
    -- Deployment. Null until deployed, and again if a reorganisation removes it.
    deployed_at timestamptz,
    deploy_tx bytea,
    deploy_block bigint,
    deploy_block_hash bytea,
    primary key (lineage_id, network, address)
);

create index wallets_in_order on wallets (lineage_id, created_at desc, address);
create index wallets_by_address on wallets (network, address);
create index wallets_by_block on wallets (network, deploy_block) where deploy_block is not null;

-- Number of wallets, updated on each insert. Serves the account's limit and list totals without counting.
create table wallet_counts (
    lineage_id text not null,
    network text not null,
    account_id text not null references accounts (id),
    wallets bigint not null,
    primary key (lineage_id, network)
);

create index wallet_counts_of_account on wallet_counts (account_id);

-- Create a wallet unless it exists. Returns 'new', 'known', or 'full' if the account has reached its limit. If another
-- lineage has the same address, its deployment is copied.
create function create_wallet(
    account text, lineage text, of_network text, at bytea, of_owner bytea, with_salt bytea, for_version text, by_factory bytea,
    most bigint
) returns text language plpgsql as $$
declare
    other wallets;
begin
    -- Serialise per account: two concurrent calls must not both take the last place, nor deadlock on it.
    perform pg_advisory_xact_lock(hashtextextended('wallets of ' || account, 0));
    if exists (select from wallets where lineage_id = lineage and network = of_network and address = at) then
        return 'known';
    end if;
    if coalesce((select sum(wallets) from wallet_counts where account_id = account), 0) >= most then
        return 'full';
    end if;
    select * into other from wallets where network = of_network and address = at and deploy_tx is not null limit 1;
    insert into wallets (
        lineage_id, network, address, owner, salt, version, factory, deployed_at, deploy_tx, deploy_block, deploy_block_hash
    ) values (
        lineage, of_network, at, of_owner, with_salt, for_version, by_factory,
        other.deployed_at, other.deploy_tx, other.deploy_block, other.deploy_block_hash
    );
    insert into wallet_counts as c (lineage_id, network, account_id, wallets) values (lineage, of_network, account, 1)
    on conflict (lineage_id, network) do update set wallets = c.wallets + 1;
    return 'new';
end $$;

create table operations (
    network text not null,
    -- The hash computed by the EntryPoint.
    hash bytea not null check (length(hash) = 32),
    lineage_id text not null,
    key_id text not null,
    entry_point bytea not null,
    sender bytea not null,
    nonce numeric not null,
    -- As sent by the caller.
    operation jsonb not null,
    -- seen: recorded, possibly being sent. sent: accepted by a bundler. included: on the chain, and its call succeeded.
    -- failed: refused by a bundler (error is set), or on the chain and its call failed (block is set), or its nonce was
    -- used by another operation (both are set).
    status text not null default 'seen' check (status in ('seen', 'sent', 'included', 'failed')),
    -- Error of the bundler or of the service, as JSON.
    error text,
    block bigint,
    block_hash bytea,
    transaction bytea,
    cost_wei numeric,
    seen_at timestamptz not null default now(),
    changed_at timestamptz not null default now(),
    -- The newest block when it was recorded; it can only be included in a later one. Null if unknown.
    seen_block bigint,
    primary key (network, hash, lineage_id)
);

create index operations_of_key on operations (lineage_id, seen_at desc);
create index operations_by_block on operations (network, block) where block is not null;
-- Pending operations, by the nonce that another operation may use up.
create index operations_waiting on operations (network, sender, nonce) where status in ('seen', 'sent');
-- For deleting old operations, and sooner those that were never accepted.
create index operations_by_change on operations (changed_at);
create index operations_unsent on operations (changed_at) where block is null and status in ('seen', 'failed');

-- Private transactions, from before they are sent to relays

create table private_transactions (
    network text not null,
    hash bytea not null check (length(hash) = 32),
    account_id text not null references accounts (id) on delete cascade,
    key_id text not null,
    -- seen: recorded, possibly being sent. sent: accepted by a relay. refused: all relays refused it. cancelled: by its sender.
    -- public: sent to the public mempool, as its sender asked. done: it is in a block, or can never be.
    status text not null default 'seen' check (status in ('seen', 'sent', 'refused', 'cancelled', 'public', 'done')),
    -- The signed transaction, and the block after which it is sent to the public mempool. Null: never.
    raw bytea,
    public_after bigint,
    created_at timestamptz not null default now(),
    primary key (network, hash, account_id)
);

create index private_transactions_due on private_transactions (network, public_after) where status in ('seen', 'sent');
create index private_transactions_by_age on private_transactions (created_at);
create index private_transactions_of_account on private_transactions (network, account_id, created_at);

-- Gas policies and the ledger

create table gas_policies (
    id text primary key,
    account_id text not null references accounts (id),
    network text not null,
    -- Whether the network is live. Test keys cannot use such a policy.
    live boolean not null,
    name text not null,
    -- As submitted by the owner.
    rules json not null,
    status text not null default 'active' check (status in ('active', 'paused', 'deleted')),
    -- Incremented by each change. A decision based on an older revision is made again.
    revision integer not null default 1,
    -- Rules that the ledger enforces. Null means no restriction.
    max_total numeric,
    max_per_user numeric,
    max_per_user_per_day bigint,
    reset text not null default 'never' check (reset in ('never', 'daily', 'weekly', 'monthly')),
    rate_requests bigint,
    rate_seconds bigint,
    rate_by_user boolean not null default false,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now()
);

create index gas_policies_of_account on gas_policies (account_id, created_at desc, id) where status <> 'deleted';

-- Reserved and spent amounts per day and in total (-infinity), per sender and for all senders (empty).
create table gas_meters (
    policy_id text not null references gas_policies (id),
    sender bytea not null,
    day date not null,
    reserved numeric not null default 0 check (reserved >= 0),
    spent numeric not null default 0 check (spent >= 0),
    operations bigint not null default 0 check (operations >= 0),
    primary key (policy_id, sender, day)
) with (fillfactor = 70);

-- Amount reserved and spent per day by all policies of an account whose plan has a limit.
create table gas_account_days (
    account_id text not null references accounts (id),
    day date not null,
    used numeric not null default 0 check (used >= 0),
    primary key (account_id, day)
) with (fillfactor = 70);

-- Recent refusals of each policy and their rules, shown to the owner. Inserted in batches and trimmed with each batch.
create table gas_refusals (
    policy_id text not null references gas_policies (id),
    at timestamptz not null,
    sender bytea not null,
    rule text not null,
    message text not null
);

create index gas_refusals_of_policy on gas_refusals (policy_id, at desc);

-- Rate limit windows of policies. A window starts with the first request after the previous one has ended.
create table gas_rates (
    policy_id text not null references gas_policies (id),
    sender bytea not null,
    began timestamptz not null,
    granted bigint not null,
    primary key (policy_id, sender)
) with (fillfactor = 70);

create index gas_rates_of_policy on gas_rates (policy_id, began);

-- The amount that a policy pays, or may have to pay, for one nonce of one sender. Several signatures can share a nonce;
-- only one of them can be included.
--   open: `held` is the maximum cost of any of them.
--   spent: one was included and cost `cost`; the rest stays held until its block is final, because a reorganisation
--   could bring in another.
--   final: nothing is held.
-- Expired reservations are deleted.
create table gas_reservations (
    id bigint generated always as identity primary key,
    policy_id text not null references gas_policies (id),
    -- The account whose daily amount includes it. Null if the account had no limit when it was reserved.
    account_id text references accounts (id),
    network text not null,
    entry_point bytea not null,
    sender bytea not null,
    nonce numeric not null,
    -- The day whose meters include it.
    day date not null,
    state text not null default 'open' check (state in ('open', 'spent', 'final')),
    held numeric not null check (held >= 0),
    cost numeric not null default 0 check (cost >= 0),
    -- Highest price of one whole coin among the signatures.
    price numeric not null,
    -- Latest expiry of the signatures, in chain time (Unix seconds).
    valid_until bigint not null,
    -- Not included in any block up to this one.
    since_block bigint not null,
    op_hash bytea,
    block bigint,
    block_hash bytea,
    transaction bytea,
    looked_at timestamptz not null default '-infinity',
    created_at timestamptz not null default now(),
    unique (network, sender, nonce, entry_point, policy_id)
);

create index gas_reservations_open on gas_reservations (network, valid_until) where state = 'open';
create index gas_reservations_spent on gas_reservations (network, block) where state <> 'open';
-- Partial, because only a small share of all reservations is not final.
create index gas_reservations_unsettled on gas_reservations (network) where state in ('open', 'spent');
create index gas_reservations_landed on gas_reservations (network, block) where state = 'spent';
create index gas_reservations_of_policy on gas_reservations (policy_id, created_at desc);

-- Signatures that can still be included, or were and are not final.
create table gas_signatures (
    network text not null,
    -- The hash computed by the EntryPoint.
    op_hash bytea not null,
    reservation_id bigint not null references gas_reservations (id) on delete cascade,
    -- Identifies the operation and its paymaster, regardless of the validity period.
    digest bytea not null,
    -- paymasterData.
    data bytea not null,
    worst numeric not null,
    -- Price of one whole coin.
    price numeric not null,
    valid_until bigint not null,
    primary key (network, op_hash)
);

create index gas_signatures_of_reservation on gas_signatures (reservation_id);

-- Amount that counts towards a limit on this day, over the days of the reset period.
create function gas_used(of_policy text, of_sender bytea, reset text, of_day date) returns numeric
language sql stable as $$
    select coalesce(sum(reserved + spent), 0) from gas_meters
    where policy_id = of_policy and sender = of_sender and case reset
        when 'never' then day = '-infinity'
        when 'daily' then day = of_day
        when 'weekly' then day >= date_trunc('week', of_day)::date and day < (date_trunc('week', of_day) + '7 days')::date
        else day >= date_trunc('month', of_day)::date and day < (date_trunc('month', of_day) + '1 month')::date
    end
$$;

-- Update the four meters of an operation, always in the same order, and the daily amount of its account.
create function gas_move(r gas_reservations, more_reserved numeric, more_spent numeric, more_operations bigint)
returns void language plpgsql as $$
declare
    who bytea;
    whichever date;
    more_used numeric := more_reserved + more_spent;
begin
    foreach who in array array[''::bytea, r.sender] loop
        foreach whichever in array array['-infinity'::date, r.day] loop
            update gas_meters set
                reserved = reserved + more_reserved, spent = spent + more_spent, operations = operations + more_operations
            where policy_id = r.policy_id and sender = who and day = whichever;
            if not found then
                insert into gas_meters (policy_id, sender, day, reserved, spent, operations)
                values (r.policy_id, who, whichever, more_reserved, more_spent, more_operations);
            end if;
        end loop;
    end loop;
    -- Moving an amount from reserved to spent needs no lock on the row that other policies share.
    if r.account_id is not null and more_used <> 0 then
        update gas_account_days set used = used + more_used where account_id = r.account_id and day = r.day;
    end if;
end $$;

-- Take one request from the policy's rate limit. Returns null, or the seconds until the next one is available.
create function gas_take_rate(p gas_policies, of_sender bytea, at timestamptz) returns numeric language plpgsql as $$
declare
    who bytea := case when p.rate_by_user then of_sender else '' end;
    w gas_rates;
begin
    if p.rate_requests is null then
        return null;
    end if;
    select * into w from gas_rates where policy_id = p.id and sender = who;
    if found and at < w.began + make_interval(secs => p.rate_seconds) then
        if w.granted >= p.rate_requests then
            return ceil(extract(epoch from w.began + make_interval(secs => p.rate_seconds) - at));
        end if;
        update gas_rates set granted = granted + 1 where policy_id = p.id and sender = who;
        return null;
    end if;
    -- Each new window deletes two expired ones; otherwise a row would remain for every sender ever seen.
    delete from gas_rates where policy_id = p.id and sender in (
        select sender from gas_rates
        where policy_id = p.id and began <= at - make_interval(secs => p.rate_seconds) order by began limit 2);
    insert into gas_rates (policy_id, sender, began, granted) values (p.id, who, at, 1)
    on conflict (policy_id, sender) do update set began = at, granted = 1;
    return null;
end $$;

-- Reserve the maximum cost of an operation, if every limit of its policy and account allows it, and record the
-- signature. The policy's row is locked first, which serialises all changes to its meters; so is the account's day, if
-- the account has a limit.
-- outcome: granted; same (`data` is the earlier signature); a rule that refuses, with the remaining amount; absent;
-- stale (the policy has changed); used (the nonce is spent); twice (another policy has reserved the same hash).
create function gas_reserve(
    of_policy text, at_revision integer, on_network text, at_entry_point bytea, of_sender bytea, of_nonce numeric,
    with_digest bytea, with_hash bytea, with_data bytea, of_worst numeric, at_price numeric, until bigint, fresh_until bigint,
    at_block bigint, at timestamptz, account_most numeric default null,
    out outcome text, out remains numeric, out data bytea, out worst numeric, out valid_until bigint
) language plpgsql as $$
declare
    p gas_policies;
    r gas_reservations;
    s gas_signatures;
    more numeric := of_worst;
    of_day date := (at at time zone 'UTC')::date;
begin
    select * into p from gas_policies where id = of_policy and status <> 'deleted' for no key update;
    if not found then
        outcome := 'absent';
        return;
    end if;
    if p.revision <> at_revision then
        outcome := 'stale';
        return;
    end if;
    if exists (
        select from gas_reservations g
        where g.network = on_network and g.sender = of_sender and g.nonce = of_nonce and g.entry_point = at_entry_point
            and g.state <> 'open'
    ) then
        outcome := 'used';
        return;
    end if;
    select * into r from gas_reservations g
    where g.network = on_network and g.sender = of_sender and g.nonce = of_nonce and g.entry_point = at_entry_point
        and g.policy_id = p.id;
    if r.id is not null then
        select * into s from gas_signatures g
        where g.reservation_id = r.id and g.digest = with_digest and g.valid_until >= fresh_until
        order by g.valid_until desc limit 1;
        if found then
            outcome := 'same';
            data := s.data;
            worst := s.worst;
            valid_until := s.valid_until;
            return;
        end if;
        of_day := r.day;
        more := greatest(0, of_worst - r.held);
    end if;

    if p.max_total is not null then
        remains := p.max_total - gas_used(p.id, '', p.reset, of_day);
        if more > remains then
            outcome := 'max_total_usd';
            remains := greatest(remains, 0);
            return;
        end if;
    end if;
    if p.max_per_user is not null then
        remains := p.max_per_user - gas_used(p.id, of_sender, p.reset, of_day);
        if more > remains then
            outcome := 'max_per_user_usd';
            remains := greatest(remains, 0);
            return;
        end if;
    end if;
    if p.max_per_user_per_day is not null and r.id is null then
        remains := p.max_per_user_per_day - coalesce(
            (select operations from gas_meters m where m.policy_id = p.id and m.sender = of_sender and m.day = of_day), 0);
        if remains < 1 then
            outcome := 'max_per_user_per_day';
            remains := 0;
            return;
        end if;
    end if;
    if account_most is not null then
        insert into gas_account_days (account_id, day) values (p.account_id, of_day) on conflict do nothing;
        select account_most - d.used into remains from gas_account_days d
        where d.account_id = p.account_id and d.day = of_day for update;
        if more > remains then
            outcome := 'sponsored_usd_per_day';
            remains := greatest(remains, 0);
            return;
        end if;
    end if;
    if exists (select from gas_signatures g where g.network = on_network and g.op_hash = with_hash) then
        outcome := 'twice';
        return;
    end if;
    -- Last, because it consumes a request.
    remains := gas_take_rate(p, of_sender, at);
    if remains is not null then
        outcome := 'rate_limit';
        return;
    end if;

    if r.id is null then
        insert into gas_reservations as g (
            policy_id, account_id, network, entry_point, sender, nonce, day, held, price, valid_until, since_block, created_at
        ) values (
            p.id, case when account_most is not null then p.account_id end, on_network, at_entry_point, of_sender, of_nonce,
            of_day, of_worst, at_price, until, at_block, at
        ) returning * into r;
        perform gas_move(r, of_worst, 0, 1);
    else
        update gas_reservations g set held = g.held + more, price = greatest(g.price, at_price),
            valid_until = greatest(g.valid_until, until)
        where g.id = r.id;
        perform gas_move(r, more, 0, 0);
    end if;
    insert into gas_signatures (network, op_hash, reservation_id, digest, data, worst, price, valid_until)
    values (on_network, with_hash, r.id, with_digest, with_data, of_worst, at_price, until);
    outcome := 'granted';
    data := with_data;
    worst := of_worst;
    valid_until := until;
end $$;

-- Lock a reservation in the common order: its policy first.
create function gas_lock(reservation bigint) returns gas_reservations language plpgsql as $$
declare
    r gas_reservations;
begin
    perform from gas_policies where id = (select policy_id from gas_reservations where id = reservation) for no key update;
    select * into r from gas_reservations where id = reservation for update;
    return r;
end $$;

-- Settle an included operation: record its actual cost at the price when it was signed. The rest stays held. `coin` is
-- one whole coin in its smallest unit. Returns the reservation that pays, or null if there is none.
-- An unknown hash is one of the operations signed for the nonce: it costs at most the held amount, and if several
-- policies have signed, the one that holds most pays.
create function gas_settle(
    on_network text, at_entry_point bytea, of_sender bytea, of_nonce numeric, with_hash bytea, wei numeric, coin numeric,
    in_block bigint, in_block_hash bytea, in_transaction bytea
) returns bigint language plpgsql as $$
declare
    s gas_signatures;
    r gas_reservations;
    true_cost numeric;
    from_held numeric;
begin
    select * into s from gas_signatures where network = on_network and op_hash = with_hash;
    if found then
        r := gas_lock(s.reservation_id);
    else
        r := gas_lock((
            select g.id from gas_reservations g
            where g.network = on_network and g.sender = of_sender and g.nonce = of_nonce and g.entry_point = at_entry_point
            order by (g.op_hash = with_hash) desc nulls last, g.held + g.cost desc, g.id limit 1
        ));
    end if;
    if r.id is null then
        return null;
    end if;
    if r.state = 'final' or (
        r.state = 'spent' and r.op_hash = with_hash and r.block = in_block and r.block_hash = in_block_hash
    ) then
        return r.id;
    end if;
    if r.state = 'spent' then
        perform gas_reopen(r.id);
        r := gas_lock(r.id);
    end if;
    true_cost := div(wei * coalesce(s.price, r.price) + coin - 1, coin);
    if s.op_hash is null then
        true_cost := least(true_cost, r.held);
    end if;
    from_held := least(true_cost, r.held);
    update gas_reservations set state = 'spent', cost = true_cost, held = held - from_held, op_hash = with_hash,
        block = in_block, block_hash = in_block_hash, transaction = in_transaction
    where id = r.id;
    perform gas_move(r, -from_held, true_cost, 0);
    return r.id;
end $$;

-- The operation is no longer on the chain: hold its full amount again.
create function gas_reopen(reservation bigint) returns void language plpgsql as $$
declare
    r gas_reservations := gas_lock(reservation);
begin
    if r.id is null or r.state = 'open' then
        return;
    end if;
    update gas_reservations set state = 'open', held = held + cost, cost = 0,
        op_hash = null, block = null, block_hash = null, transaction = null
    where id = r.id;
    perform gas_move(r, r.cost, -r.cost, 0);
end $$;

-- The block is final, so no other signature can be included: release the rest.
create function gas_close(reservation bigint, final_block bigint) returns void language plpgsql as $$
declare
    r gas_reservations := gas_lock(reservation);
begin
    if r.id is null or r.state <> 'spent' or r.block > final_block then
        return;
    end if;
    update gas_reservations set state = 'final', held = 0 where id = r.id;
    delete from gas_signatures where reservation_id = r.id;
    perform gas_move(r, -r.held, 0, 0);
end $$;

-- No signature was included, and all have expired by the time of a final block: delete the reservation.
create function gas_release(reservation bigint, final_time bigint) returns void language plpgsql as $$
declare
    r gas_reservations := gas_lock(reservation);
begin
    if r.id is null or r.state <> 'open' or r.valid_until >= final_time then
        return;
    end if;
    delete from gas_reservations where id = r.id;
    perform gas_move(r, -r.held, 0, -1);
    delete from gas_meters
    where policy_id = r.policy_id and sender = r.sender and day in ('-infinity', r.day)
        and reserved = 0 and spent = 0 and operations = 0;
end $$;

-- Webhooks

-- Version of each network's webhooks. A change increments it before touching the webhook; writing a block's events
-- locks it for share. So a change applies to all events of a block or to none.
create table webhook_versions (
    network text primary key,
    version bigint not null
);

create sequence webhook_numbers;

create table webhooks (
    -- Compact key for tables with many rows.
    number bigint not null unique,
    id text primary key,
    account_id text not null references accounts (id),
    network text not null,
    -- Whether the network is live. Test keys cannot use such a webhook.
    live boolean not null,
    url text not null,
    event_type text not null,
    -- The filter without its addresses.
    config json not null,
    -- Number of watched addresses. Null if the filter has no address list.
    addresses integer,
    status text not null default 'active' check (status in ('active', 'paused', 'disabled', 'deleted')),
    -- Why it is not active: the owner, failures, a 410 from the receiver (gone), or the operator.
    reason text check (reason in ('owner', 'failures', 'gone', 'operator')),
    -- Encrypted: nonce and AES-GCM ciphertext, with the webhook's id as associated data. After a rotation the old
    -- secret keeps signing for a while.
    secret bytea not null,
    old_secret bytea,
    old_secret_until timestamptz,
    -- The network's version at the last change of the webhook, and at the last replacement of its address list. Later
    -- additions and removals are in watch_changes.
    version bigint not null,
    addresses_version bigint not null,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    -- Whether a test key created it; and how its deliveries are spoiled then. Null means not at all.
    test_key boolean not null default false,
    fault text
);

create index webhooks_of_account on webhooks (account_id, created_at desc, id) where status <> 'deleted';
create index webhooks_by_version on webhooks (network, version);
create index webhooks_deleted on webhooks (number) where status = 'deleted';

create table watched_addresses (
    webhook bigint not null,
    address bytea not null,
    primary key (webhook, address)
);

-- Additions and removals of the last hour. Processes that hold a webhook's addresses in memory read these instead of
-- the whole list.
create table watch_changes (
    webhook bigint not null,
    version bigint not null,
    address bytea not null,
    added boolean not null,
    changed_at timestamptz not null default now()
);

create index watch_changes_by_version on watch_changes (webhook, version);
create index watch_changes_by_age on watch_changes (changed_at);

-- Increment a network's version and notify the processes that hold its webhooks in memory.
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

-- The version of a network's webhooks for which its mempool is watched. Absent while it is not watched.
-- `watched_at`: when that was last confirmed.
create table mempool_watches (
    network text primary key,
    version bigint not null,
    watched_at timestamptz not null default now()
);

-- Transactions that a webhook has named, to look up whether they were mined before. Deleted once that is known.
create table mined_lookups (
    webhook_id text not null references webhooks (id) on delete cascade,
    network text not null,
    tx_hash text not null,
    created_at timestamptz not null default now(),
    primary key (webhook_id, tx_hash)
);

create index mined_lookups_by_network on mined_lookups (network, created_at);

-- Blocks still to be traced for webhooks that watch internal transfers.
create table trace_jobs (
    network text not null,
    block bigint not null,
    block_hash bytea not null,
    tries integer not null default 0,
    primary key (network, block)
);

-- Events of webhooks, one table per day. A delivery exists once the event is complete and waits for no block.
create table events (
    -- Derived from the webhook and the position on the chain, so the same event always has the same id. Unique in each table.
    id text not null,
    webhook_id text not null,
    network text not null,
    -- As in the body.
    type text not null,
    -- Position on the chain. Null for pending transactions and tests.
    block bigint,
    block_hash bytea,
    -- The request body, byte for byte. Unchanged once the event is complete.
    body bytea not null,
    -- Missing data, as JSON. Null if the event is complete.
    lacks json,
    -- The block to wait for.
    after_block bigint,
    -- Finality tag to wait for; after_block is then the event's block. Null to wait for a number of blocks.
    finality text check (finality in ('safe', 'finalized')),
    -- The event that this one revokes, and whether this one was itself revoked.
    takes_back text,
    taken_back boolean not null default false,
    test boolean not null default false,
    created_at timestamptz not null default now(),
    -- Whether the fault plan of its webhook added it.
    injected boolean not null default false,
    -- The day of the event's block, or that on which it was stored.
    day date not null default (now() at time zone 'UTC')::date
) partition by range (day);

create table events_of_other_days partition of events (primary key (id)) default;

create index events_by_block on events (network, block) where block is not null and not taken_back;
create index events_held on events (network, after_block) where after_block is not null;
create index events_final on events (network, finality, after_block) where finality is not null;
create index events_lacking on events (network, created_at, id) where lacks is not null;
create index events_by_age on events (created_at);

-- The outbox: one row per event that is ready to send or was sent. Unfinished ones are in one table, others in one per day.
create table deliveries (
    event_id text not null,
    webhook_id text not null,
    -- due: to be sent from due_at on. A claim moves due_at to the end of a short lease and increments `claim`.
    -- over_quota: the account's daily deliveries are used up; due_at is the next day. parked: the webhook is not
    -- active. The other three states are final.
    state text not null default 'due'
        check (state in ('due', 'over_quota', 'parked', 'delivered', 'failed', 'dropped')),
    due_at timestamptz not null default clock_timestamp(),
    claim bigint not null default 0,
    -- Failed attempts since it was created or last redelivered: the position in the retry schedule.
    tries smallint not null default 0,
    -- Whether it was counted towards the daily quota. Only the first attempt counts.
    counted boolean not null default false,
    created_at timestamptz not null default clock_timestamp(),
    finished_at timestamptz,
    -- `day`: that of its event. `table_day`: infinity while it is unfinished, then its day.
    day date not null default (now() at time zone 'UTC')::date,
    table_day date not null default 'infinity'
) partition by range (table_day);

create table deliveries_of_other_days partition of deliveries (primary key (event_id)) default;

create table deliveries_open partition of deliveries (primary key (event_id)) for values from ('infinity') to (maxvalue)
    with (fillfactor = 70);

create index deliveries_due on deliveries (webhook_id, due_at) where state in ('due', 'over_quota');
create index deliveries_parked on deliveries (webhook_id, created_at) where state = 'parked';
-- `table_day` lets a webhook's deliveries be counted by table without reading the rows.
create index deliveries_of_webhook on deliveries (webhook_id, created_at desc, event_id) include (table_day);

-- Unfinished deliveries. An update that finishes one moves it to the table of its day.
create view open_deliveries as select * from deliveries where table_day = 'infinity';

-- The `table_day` of a delivery in this state, whose event is of this day.
create function delivery_table(day date, state text) returns date language sql immutable as $$
    select case when state in ('delivered', 'failed', 'dropped') then day else 'infinity' end
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
    if to_regclass(name) is null then
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
-- Events that are still to be sent move to those of other days; other deliveries that refer to the day are deleted, also those
-- that have waited for the account's quota since then.
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
        delete from deliveries d where table_day = 'infinity' and d.day = old.day and state <> 'due';
        execute format('alter table events detach partition %I', old.name);
        execute format(
            'insert into events select * from %I where id in (
                select event_id from deliveries d where table_day = ''infinity'' and d.day = $1
            )', old.name
        ) using old.day;
        execute format('drop table %I', old.name);
        removed := removed + 1;
    end loop;
    return removed;
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
    return removed;
end $$;

-- Delivery attempts, one table per day. No foreign key to deliveries, which would cost a look-up per attempt.
create table attempts (
    event_id text not null,
    -- The claim of the attempt, starting at 1 over all rounds. A gap is an attempt whose outcome is unknown.
    number bigint not null,
    began_at timestamptz not null,
    took_ms integer not null,
    -- The outcome as a code.
    outcome text not null,
    -- HTTP status of the receiver, if it replied, and the beginning of its reply unless that was a 2xx.
    status smallint,
    excerpt text,
    -- Header lines without secrets, and the beginning of the reply's body.
    sent text,
    reply_headers text,
    reply_body text
) partition by range (began_at);

-- Whether the outcome of a delivery's last claim is not known yet.
create function attempt_is_open(event text, claim bigint, state text) returns boolean language sql stable
set search_path from current as $$
    select state not in ('delivered', 'failed') and claim > 0
        and not exists (select from attempts where event_id = event and number = claim)
$$;

-- Attempts of days that have no table of their own. The columns of a unique index of all days would have to include the time.
create table attempts_of_other_days partition of attempts (unique (event_id, number)) default;

-- Add the table for the attempts of a day (UTC), unless it exists or attempts of that day are among those of other days.
-- The owner's rights are enough, so that the service itself need not be allowed to create tables.
create function attempts_add_day(day date) returns void language plpgsql security definer set search_path from current as $$
declare
    name text := 'attempts_' || to_char(day, 'YYYYMMDD');
begin
    if to_regclass(name) is null then
        execute format(
            'create table %I partition of attempts (unique (event_id, number)) for values from (%L) to (%L)',
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
        where inhparent = 'attempts'::regclass and relname ~ '^attempts_\d{8}$'
            and (to_date(right(relname, 8), 'YYYYMMDD') + 1)::timestamp at time zone 'UTC' <= before
    loop
        execute format('drop table %I', name);
        removed := removed + 1;
    end loop;
    return removed;
end $$;

-- Deliveries used per account and UTC day.
create table delivery_days (
    account_id text not null references accounts (id),
    day date not null,
    used bigint not null default 0 check (used >= 0),
    -- Whether the log reports that the quota is used up.
    told boolean not null default false,
    -- Addresses and other filter values that were written into webhooks.
    filter_values bigint not null default 0,
    primary key (account_id, day)
);

-- Events of webhooks per account and UTC day: those stored, and those dropped above the plan's limit. A row for each network, so
-- that followers of different networks do not wait for each other.
create table event_days (
    account_id text not null references accounts (id),
    day date not null,
    network text not null,
    stored bigint not null default 0,
    dropped bigint not null default 0,
    primary key (account_id, day, network)
);

-- Take up to the wanted number of deliveries from an account's day. `tell` is true if the log does not report yet that
-- the quota is used up.
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

-- Emails to account holders, inserted in the transaction that causes them.
create table mails (
    id bigint generated always as identity primary key,
    account_id text not null references accounts (id),
    kind text not null check (kind in ('webhook_paused', 'alert')),
    -- Data for the text.
    about json not null,
    -- As for deliveries: a claim moves it to the end of a lease.
    due_at timestamptz not null default clock_timestamp(),
    tries smallint not null default 0,
    created_at timestamptz not null default now(),
    -- Time at which it was sent or given up. Null while pending.
    ended_at timestamptz,
    sent boolean not null default false
);

create index mails_due on mails (due_at) where ended_at is null;

-- Alerts

-- Which alerts an account wants, and whether by mail.
create table alert_settings (
    account_id text primary key references accounts (id),
    -- The kinds that are wanted.
    kinds text[] not null,
    -- Raise error_rate above this share of failed requests.
    error_percent integer not null check (error_percent between 1 and 100),
    by_mail boolean not null
);

-- Each threshold is raised once per period: a day, or the period of a policy's budget. A row is written in the transaction
-- of its mail and its event.
create table alerts (
    id bigint generated always as identity primary key,
    account_id text not null references accounts (id),
    kind text not null,
    -- The id of the webhook or policy; empty for the account.
    subject text not null,
    threshold integer not null,
    period text not null,
    -- False if a higher threshold was reached at the same time: only the highest one is sent.
    is_sent boolean not null,
    about json not null,
    -- The event of the account's webhook for alerts, if it has one.
    event_id text,
    raised_at timestamptz not null default now(),
    unique (account_id, kind, subject, threshold, period)
);

create index alerts_of_account on alerts (account_id, raised_at desc) where is_sent;
create index alerts_by_age on alerts (raised_at);

-- Announcements

-- Short notices by operators, shown in every dashboard.
create table announcements (
    id bigint generated always as identity primary key,
    level text not null check (level in ('info', 'warning', 'critical')),
    text text not null,
    starts_at timestamptz not null,
    ends_at timestamptz not null,
    by_whom text not null,
    created_at timestamptz not null default now()
);

create index announcements_by_end on announcements (ends_at);

-- Replies of upstreams that others or a proof contradicted, with both replies: evidence for operators.

create table contradictions (
    id bigint generated always as identity primary key,
    at timestamptz not null,
    network text not null,
    method text not null,
    params text not null,
    kind text not null,
    verified_by text not null,
    upstream text not null,
    operator text not null,
    reply text not null,
    digest text not null,
    others jsonb not null,
    other_reply text not null,
    other_digest text not null,
    reason text not null
);

create index contradictions_by_network on contradictions (network, at desc);

-- Sign-in and sessions

-- In the tables of passwords, second factors, links and sessions, `account_id` is the id of a person: of an account, which is
-- its first owner, of a member or of a visit.

create table account_passwords (
    account_id text primary key,
    hash text not null,
    changed_at timestamptz not null default now()
);

-- Sign-in with a code from an authenticator app, in addition to the password or link.
create table account_second_factors (
    account_id text primary key,
    -- The app's secret, encrypted.
    sealed bytea not null,
    -- Null until the holder has shown that the app has the secret. Sign-in asks for a code from then on.
    confirmed_at timestamptz,
    -- The time step of the last code: a code works once.
    last_step bigint not null default 0,
    -- Digests of the recovery codes that are left.
    recovery bytea[] not null default '{}',
    created_at timestamptz not null default now()
);

-- Operator credentials for the dashboard, created on the command line. Revoking one ends its sessions.
create table admin_tokens (
    id text primary key,
    name text not null,
    digest bytea not null unique,
    hint text not null,
    created_at timestamptz not null default now(),
    last_used_at timestamptz,
    revoked_at timestamptz,
    -- While the pepper is rotated: the digest under the previous one. And the number of the pepper of `digest`.
    previous_digest bytea,
    pepper integer not null default 1
);

-- Sessions of account holders and operators. Only the digest of the cookie's token is stored.
create table sessions (
    digest bytea primary key,
    account_id text,
    admin_token_id text references admin_tokens (id),
    created_at timestamptz not null default now(),
    seen_at timestamptz not null default now(),
    expires_at timestamptz not null,
    -- The client's address and the User-Agent header.
    address text not null default '',
    agent text not null default '',
    check (num_nonnulls(account_id, admin_token_id) = 1)
);

create index sessions_of_account on sessions (account_id) where account_id is not null;
create index sessions_by_end on sessions (expires_at);

-- People of an account

create table members (
    id text primary key,
    account_id text not null references accounts (id),
    email text not null,
    role text not null check (role in ('owner', 'developer', 'read-only')),
    joined_at timestamptz not null default now()
);

create index members_of_account on members (account_id, joined_at);
-- An address signs in to one account.
create unique index members_by_email on members (lower(email));

-- Invitations that were not accepted yet. Accepting one deletes its row.
create table invitations (
    id text primary key,
    account_id text not null references accounts (id),
    email text not null,
    role text not null check (role in ('owner', 'developer', 'read-only')),
    -- The member who sent it, or the account if its first owner did. It ends with the member.
    invited_by text not null,
    -- Digest of the link's token.
    digest bytea not null unique,
    created_at timestamptz not null default now(),
    expires_at timestamptz not null
);

-- A new invitation to an address replaces the one before.
create unique index invitations_of_account on invitations (account_id, lower(email));
create index invitations_by_end on invitations (expires_at);

-- Operators who look at an account, each until the given time.
create table account_visits (
    id text primary key,
    account_id text not null references accounts (id),
    admin_token_id text not null references admin_tokens (id),
    ends_at timestamptz not null
);

create index account_visits_by_end on account_visits (ends_at);

-- Everyone who can be signed in to an account. The first owner is the account itself, by whose email address it is known.
create view people as
select a.id, a.id as account_id, a.email, 'owner' as role, '' as visitor, a.created_at as since, a.disabled
from accounts a
union all
select m.id, m.account_id, m.email, m.role, '', m.joined_at, a.disabled from members m join accounts a on a.id = m.account_id
union all
select v.id, v.account_id, '', 'visitor', t.name, v.ends_at, a.disabled
from account_visits v join accounts a on a.id = v.account_id join admin_tokens t on t.id = v.admin_token_id
where v.ends_at > now() and t.revoked_at is null;

-- The log of changes and sign-ins in all accounts and by all operators. Deleted after a year.
create table actions (
    id bigint generated always as identity primary key,
    -- Null for what operators do outside of accounts, and for the deletion of an account.
    account_id text references accounts (id),
    at timestamptz not null default now(),
    by text not null check (by in ('holder', 'key', 'operator')),
    -- The name of the key or operator; empty for the holder.
    name text not null default '',
    -- The id of the operation in the API spec.
    action text not null,
    -- The id of the key, webhook, policy or session that was changed, if it has one.
    subject text not null default '',
    address text not null default '',
    -- The members of the object that the action changed. Null for an object that was not there, or is not there any more.
    before json,
    after json
);

create index actions_of_account on actions (account_id, at desc);
create index actions_by_age on actions (at);

-- New email addresses that a link in a mail to them has to confirm.

create table email_changes (
    account_id text primary key,
    email text not null,
    -- Digest of the link's token.
    digest bytea not null unique,
    expires_at timestamptz not null
);

-- One-time sign-in links. Using one deletes its row.
create table sign_in_links (
    digest bytea primary key,
    account_id text not null,
    created_at timestamptz not null default now(),
    expires_at timestamptz not null
);

create index sign_in_links_by_end on sign_in_links (expires_at);

-- Sign-in attempts by IP address and email address, as digests. `edge` is the time up to which the bucket is used.
create unlogged table sign_in_tries (
    subject bytea primary key,
    edge timestamptz not null
);

-- Codes of second factors that were entered, by person and place, as digests. Unlike other attempts they are counted over days,
-- so the counts outlive a crash. `edge` is the time up to which the bucket is used.
create table code_tries (
    subject bytea primary key,
    edge timestamptz not null
);

-- Addresses and browsers from which holders have signed in, as digests with their email address.
create table sign_in_places (
    place bytea primary key,
    seen_at timestamptz not null default now()
);

create index sign_in_places_by_time on sign_in_places (seen_at);

-- Usage

-- One row per key, network and method in use. In addition, sums that let a chart of an account read few rows: over
-- everything (all three empty), and per key, network and method (the other two empty).
create table usage_series (
    id integer generated always as identity primary key,
    account_id text not null,
    key_id text not null,
    network text not null,
    method text not null,
    unique (account_id, key_id, network, method)
);

-- Usage per minute, hour and day, so a chart of any length reads few rows. Minutes are written, hours and days are their
-- sums. t0 to t14 count replies by latency; core/usage defines the buckets. `faults`: the errors that are not the callers';
-- `upstream_faults`: those of upstreams among them.
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
    faults bigint not null default 0,
    upstream_faults bigint not null default 0,
    -- Calls that got the reply of an equal one under way.
    joins bigint not null default 0,
    primary key (step, series, at)
) partition by list (step);

-- Free space in each page for updates in place: the newest row of each series is rewritten every few seconds.
create table usage_daily_minutes partition of usage for values in ('minute') partition by range (at);
-- Minutes of days that have no table of their own.
create table usage_minutes partition of usage_daily_minutes default with (fillfactor = 80);
create table usage_hours partition of usage for values in ('hour') with (fillfactor = 60);
create table usage_days partition of usage for values in ('day') with (fillfactor = 60);

-- Small, and sufficient for finding old rows.
create index usage_by_time on usage using brin (at) with (autosummarize = on);

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

-- The last batch of each host. A batch that is sent again because its outcome is unknown is not counted twice.
create table usage_batches (
    worker text primary key,
    number bigint not null,
    written_at timestamptz not null default now()
);

-- What providers of upstreams bill, by UTC day. `account_id` and `key_id` are empty for the service's own calls, such as polls;
-- `nanos` is the cost in billionths of a US dollar. An upstream's price may change, so it is not computed from the credits.
create table spending (
    day date not null,
    upstream text not null,
    network text not null,
    method text not null,
    account_id text not null,
    key_id text not null,
    calls bigint not null,
    credits bigint not null,
    nanos bigint not null,
    primary key (day, upstream, method, account_id, key_id)
);

create index spending_of_account on spending (account_id, day);

-- Credits of a budget that processes have leased, by the first day of its period.
create table budget_periods (
    budget text not null,
    begins date not null,
    used bigint not null default 0 check (used >= 0),
    primary key (budget, begins)
);

-- Limits that operators have set in place of those in the settings.
create table budget_limits (
    budget text primary key,
    credits bigint not null check (credits > 0),
    set_by text not null,
    set_at timestamptz not null default now()
);

-- Lease a part of a budget; returns the granted credits, and how many are left for others.
create function lease_budget(of_budget text, of_period date, wanted bigint, most bigint, out granted bigint, out remaining bigint)
language plpgsql as $$
declare
    before bigint;
begin
    insert into budget_periods (budget, begins) values (of_budget, of_period) on conflict do nothing;
    select used into before from budget_periods where budget = of_budget and begins = of_period for update;
    granted := greatest(0, least(wanted, most - before));
    remaining := greatest(0, most - before - granted);
    update budget_periods set used = used + granted where budget = of_budget and begins = of_period;
end $$;

-- Fleet

-- State as seen by each worker: its connections and the health of its upstreams.
create unlogged table worker_views (
    worker text primary key,
    seen_at timestamptz not null default now(),
    view json not null
);

-- The processes of the fleet, as they report themselves: host, version, role, and the networks that a follower indexes.
create unlogged table processes (
    id text primary key,
    seen_at timestamptz not null default now(),
    report json not null
);

-- Upstreams that an operator has taken out of service. Identified by a digest of network and address, so moving an
-- upstream within the settings does not change its identity.
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

-- Methods of upstreams that an operator has taken out of service.
create table method_cordons (
    upstream text not null,
    method text not null,
    label text not null,
    reason text not null,
    by_whom text not null,
    created_at timestamptz not null default now(),
    primary key (upstream, method)
);

create trigger method_cordons_notice after insert or update or delete on method_cordons
for each statement execute function notice_cordons();

-- The part of calls that upstreams get while they are promoted (`canary` in the settings). Without a row it is 0.
create table canary_shares (
    upstream text primary key,
    label text not null,
    share double precision not null check (share between 0 and 1),
    reason text not null,
    changed_at timestamptz not null default now()
);

create trigger canary_shares_notice after insert or update or delete on canary_shares
for each statement execute function notice_cordons();

-- The health of upstreams over time, as all workers saw it, for three days.
create table upstream_samples (
    upstream text not null,
    at timestamptz not null,
    network text not null,
    label text not null,
    state text not null,
    breaker text not null,
    lag_blocks bigint,
    error_rate double precision,
    p50_ms double precision,
    p99_ms double precision,
    primary key (upstream, at)
);

create index upstream_samples_by_time on upstream_samples (at);

-- Records of requests, one partition for each UTC day. `attempts` is JSON; `params` is null unless the account records them.
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
    params text,
    -- The code of the error; empty without one.
    code text not null default '',
    -- The id that the client chose, which other requests may have too; empty without one.
    client_id text not null default '',
    -- The name that the caller gave to a method that does not exist; otherwise empty.
    called text not null default '',
    -- What it cost at providers of upstreams, in billionths of a US dollar.
    cost bigint not null default 0
) partition by range (at);

create index requests_by_id on requests (id, at desc);
create index requests_by_client_id on requests (client_id, at desc) where client_id <> '';
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
