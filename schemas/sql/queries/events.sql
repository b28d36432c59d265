-- add_events
-- Insert new events, and a delivery for each that is complete and waits for no block. Returns the new ones.
with given as (
    select * from unnest(
        $2::text[], $3::text[], $4::text[], $5::bigint[], $6::bytea[], $7::bytea[], $8::text[], $9::bigint[], $10::text[],
        $11::text[], $12::date[]
    ) as t (id, webhook_id, type, block, block_hash, body, lacks, after_block, finality, takes_back, day)
), made as (
    insert into events (id, webhook_id, network, type, block, block_hash, body, lacks, after_block, finality, takes_back, day)
    select id, webhook_id, $1, type, block, block_hash, body, lacks::json, after_block, finality, takes_back,
        coalesce(day, (now() at time zone 'UTC')::date)
    from given
    on conflict do nothing
    returning id, webhook_id, day, lacks is null and after_block is null as ready
), queued as (
    insert into deliveries (event_id, webhook_id, day, state)
    select made.id, made.webhook_id, made.day, case when webhooks.status = 'active' then 'due' else 'parked' end
    from made join webhooks on webhooks.id = made.webhook_id and webhooks.status in ('active', 'paused')
    where made.ready
    on conflict do nothing
)
select id, ready from made;

-- read_stored
-- The plans of these accounts, and how many of their events were stored and dropped today.
select id, plan, coalesce(sum(stored), 0)::bigint as stored, coalesce(sum(dropped), 0)::bigint as dropped
from accounts left join event_days on account_id = id and day = (now() at time zone 'utc')::date
where id = any($1::text[]) group by id;

-- count_events
-- Count events that were stored and dropped today, always in the same order to avoid deadlocks.
insert into event_days as d (account_id, day, network, stored, dropped)
select account, (now() at time zone 'utc')::date, $1, stored, dropped
from unnest($2::text[], $3::bigint[], $4::bigint[]) as t (account, stored, dropped) order by account
on conflict (account_id, day, network) do update set
    stored = d.stored + excluded.stored, dropped = d.dropped + excluded.dropped;

-- known
-- Those of the given events that are stored, under whichever day.
select id from events where id = any($1::text[]);

-- add_test
-- A test event has no block. Its delivery is due at once.
with made as (
    insert into events (id, webhook_id, network, type, body, test) values ($1, $2, $3, $4, $5, true)
    returning id, webhook_id, day
)
insert into deliveries (event_id, webhook_id, day) select id, webhook_id, day from made;

-- add_injected
-- For a fault plan: take an event back that was delivered under this claim. Its correction is due at once, the event with
-- its new id a second later.
with original as (
    update events set taken_back = true from deliveries
    where events.id = $1 and events.day = deliveries.day and deliveries.event_id = $1 and claim = $2::bigint
        and state = 'delivered' and not taken_back
    returning events.webhook_id, network, block, block_hash, test
), made as (
    insert into events (id, webhook_id, network, type, block, block_hash, body, takes_back, test, injected)
    select given.id, webhook_id, network, given.type, case when takes_back is null then block end,
        case when takes_back is null then block_hash end, given.body, takes_back, test, true
    from original cross join unnest($3::text[], $4::text[], $5::bytea[], $6::text[]) as given (id, type, body, takes_back)
    on conflict do nothing
    returning id, webhook_id, day, takes_back
)
insert into deliveries (event_id, webhook_id, day, due_at)
select id, webhook_id, day, clock_timestamp() + case when takes_back is null then interval '1 s' else interval '0' end from made;

-- taken_back
-- Those of the given events that a reorganisation has removed.
select id from events where id = any($1::text[]) and taken_back;

-- release
-- Release events that waited for a block up to this one. Returns whether any delivery was added, and whether any
-- event still waits for finality.
with freed as (
    update events set after_block = null where network = $1 and after_block <= $2 and finality is null
    returning id, webhook_id, day, lacks
), queued as (
    insert into deliveries (event_id, webhook_id, day, state)
    select freed.id, freed.webhook_id, freed.day, case when webhooks.status = 'active' then 'due' else 'parked' end
    from freed join webhooks on webhooks.id = freed.webhook_id and webhooks.status in ('active', 'paused')
    where freed.lacks is null
    on conflict do nothing
    returning 1
)
select exists (select from queued) as queued, exists (select from events where network = $1 and finality is not null) as waits;

-- waiting
-- The finality tags that events wait for, and the last block written.
select word as finality, coalesce((select block from followed_networks where network = $1), 0) as head
from unnest(array['safe', 'finalized']) as t (word)
where exists (select from events where network = $1 and finality = word);

-- release_final
-- Release events whose block has reached the finality tag. Returns whether any delivery was added.
with freed as (
    update events set after_block = null, finality = null
    where network = $1 and finality = $2 and after_block <= $3::bigint
    returning id, webhook_id, day, lacks
), queued as (
    insert into deliveries (event_id, webhook_id, day, state)
    select freed.id, freed.webhook_id, freed.day, case when webhooks.status = 'active' then 'due' else 'parked' end
    from freed join webhooks on webhooks.id = freed.webhook_id and webhooks.status in ('active', 'paused')
    where freed.lacks is null
    on conflict do nothing
    returning 1
)
select exists (select from queued);

-- list_lacking_metadata
-- Accounts with events that lack NFT metadata, except the given ones.
select distinct account_id from events join webhooks on webhooks.id = webhook_id
where events.network = $1 and lacks is not null and lacks -> 'nft' is not null and account_id <> all($2::text[])
limit $3;

-- list_incomplete
-- Incomplete events of one account or of all, oldest first, after a cursor.
select id, day, type, block, block_hash, body, lacks, created_at from events
where network = $1 and lacks is not null and (lacks -> 'nft' is not null) = $2 and (created_at, id) > ($3::timestamptz, $4::text)
    and ($6::text is null or webhook_id in (select webhooks.id from webhooks where account_id = $6))
order by created_at, id limit $5;

-- complete
-- Store completed bodies, and add a delivery for each event that waits for no block. Returns whether any delivery
-- was added.
with given as (
    select * from unnest($1::text[], $2::bytea[], $3::date[]) as t (id, body, day)
), done as (
    update events set body = given.body, lacks = null from given
    where events.day = given.day and events.id = given.id and events.lacks is not null and not events.taken_back
    returning events.id, events.day, webhook_id, after_block
), queued as (
    insert into deliveries (event_id, webhook_id, day, state)
    select done.id, done.webhook_id, done.day, case when webhooks.status = 'active' then 'due' else 'parked' end
    from done join webhooks on webhooks.id = done.webhook_id and webhooks.status in ('active', 'paused')
    where done.after_block is null
    on conflict do nothing
    returning 1
)
select exists (select from queued);

-- drop_events
-- Delete incomplete events that turned out not to have happened.
delete from events where id = any($1::text[]) and lacks is not null;

-- drop_unsent
-- Delete events of removed blocks that were never sent. Events that are completed or claimed at the same moment are
-- kept.
with gone as (
    select events.day, events.id, lacks is not null or after_block is not null as unready
    from events left join open_deliveries d on d.event_id = events.id
    where network = $1 and block > $2 and not taken_back
        and (lacks is not null or after_block is not null or (claim = 0 and state in ('due', 'parked', 'over_quota')))
    for update of events
), unsent as (
    delete from open_deliveries d using gone where d.event_id = gone.id and d.claim = 0
    returning event_id
)
delete from events using gone
where events.day = gone.day and events.id = gone.id and (gone.unready or gone.id in (select event_id from unsent));

-- take_back
-- Mark events of removed blocks that may have been sent. Their unfinished deliveries are dropped.
with gone as (
    update events set taken_back = true where network = $1 and block > $2 and not taken_back
    returning id, webhook_id, body
), ended as (
    update open_deliveries d set state = 'dropped', table_day = delivery_table(day, 'dropped'), finished_at = now()
    from gone where d.event_id = gone.id and d.state in ('due', 'parked', 'over_quota')
)
select id, webhook_id, body from gone;

-- delete_unready
-- The network is indexed again from the start: delete events that are not ready to send.
delete from events where network = $1 and (lacks is not null or after_block is not null);

-- add_lookups
insert into mined_lookups (webhook_id, network, tx_hash) select $1, $2, unnest($3::text[]) on conflict do nothing;

-- drop_lookups
-- Those of a webhook that does not name their transactions any more.
delete from mined_lookups where webhook_id = $1 and tx_hash <> all($2::text[]);

-- list_lookups
-- A page with their age in seconds: the oldest of each account before the second of any, so that none waits for the many of
-- another.
select webhook_id, tx_hash, extract(epoch from now() - ranked.created_at)::float8 as age_s from (
    select mined_lookups.*, row_number() over (
        partition by account_id order by mined_lookups.created_at, webhook_id, tx_hash
    ) as place
    from mined_lookups join webhooks on webhooks.id = webhook_id where mined_lookups.network = $1
) ranked order by place, ranked.created_at, webhook_id, tx_hash limit $2 offset $3;

-- end_lookups
delete from mined_lookups using unnest($1::text[], $2::text[]) as t (webhook_id, tx_hash)
where mined_lookups.webhook_id = t.webhook_id and mined_lookups.tx_hash = t.tx_hash;

-- followed_block
-- The last block written; and the hash under which a block was written, null if it is too old to be kept.
select block as head, (
    select hash from recent_blocks where recent_blocks.network = followed_networks.number and recent_blocks.number = $2
) as hash
from followed_networks where network = $1 and block is not null;

-- set_mempool_watch
insert into mempool_watches (network, version) values ($1, $2)
on conflict (network) do update set version = $2, watched_at = now();

-- end_mempool_watch
delete from mempool_watches where network = $1;

-- list_mempool_watches
-- Those that were confirmed in the last seconds.
select network, version from mempool_watches where watched_at > now() - make_interval(secs => $1);

-- notify_events
-- Wake the process that completes events when the transaction commits.
select pg_notify('penstock_events', $1);
