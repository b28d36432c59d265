-- add_network
insert into followed_networks (network) values ($1) on conflict do nothing;

-- read_network
select number, network, first_block, block, block_hash, indexes_holdings from followed_networks where network = $1;

-- try_lead
-- A session-level lock, released when the session ends for any reason.
select pg_try_advisory_lock($1::integer, $2::integer);

-- end_silent_leader
-- Terminate the session that holds the lock if it has been idle for this long: a leader sends a statement every few
-- seconds. A session in the middle of a statement is not idle.
select pg_terminate_backend(l.pid)
from pg_locks l join pg_stat_activity a on a.pid = l.pid
where l.locktype = 'advisory' and l.classid = $1::bigint::oid and l.objid = $2::bigint::oid and l.objsubid = 2 and l.granted
    and l.database = (select oid from pg_database where datname = current_database())
    and a.state <> 'active' and a.state_change < clock_timestamp() - make_interval(secs => $3);

-- follower_block
-- The block of the follower, if a session holds the lock of following ($2).
select block from followed_networks
where number = $1 and exists (
    select from pg_locks l
    where l.locktype = 'advisory' and l.classid = $2::bigint::oid and l.objid = number::bigint::oid and l.objsubid = 2 and l.granted
        and l.database = (select oid from pg_database where datname = current_database())
);

-- keep_alive
select 1;

-- begin_following
-- Only if the network is not followed yet.
update followed_networks
set first_block = $2::bigint, block = $2::bigint - 1, block_hash = $3, block_time = null, fault = null, stuck = null, changed_at = now()
where number = $1 and block is null
returning network;

-- move_cursor
-- Move the cursor from one block to another. Returns no row if the cursor is elsewhere, which means that another
-- process writes.
update followed_networks
set block = $4, block_hash = $5, block_time = to_timestamp($6), fault = null, stuck = null, changed_at = now()
where number = $1 and block = $2 and block_hash = $3
returning block;

-- set_fault
update followed_networks set fault = $2, changed_at = now() where number = $1 and fault is distinct from $2;

-- set_stuck
update followed_networks set stuck = $2, changed_at = now() where number = $1 and stuck is distinct from $2;

-- halted_networks
-- Followers that have stopped or make no progress, with the reason.
select network, coalesce(fault, stuck) as reason from followed_networks where coalesce(fault, stuck) is not null
order by network;

-- record_blocks
insert into recent_blocks (network, number, hash)
select $1, number, hash from unnest($2::bigint[], $3::bytea[]) as block (number, hash);

-- recent_blocks
-- Newest first.
select number, hash from recent_blocks where network = $1 and number <= $2 order by number desc limit $3;

-- delete_blocks_above
delete from recent_blocks where network = $1 and number > $2;

-- delete_blocks_below
delete from recent_blocks where network = $1 and number < $2;

-- notify_block
select pg_notify('penstock_blocks', network || ' ' || block) from followed_networks where number = $1;

-- reset_network
-- Reset the network as if it had never been followed. Its number stays.
update followed_networks
set first_block = null, block = null, block_hash = null, block_time = null, fault = null, stuck = null, indexes_holdings = true,
    changed_at = now()
where number = $1;

-- leave_out_holdings
update followed_networks set indexes_holdings = false where number = $1 and indexes_holdings;

-- uncovered
-- Parts of a range that no back-fill has covered, neither for this contract nor for all.
select lower(part) as first, upper(part) - 1 as last
from unnest(
    int8multirange(int8range($3, $4, '[]')) - coalesce(
        (select range_agg(covered) from backfills where network = $1 and contract in ('', $2)), '{}'::int8multirange
    )
) as part;

-- covered_contracts
-- Ranges covered by back-fills of single contracts, within a range.
select contract, lower(part) as first, upper(part) - 1 as last
from backfills, unnest(covered * int8multirange(int8range($2, $3, '[]'))) as part
where network = $1 and contract <> '';

-- cover
insert into backfills as b (network, contract, covered) values ($1, $2, int8multirange(int8range($3, $4, '[]')))
on conflict (network, contract) do update set covered = b.covered + excluded.covered;

-- delete_backfills
delete from backfills where network = $1;
