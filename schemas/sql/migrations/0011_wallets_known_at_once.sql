-- Wallets that are on the chain before they are created here; operations that are found sooner, and do not stay for ever.

-- A new wallet, unless it is there: 'new', 'known', or 'full' where the account may have no more. Where somebody else holds the
-- same address, it is deployed if theirs is.
create or replace function create_wallet(
    account text, lineage text, of_network text, at bytea, of_owner bytea, with_salt bytea, for_version text, by_factory bytea,
    most bigint
) returns text language plpgsql as $$
declare
    other wallets;
begin
    -- One at a time for an account, so that two at once neither both take its last place nor stand in each other's way to it.
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

-- The newest block when it was recorded: it can only be in a later one. Null where that was not known.
alter table operations add column seen_block bigint;

-- Those that wait for a block, by what another may take from them: an account's nonce is used once.
create index operations_waiting on operations (network, sender, nonce) where status in ('seen', 'sent');
-- What is too old to keep, and what is sooner.
create index operations_by_change on operations (changed_at);
create index operations_unsent on operations (changed_at) where block is null and status in ('seen', 'failed');
