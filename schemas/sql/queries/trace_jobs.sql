-- add
insert into trace_jobs (network, block, block_hash)
select $1, block, hash from unnest($2::bigint[], $3::bytea[]) as t (block, hash)
on conflict do nothing;

-- list
-- Blocks that could not be traced come after the others.
select block, block_hash, tries from trace_jobs where network = $1 order by tries, block limit $2;

-- finish
-- Returns no row if the block was removed.
delete from trace_jobs where network = $1 and block = $2 and block_hash = $3 returning block;

-- count_try
update trace_jobs set tries = tries + 1 where network = $1 and block = $2 and block_hash = $3;

-- drop
delete from trace_jobs where network = $1 and block > $2;
