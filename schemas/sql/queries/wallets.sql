-- create_wallet
-- Returns 'new', 'known' or 'full'.
select create_wallet($1, $2, $3, $4, $5, $6, $7, $8, $9);

-- read_wallet
select network, address, owner, salt, version, factory, created_at, deployed_at, deploy_tx, deploy_block, deploy_block_hash
from wallets where lineage_id = $1 and network = $2 and address = $3;

-- find_wallets
-- Wallets of a lineage at this address, on any network.
select network, address, owner, salt, version, factory, created_at, deployed_at, deploy_tx, deploy_block, deploy_block_hash
from wallets where lineage_id = $1 and address = $2 order by created_at, network;

-- wallet_version
-- The version follows from the address, so it is the same for every lineage.
select version from wallets where network = $1 and address = $2 limit 1;

-- list_wallets
select network, address, owner, salt, version, factory, created_at, deployed_at, deploy_tx, deploy_block, deploy_block_hash
from wallets
where lineage_id = $1 and ($2::text[] is null or network = any($2))
order by created_at desc, address
limit $3 offset $4;

-- count_wallets
select coalesce(sum(wallets), 0)::bigint from wallet_counts
where lineage_id = $1 and ($2::text[] is null or network = any($2));

-- mark_deployed
-- Record the deployment for every lineage that has the wallet.
update wallets w set deployed_at = d.at, deploy_tx = d.tx, deploy_block = d.block, deploy_block_hash = d.hash
from (
    select unnest($2::bytea[]) as address, unnest($3::bytea[]) as tx, unnest($4::bigint[]) as block,
        unnest($5::bytea[]) as hash, unnest($6::timestamptz[]) as at
) d
where w.network = $1 and w.address = d.address;

-- unmark_deployed
-- The block that deployed it was removed. A deployment recorded since stays.
update wallets set deployed_at = null, deploy_tx = null, deploy_block = null, deploy_block_hash = null
where network = $1 and address = $2 and deploy_block_hash = $3;

-- unmark_absent
-- Clear deployments recorded from blocks that were replaced, unless the wallet was deployed in the new ones.
update wallets set deployed_at = null, deploy_tx = null, deploy_block = null, deploy_block_hash = null
where network = $1 and deploy_block between $2 and $3 and address <> all($4::bytea[]);

-- take_back_deployments
-- Clear deployments above a block after a reorganisation.
update wallets set deployed_at = null, deploy_tx = null, deploy_block = null, deploy_block_hash = null
where network = $1 and deploy_block > $2;
