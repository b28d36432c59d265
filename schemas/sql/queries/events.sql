-- add_events
-- Those that are new, each with its delivery if it lacks nothing and waits for nothing. Which were new.
with given as (
    select * from unnest(
        $2::text[], $3::text[], $4::text[], $5::bigint[], $6::bytea[], $7::bytea[], $8::text[], $9::bigint[], $10::text[],
        $11::text[]
    ) as t (id, webhook_id, type, block, block_hash, body, lacks, after_block, finality, takes_back)
), made as (
    insert into events (id, webhook_id, network, type, block, block_hash, body, lacks, after_block, finality, takes_back)
    select id, webhook_id, $1, type, block, block_hash, body, lacks::json, after_block, finality, takes_back from given
    on conflict (id) do nothing
    returning id, webhook_id, lacks is null and after_block is null as ready
), told as (
    insert into deliveries (event_id, webhook_id, state)
    select made.id, made.webhook_id, case when webhooks.status = 'active' then 'due' else 'parked' end
    from made join webhooks on webhooks.id = made.webhook_id and webhooks.status in ('active', 'paused')
    where made.ready
    on conflict do nothing
)
select id, ready from made;

-- add_test
-- A test is an event of nothing that happened.
insert into events (id, webhook_id, network, type, body, test) values ($1, $2, $3, $4, $5, true);

-- taken_back
-- Which of these were there before, and are not any more.
select id from events where id = any($1::text[]) and taken_back;

-- release
-- What has waited for a block that is there now. Whether anything is to be told, and whether anything waits for the chain's word.
with freed as (
    update events set after_block = null where network = $1 and after_block <= $2 and finality is null
    returning id, webhook_id, lacks
), told as (
    insert into deliveries (event_id, webhook_id, state)
    select freed.id, freed.webhook_id, case when webhooks.status = 'active' then 'due' else 'parked' end
    from freed join webhooks on webhooks.id = freed.webhook_id and webhooks.status in ('active', 'paused')
    where freed.lacks is null
    on conflict do nothing
    returning 1
)
select exists (select from told) as told, exists (select from events where network = $1 and finality is not null) as waits;

-- waiting
-- The words of the chain's own that are waited for, and the last block that is written.
select word as finality, coalesce((select block from followed_networks where network = $1), 0) as head
from unnest(array['safe', 'finalized']) as t (word)
where exists (select from events where network = $1 and finality = word);

-- release_final
-- What has waited until its block is so, and now it is. Whether anything is to be told.
with freed as (
    update events set after_block = null, finality = null
    where network = $1 and finality = $2 and after_block <= $3::bigint
    returning id, webhook_id, lacks
), told as (
    insert into deliveries (event_id, webhook_id, state)
    select freed.id, freed.webhook_id, case when webhooks.status = 'active' then 'due' else 'parked' end
    from freed join webhooks on webhooks.id = freed.webhook_id and webhooks.status in ('active', 'paused')
    where freed.lacks is null
    on conflict do nothing
    returning 1
)
select exists (select from told);

-- lacking
-- What must be found out, the oldest first, from a place on.
select id, type, block, block_hash, body, lacks, created_at from events
where network = $1 and lacks is not null and (lacks -> 'nft' is not null) = $2 and (created_at, id) > ($3::timestamptz, $4::text)
order by created_at, id limit $5;

-- complete
-- What lacks nothing any more; told if it waits for nothing. Whether anything is to be told.
with given as (
    select * from unnest($1::text[], $2::bytea[]) as t (id, body)
), done as (
    update events set body = given.body, lacks = null from given
    where events.id = given.id and events.lacks is not null and not events.taken_back
    returning events.id, webhook_id, after_block
), told as (
    insert into deliveries (event_id, webhook_id, state)
    select done.id, done.webhook_id, case when webhooks.status = 'active' then 'due' else 'parked' end
    from done join webhooks on webhooks.id = done.webhook_id and webhooks.status in ('active', 'paused')
    where done.after_block is null
    on conflict do nothing
    returning 1
)
select exists (select from told);

-- drop_events
-- What turned out not to have happened.
delete from events where id = any($1::text[]) and lacks is not null;

-- drop_untold
-- Events of blocks that are gone and of which nobody has been told: as if they had never been. What somebody completes, or takes
-- to deliver, at the same moment is left.
with gone as (
    select events.id, lacks is not null or after_block is not null as unready
    from events left join deliveries on deliveries.event_id = events.id
    where network = $1 and block > $2 and not taken_back
        and (lacks is not null or after_block is not null or (claim = 0 and state in ('due', 'parked', 'over_quota')))
    for update of events
), untold as (
    delete from deliveries using gone where deliveries.event_id = gone.id and deliveries.claim = 0
    returning event_id
)
delete from events using gone
where events.id = gone.id and (gone.unready or gone.id in (select event_id from untold));

-- take_back
-- Events of blocks that are gone and of which somebody may have been told. What was not delivered yet is not tried again.
with gone as (
    update events set taken_back = true where network = $1 and block > $2 and not taken_back
    returning id, webhook_id, body
), ended as (
    update deliveries set state = 'dropped', finished_at = now() from gone
    where deliveries.event_id = gone.id and deliveries.state in ('due', 'parked', 'over_quota')
)
select id, webhook_id, body from gone;

-- forget_unready
-- The network is begun anew: what was not told yet is not told any more.
delete from events where network = $1 and (lacks is not null or after_block is not null);

-- add_jobs
insert into trace_jobs (network, block, block_hash)
select $1, block, hash from unnest($2::bigint[], $3::bytea[]) as t (block, hash)
on conflict do nothing;

-- list_jobs
select block, block_hash, tries from trace_jobs where network = $1 order by block limit $2;

-- end_job
-- Nothing is returned where the block is gone.
delete from trace_jobs where network = $1 and block = $2 and block_hash = $3 returning block;

-- count_try
update trace_jobs set tries = tries + 1 where network = $1 and block = $2 and block_hash = $3;

-- drop_jobs
delete from trace_jobs where network = $1 and block > $2;

-- tell_events
-- Whoever finds out what is lacking wakes up when the transaction is through.
select pg_notify('penstock_events', $1);
