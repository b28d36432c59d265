-- Smart wallets of keys, and the user operations that were sent through us.

create table wallets (
    -- Whose it is: the lineage of the key that created it.
    lineage_id text not null,
    network text not null,
    address bytea not null check (length(address) = 20),
    owner bytea not null check (length(owner) = 20),
    salt bytea not null check (length(salt) = 32),
    -- The EntryPoint's version that it is for, and the contract that deploys it.
    version text not null,
    factory bytea not null,
    created_at timestamptz not null default now(),
    -- Where it was deployed; null until it is, and again when a reorganisation has taken that back.
    deployed_at timestamptz,
    deploy_tx bytea,
    deploy_block bigint,
    deploy_block_hash bytea,
    primary key (lineage_id, network, address)
);

create index wallets_in_order on wallets (lineage_id, created_at desc, address);
create index wallets_by_address on wallets (network, address);
create index wallets_by_block on wallets (network, deploy_block) where deploy_block is not null;

-- How many there are, kept with each new one: an account's limit and a list's total without a count.
create table wallet_counts (
    lineage_id text not null,
    network text not null,
    account_id text not null references accounts (id),
    wallets bigint not null,
    primary key (lineage_id, network)
);

create index wallet_counts_of_account on wallet_counts (account_id);

-- A new wallet, unless it is there: 'new', 'known', or 'full' where the account may have no more.
create function create_wallet(
    account text, lineage text, of_network text, at bytea, of_owner bytea, with_salt bytea, for_version text, by_factory bytea,
    most bigint
) returns text language plpgsql as $$
begin
    if exists (select from wallets where lineage_id = lineage and network = of_network and address = at) then
        return 'known';
    end if;
    -- One at a time for an account, so that two at once do not both take its last place.
    perform pg_advisory_xact_lock(hashtextextended('wallets of ' || account, 0));
    if coalesce((select sum(wallets) from wallet_counts where account_id = account), 0) >= most then
        return 'full';
    end if;
    insert into wallets (lineage_id, network, address, owner, salt, version, factory)
    values (lineage, of_network, at, of_owner, with_salt, for_version, by_factory)
    on conflict do nothing;
    if not found then
        return 'known';
    end if;
    insert into wallet_counts as c (lineage_id, network, account_id, wallets) values (lineage, of_network, account, 1)
    on conflict (lineage_id, network) do update set wallets = c.wallets + 1;
    return 'new';
end $$;

create table operations (
    network text not null,
    -- The hash that the EntryPoint computes.
    hash bytea not null check (length(hash) = 32),
    lineage_id text not null,
    key_id text not null,
    entry_point bytea not null,
    sender bytea not null,
    nonce numeric not null,
    -- As the caller sent it.
    operation jsonb not null,
    -- seen: recorded, and perhaps on its way. sent: a bundler has taken it. included: on the chain, and its call went through.
    -- failed: a bundler has refused it (error), or it is on the chain and its call did not go through (block).
    status text not null default 'seen' check (status in ('seen', 'sent', 'included', 'failed')),
    -- The bundler's words, as JSON.
    error text,
    block bigint,
    block_hash bytea,
    transaction bytea,
    cost_wei numeric,
    seen_at timestamptz not null default now(),
    changed_at timestamptz not null default now(),
    primary key (network, hash, lineage_id)
);

create index operations_of_key on operations (lineage_id, seen_at desc);
create index operations_by_block on operations (network, block) where block is not null;
