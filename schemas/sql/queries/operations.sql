-- record_operation
-- Record an operation before it is sent. If it is sent again, its state is kept, except a refusal.
insert into operations as o (network, hash, lineage_id, key_id, entry_point, sender, nonce, operation, seen_block)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9)
on conflict (network, hash, lineage_id) do update
set status = case when o.status = 'failed' and o.block is null then 'seen' else o.status end,
    error = case when o.block is null then null else o.error end, changed_at = now();

-- mark_sent
update operations set status = 'sent', changed_at = now()
where network = $1 and hash = $2 and lineage_id = $3 and status = 'seen';

-- mark_refused
-- Record the bundler's refusal, as returned to the caller, even if another operation has used the nonce meanwhile.
update operations set status = 'failed', error = $4, block = null, block_hash = null, changed_at = now()
where network = $1 and hash = $2 and lineage_id = $3
    and (status = 'seen' or status = 'failed' and block is not null and transaction is null);

-- read_operation
-- Any key can read it: operations on the chain are public.
select network, hash, lineage_id, key_id, entry_point, sender, nonce, operation, status, error, block, block_hash,
    transaction, cost_wei, seen_at, changed_at, seen_block
from operations where network = $1 and hash = $2 order by seen_at limit 1;

-- list_operations
-- Operations of one key, or of all.
select network, hash, lineage_id, key_id, entry_point, sender, nonce, operation, status, error, block, block_hash,
    transaction, cost_wei, seen_at, changed_at, seen_block
from operations where ($1::text is null or lineage_id = $1) order by seen_at desc limit $2;

-- mark_included
update operations o set
    status = case when e.success then 'included' else 'failed' end, error = null,
    block = e.block, block_hash = e.block_hash, transaction = e.transaction, cost_wei = e.cost_wei, changed_at = now()
from (
    select unnest($2::bytea[]) as hash, unnest($3::boolean[]) as success, unnest($4::bigint[]) as block,
        unnest($5::bytea[]) as block_hash, unnest($6::bytea[]) as transaction, unnest($7::numeric[]) as cost_wei
) e
where o.network = $1 and o.hash = e.hash;

-- mark_replaced
-- Mark operations whose nonce was used by an included operation. They can never be included.
update operations o set
    status = 'failed', block = e.block, block_hash = e.block_hash, changed_at = now(),
    error = json_build_object(
        'message', 'another operation has used its nonce', 'user_operation_hash', '0x' || encode(e.hash, 'hex')
    )::text
from (
    select unnest($2::bytea[]) as hash, unnest($3::bytea[]) as entry_point, unnest($4::bytea[]) as sender,
        unnest($5::numeric[]) as nonce, unnest($6::bigint[]) as block, unnest($7::bytea[]) as block_hash
) e
where o.network = $1 and o.sender = e.sender and o.nonce = e.nonce and o.entry_point = e.entry_point and o.hash <> e.hash
    and o.status in ('seen', 'sent');

-- take_back_inclusions
-- Reopen operations included above a block after a reorganisation. The bundler still has them or sends them again.
update operations set
    status = 'sent', error = null, block = null, block_hash = null, transaction = null, cost_wei = null, changed_at = now()
where network = $1 and block > $2;

-- purge
-- Delete some of the old operations, in any state.
delete from operations where (network, hash, lineage_id) in (
    select network, hash, lineage_id from operations
    where changed_at < now() - make_interval(days => $1::integer)
    order by changed_at limit $2
);

-- purge_unsent
-- Delete some of the operations that no bundler is known to have accepted.
delete from operations where (network, hash, lineage_id) in (
    select network, hash, lineage_id from operations
    where changed_at < now() - make_interval(days => $1::integer) and block is null and status in ('seen', 'failed')
    order by changed_at limit $2
);
