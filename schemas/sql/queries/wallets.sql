-- create_wallet
-- 'new', 'known' or 'full'.
select create_wallet($1, $2, $3, $4, $5, $6, $7, $8, $9);

-- read_wallet
select * from wallets where lineage_id = $1 and network = $2 and address = $3;

-- find_wallets
-- On which networks a lineage has a wallet at this address.
select * from wallets where lineage_id = $1 and address = $2 order by created_at, network;

-- list_wallets
select * from wallets
where lineage_id = $1 and ($2::text is null or network = $2)
order by created_at desc, address
limit $3 offset $4;

-- count_wallets
select coalesce(sum(wallets), 0)::bigint from wallet_counts where lineage_id = $1 and ($2::text is null or network = $2);

-- mark_deployed
-- One row for each wallet that a block has put on the chain; whoever holds it.
update wallets w set deployed_at = d.at, deploy_tx = d.tx, deploy_block = d.block, deploy_block_hash = d.hash
from (
    select unnest($2::bytea[]) as address, unnest($3::bytea[]) as tx, unnest($4::bigint[]) as block,
        unnest($5::bytea[]) as hash, unnest($6::timestamptz[]) as at
) d
where w.network = $1 and w.address = d.address;

-- unmark_deployed
-- The block that deployed it is gone; one that was noted since stays.
update wallets set deployed_at = null, deploy_tx = null, deploy_block = null, deploy_block_hash = null
where network = $1 and address = $2 and deploy_block_hash = $3;

-- unmark_absent
-- What a reader has noted of blocks that are not what the chain became: none of these wallets was deployed in them.
update wallets set deployed_at = null, deploy_tx = null, deploy_block = null, deploy_block_hash = null
where network = $1 and deploy_block between $2 and $3 and address <> all($4::bytea[]);

-- take_back_deployments
-- All above a block, which a reorganisation has removed.
update wallets set deployed_at = null, deploy_tx = null, deploy_block = null, deploy_block_hash = null
where network = $1 and deploy_block > $2;
