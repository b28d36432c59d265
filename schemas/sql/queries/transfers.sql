-- open
select transfers_open($1::smallint, $2, $3, $4);

-- follow
-- The follower writes these categories from this block on, and no others. Rows that stay the same are not locked: a back-fill may
-- wait for the follower while it holds them.
with ended as (
    update transfer_coverage set covered = covered + int8multirange(int8range(since, $3)), since = null
    where network = $1 and since is not null and category <> all($2::smallint[])
)
insert into transfer_coverage as c (network, category, since)
select $1, category, $3 from unnest($2::smallint[]) as wanted (category)
where not exists (select from transfer_coverage k where k.network = $1 and k.category = wanted.category and k.since is not null)
on conflict (network, category) do update set since = excluded.since where c.since is null;

-- take_back
update transfer_coverage set covered = covered * int8multirange(int8range(null, $2 + 1)), since = least(since, $2 + 1)
where network = $1 and (since > $2 + 1 or upper(covered) > $2 + 1);

-- delete_above
select transfers_delete_above($1::smallint, $2);

-- drop_below
select transfers_drop($1::smallint, $2);

-- expire_below
select transfers_expire($1::smallint, $2);

-- delete_coverage
delete from transfer_coverage where network = $1;

-- cover
insert into transfer_coverage as c (network, category, covered) select $1, unnest($2::smallint[]), int8multirange(int8range($3, $4, '[]'))
on conflict (network, category) do update set covered = c.covered + excluded.covered;

-- uncovered
-- Parts of a range in which a category is missing, up to the block from which on the follower writes it. Internal transfers (2) are
-- missing in blocks that have no trace job.
select wanted.category, lower(part) as first, upper(part) - 1 as last
from unnest($2::smallint[]) as wanted (category)
    left join transfer_coverage c on c.network = $1 and c.category = wanted.category,
    unnest(
        int8multirange(int8range($3, greatest($3, least($4 + 1, coalesce(c.since, $5))))) - coalesce(c.covered, '{}'::int8multirange) - case
            when wanted.category = 2 then coalesce((
                select range_agg(int8range(job.block, job.block, '[]'))
                from trace_jobs job join followed_networks f on f.network = job.network where f.number = $1
            ), '{}'::int8multirange)
            else '{}'::int8multirange
        end
    ) as part;

-- coverage
-- Per category, the newest range of blocks that is covered without a gap. Internal transfers (2) are written after their blocks, so
-- they have no `since`, and their range may end before the index's block.
select category, lower(part) as first, least(upper(part) - 1, block) as last
from transfer_coverage join followed_networks on number = transfer_coverage.network, lateral (
    select part from unnest(
        covered + case when since is null then '{}' else int8multirange(int8range(since, greatest(since, block + 1))) end
    ) as part
    order by part desc limit 1
) as newest
where followed_networks.network = $1 and block is not null and (since <= block or category = 2);

-- number_of
select number from followed_networks where network = $1;

-- transactions_of
select number, transactions from transfer_blocks where network = $1 and number = any($2::bigint[]) order by number for update;

-- extend
update transfer_blocks set transactions = given.hashes
from unnest($2::bigint[], $3::bytea[]) as given (block, hashes) where network = $1 and number = block;

-- of_contract
select block, place, tx, category, sender, recipient, contract, amount, token_id
from transfers_of_contract($1::smallint, $2, $3, $4, $5);

-- of_transaction
select block, place, tx, category, sender, recipient, contract, amount, token_id
from transfers_of_transaction($1::smallint, $2, $3) order by place;

-- places
-- Hash and time of the block, and hash of the transaction, for each pair of a block and a position in it. Each pair is looked up by
-- itself: the planner would read the whole table for a join.
select hash, time, transaction
from unnest($2::bigint[], $3::integer[]) with ordinality as wanted (block, tx, nth)
    left join lateral (
        select hash, time, substr(transactions, 32 * tx + 1, 32) as transaction
        from transfer_blocks where network = $1 and number = block limit 1
    ) as found on true
order by nth;

-- hashes
-- A block without transfers has no row of its own; its hash is known while the chain may drop it.
select coalesce(b.hash, r.hash) as hash, coalesce(b.transactions, '') as transactions
from (select 1) as one
    left join transfer_blocks b on b.network = $1 and b.number = $2
    left join recent_blocks r on r.network = $1 and r.number = $2;

-- export
-- The transfers of a range of blocks, in order, with their blocks and transactions.
select t.block, t.place, t.category, t.sender, t.recipient, t.contract, t.amount, t.token_id,
    b.hash, b.time, substr(b.transactions, 32 * t.tx + 1, 32) as transaction
from transfers t join transfer_blocks b on b.network = t.network and b.number = t.block
where t.network = $1 and t.block between $2 and $3
order by t.block, t.place;

-- index_block
select number, block from followed_networks where network = $1 and block is not null;

-- block_at
select transfers_block_at($1::smallint, $2);

-- newest_first
-- A page of an address's transfers, newest first: before the position ($5, $6) and not below the block $7, as sender ($3), as
-- recipient ($4), or both. At most $8 rows are scanned, and the rest of the last one's block; `end_block` and `end_place` are the last
-- of them if there may be more. An index has the rows of an address in the order of blocks, so the scan sorts nothing, whatever the
-- planner expects. Whole addresses are compared after it, since different addresses may have equal hashes there.
with sides as (
    (
        select block, place, tx, category, sender, recipient, contract, amount, token_id from transfers
        where $3 and network = $1 and (hashtextextended(encode(sender, 'hex'), 0) << 34 | block)
                between (hashtextextended(encode($2::bytea, 'hex'), 0) << 34 | least($7::bigint, (1::bigint << 34) - 1))
                and (hashtextextended(encode($2::bytea, 'hex'), 0) << 34 | least($5::bigint, (1::bigint << 34) - 1))
            and block <= $5 and (block, place) < ($5::bigint, $6::bigint) and block >= $7
        order by hashtextextended(encode(sender, 'hex'), 0) << 34 | block desc fetch first $8 rows with ties
    )
    union all
    (
        select block, place, tx, category, sender, recipient, contract, amount, token_id from transfers
        where $4 and network = $1 and (hashtextextended(encode(recipient, 'hex'), 0) << 34 | block)
                between (hashtextextended(encode($2::bytea, 'hex'), 0) << 34 | least($7::bigint, (1::bigint << 34) - 1))
                and (hashtextextended(encode($2::bytea, 'hex'), 0) << 34 | least($5::bigint, (1::bigint << 34) - 1))
            and block <= $5 and (block, place) < ($5::bigint, $6::bigint) and block >= $7
        order by hashtextextended(encode(recipient, 'hex'), 0) << 34 | block desc fetch first $8 rows with ties
    )
),
scanned as materialized (select distinct on (block, place) * from sides order by block desc, place desc limit $8),
edge as (
    select block as end_block, place as end_place from scanned
    where (select count(*) from scanned) = $8 order by block, place limit 1
),
matched as (
    select * from scanned
    where (($3 and sender = $2) or ($4 and recipient = $2))
        and category = any($10::smallint[]) and ($11::bytea[] is null or contract = any($11))
        and ($12::bytea is null or sender = $12 or recipient = $12)
        and ($13::bytea is null or (octet_length(amount), amount) >= (octet_length($13), $13))
    order by block desc, place desc limit $9
)
select m.*, edge.* from (select true) as one left join edge on true left join matched m on true
order by m.block desc, m.place desc;

-- oldest_first
-- The same, oldest first: after the position ($5, $6) and not above the block $7.
with sides as (
    (
        select block, place, tx, category, sender, recipient, contract, amount, token_id from transfers
        where $3 and network = $1 and (hashtextextended(encode(sender, 'hex'), 0) << 34 | block)
                between (hashtextextended(encode($2::bytea, 'hex'), 0) << 34 | least($5::bigint, (1::bigint << 34) - 1))
                and (hashtextextended(encode($2::bytea, 'hex'), 0) << 34 | least($7::bigint, (1::bigint << 34) - 1))
            and block >= $5 and (block, place) > ($5::bigint, $6::bigint) and block <= $7
        order by hashtextextended(encode(sender, 'hex'), 0) << 34 | block fetch first $8 rows with ties
    )
    union all
    (
        select block, place, tx, category, sender, recipient, contract, amount, token_id from transfers
        where $4 and network = $1 and (hashtextextended(encode(recipient, 'hex'), 0) << 34 | block)
                between (hashtextextended(encode($2::bytea, 'hex'), 0) << 34 | least($5::bigint, (1::bigint << 34) - 1))
                and (hashtextextended(encode($2::bytea, 'hex'), 0) << 34 | least($7::bigint, (1::bigint << 34) - 1))
            and block >= $5 and (block, place) > ($5::bigint, $6::bigint) and block <= $7
        order by hashtextextended(encode(recipient, 'hex'), 0) << 34 | block fetch first $8 rows with ties
    )
),
scanned as materialized (select distinct on (block, place) * from sides order by block, place limit $8),
edge as (
    select block as end_block, place as end_place from scanned
    where (select count(*) from scanned) = $8 order by block desc, place desc limit 1
),
matched as (
    select * from scanned
    where (($3 and sender = $2) or ($4 and recipient = $2))
        and category = any($10::smallint[]) and ($11::bytea[] is null or contract = any($11))
        and ($12::bytea is null or sender = $12 or recipient = $12)
        and ($13::bytea is null or (octet_length(amount), amount) >= (octet_length($13), $13))
    order by block, place limit $9
)
select m.*, edge.* from (select true) as one left join edge on true left join matched m on true
order by m.block, m.place;
