-- How far each network is followed, its recent blocks, and who holds what.

-- A network's row is its follower's cursor. Other tables name a network by its number: two bytes instead of its name.
create table followed_networks (
    number smallint generated always as identity primary key,
    network text not null unique,
    -- The first block that its follower wrote; those below are a back-fill's. Null: never followed.
    first_block bigint,
    -- The last block that is written. Whoever writes compares and changes these two, so that nobody writes a block twice.
    block bigint,
    block_hash bytea,
    block_time timestamptz,
    -- Why it does not go on; null: it does.
    fault text,
    changed_at timestamptz not null default now()
);

-- Blocks that can still be taken back.
create table recent_blocks (
    network smallint not null references followed_networks (number),
    number bigint not null,
    hash bytea not null,
    primary key (network, number)
);

-- Sums of transfers: below zero where the index begins after the first of them, or the contract does as it likes. A row stays
-- at zero, because a contract can pay interest without an event.
create table token_holdings (
    network smallint not null,
    holder bytea not null,
    contract bytea not null,
    amount numeric not null,
    primary key (network, holder, contract)
) with (fillfactor = 90);

-- One row for each token that a holder has; what is at zero is removed.
create table nft_holdings (
    network smallint not null,
    -- 721 or 1155.
    standard smallint not null,
    holder bytea not null,
    contract bytea not null,
    token_id numeric not null,
    amount numeric not null,
    primary key (network, holder, contract, token_id)
);

create index nft_holders on nft_holdings (network, contract, holder) include (amount);
create index nft_holdings_at_zero on nft_holdings (network) where amount = 0;
-- Who holds a token that may have many holders.
create index nft_holders_of_token on nft_holdings (network, contract, token_id) where standard = 1155;

-- What each recent block added to holdings, so that it can be taken back. Not compressed: it is written far more often than read.
create table holding_changes (
    network smallint not null,
    block bigint not null,
    changes bytea not null,
    primary key (network, block)
);

alter table holding_changes alter column changes set storage external;

-- Which blocks below the follower's first were indexed later: for all contracts (an empty one), or for one alone.
create table backfills (
    network smallint not null references followed_networks (number),
    contract bytea not null default '',
    covered int8multirange not null,
    primary key (network, contract)
);
