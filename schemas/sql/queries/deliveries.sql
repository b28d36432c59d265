-- The webhook outbox. A null `$n::timestamptz` means now. `open_deliveries` are the unfinished ones: one table, however many
-- days there are.

-- list_due
-- Webhooks with due deliveries, plus one row without a webhook for the next due time. A loose index scan: one step
-- per webhook, regardless of the number of deliveries.
with recursive seen as (
    (
        select webhook_id, due_at from open_deliveries
        where state in ('due', 'over_quota') order by webhook_id, due_at limit 1
    )
    union all
    select next.webhook_id, next.due_at
    from seen cross join lateral (
        select webhook_id, due_at from open_deliveries
        where state in ('due', 'over_quota') and webhook_id > seen.webhook_id
        order by webhook_id, due_at limit 1
    ) next
)
select seen.webhook_id, coalesce(webhooks.status, 'deleted') as status, webhooks.url, webhooks.account_id,
    null::double precision as in_s
from seen left join webhooks on webhooks.id = seen.webhook_id
where seen.due_at <= coalesce($1::timestamptz, now())
union all
select null, null, null, null, extract(epoch from min(seen.due_at) - coalesce($1, now()))::double precision
from seen where seen.due_at > coalesce($1, now());

-- claim
-- Claim up to the given number of deliveries per webhook, oldest first. Rows that another process is claiming are
-- skipped. Their events are read by read_claimed.
with picked as materialized (
    select taken.*, webhooks.id, webhooks.network, webhooks.url, webhooks.event_type, webhooks.secret,
        case when webhooks.old_secret_until > coalesce($3::timestamptz, now()) then webhooks.old_secret end as old_secret,
        accounts.id as account_id, accounts.plan, webhooks.fault
    from unnest($1::text[], $2::integer[]) as wanted (webhook_id, room)
    join webhooks on webhooks.id = wanted.webhook_id and webhooks.status = 'active'
    join accounts on accounts.id = webhooks.account_id
    cross join lateral (
        select event_id from open_deliveries d
        where d.webhook_id = wanted.webhook_id and state in ('due', 'over_quota')
            and due_at <= coalesce($3, now())
        order by due_at limit wanted.room for update skip locked
    ) taken
)
update open_deliveries d set
    state = 'due', claim = claim + 1, due_at = coalesce($3, now()) + make_interval(secs => $4::double precision)
from picked where d.event_id = picked.event_id
returning d.event_id, d.day, d.webhook_id, claim, tries, counted, picked.network, url, event_type, secret,
    old_secret, account_id, plan, picked.fault,
    case when picked.fault is not null then
        extract(epoch from coalesce($3, now()) - d.created_at)::double precision
    end as age_s,
    case when picked.fault is not null then (
        select count(*) from attempts a where a.event_id = d.event_id and status between 200 and 299
    ) end as copies;

-- read_claimed
-- The events of claimed deliveries, which are of one day: a statement per day reads one table.
select id, type, test, body, injected, takes_back from events where day = $1 and id = any($2::text[]);

-- postpone
-- Let claimed deliveries wait longer. They were not sent, so the claim does not count as an attempt.
update open_deliveries d set claim = d.claim - 1,
    due_at = coalesce($4::timestamptz, now()) + make_interval(secs => wait_s)
from unnest($1::text[], $2::bigint[], $3::double precision[]) as waiting (event_id, claim, wait_s)
where d.event_id = waiting.event_id and d.claim = waiting.claim and state = 'due';

-- take_quota
-- Take deliveries from the accounts' daily quotas, always in the same order to avoid deadlocks.
select account, granted, tell
from unnest($1::text[], $2::bigint[], $3::bigint[]) as wanted (account, wanted, day_limit)
cross join lateral take_deliveries(account, (coalesce($4::timestamptz, now()) at time zone 'utc')::date, wanted, day_limit);

-- mark_counted
update open_deliveries set counted = true where event_id = any($1::text[]);

-- hold
-- Hold deliveries until the next day. They were claimed but not sent, so the claim does not count as an attempt.
update open_deliveries d set state = 'over_quota', claim = d.claim - 1,
    due_at = (date_trunc('day', coalesce($3::timestamptz, now()) at time zone 'utc') + interval '1 day') at time zone 'utc'
from unnest($1::text[], $2::bigint[]) as held (event_id, claim)
where d.event_id = held.event_id and d.claim = held.claim and state in ('due', 'over_quota');

-- hold_more
-- Hold up to this many other due deliveries of these webhooks that are not counted yet.
update open_deliveries set state = 'over_quota',
    due_at = (date_trunc('day', coalesce($2::timestamptz, now()) at time zone 'utc') + interval '1 day') at time zone 'utc'
where event_id in (
    select event_id from open_deliveries
    where webhook_id = any($1::text[]) and state in ('due', 'over_quota') and due_at <= coalesce($2, now()) and not counted
    limit $3 for update skip locked
);

-- day_used
-- The account's plan and its deliveries of today.
select plan, coalesce(used, 0) as used from accounts left join delivery_days
    on delivery_days.account_id = accounts.id and day = (now() at time zone 'utc')::date
where accounts.id = $1;

-- release_held
-- Release up to this many held deliveries of an account.
update open_deliveries set state = 'due', due_at = now() where event_id in (
    select event_id from open_deliveries
    where state = 'over_quota' and webhook_id in (select id from webhooks where account_id = $1)
    limit $2 for update skip locked
);

-- park
-- Park due deliveries of webhooks that are not active. Resuming a webhook waits for this lock, and so finds the
-- parked rows.
with still as materialized (
    select id, status from webhooks where id = any($1::text[]) and status <> 'active' for share
)
update open_deliveries d set
    state = case when still.status = 'deleted' then 'dropped' else 'parked' end,
    table_day = delivery_table(day, case when still.status = 'deleted' then 'dropped' else 'parked' end),
    finished_at = case when still.status = 'deleted' then now() end
from still
where d.event_id in (
    select event_id from open_deliveries
    where webhook_id in (select id from still) and state in ('due', 'over_quota') and due_at <= coalesce($2::timestamptz, now())
    limit $3 for update skip locked
) and d.webhook_id = still.id;

-- drop_orphans
-- Drop due deliveries of webhooks that no longer exist, up to this many.
update open_deliveries d set state = 'dropped', table_day = delivery_table(day, 'dropped'), finished_at = now()
where event_id in (
    select event_id from open_deliveries o
    where webhook_id = any($1::text[]) and state in ('due', 'over_quota')
        and not exists (select from webhooks where id = o.webhook_id)
    limit $2 for update skip locked
);

-- finish
-- Record attempts and advance their deliveries, unless a delivery was claimed again meanwhile. `concat` hides the
-- state from the planner: looking up the few keys is cheaper than scanning the index of all due deliveries.
with done as materialized (
    select * from json_to_recordset($1::json) as t (
        event_id text, claim bigint, ago_s double precision, took_ms integer, outcome text, status smallint, excerpt text,
        state text, tries smallint, again_s double precision, sent text, reply_headers text, reply_body text
    )
), recorded as (
    insert into attempts (event_id, number, began_at, took_ms, outcome, status, excerpt, sent, reply_headers, reply_body)
    select done.event_id, done.claim, coalesce($2::timestamptz, now()) - make_interval(secs => ago_s), took_ms, outcome,
        status, excerpt, sent, reply_headers, reply_body
    from done
    on conflict do nothing
)
update open_deliveries d set
    state = done.state,
    table_day = delivery_table(day, done.state),
    tries = done.tries,
    due_at = case when again_s is null then due_at else coalesce($2, now()) + make_interval(secs => again_s) end,
    finished_at = case when done.state in ('delivered', 'failed') then coalesce($2, now()) end
from done
where d.event_id = done.event_id and d.claim = done.claim and concat(d.state) = 'due';

-- count_deliveries
-- By table, with the times of the oldest and the newest. It reads the index only, and has one plan for all values: planning for
-- the tables of a month takes as long as reading thousands of rows.
select table_day, count(*) as count, min(created_at) as oldest, max(created_at) as newest from deliveries
where webhook_id = $1 and created_at >= $2
group by table_day;

-- count_in_state
-- As count_deliveries, in one state.
select table_day, count(*) as count, min(created_at) as oldest, max(created_at) as newest from deliveries
where webhook_id = $1 and created_at >= $2 and state = $3
group by table_day;

-- list_deliveries
-- A page of the deliveries in these tables, newest first. Their events are read by describe_events.
select event_id, state, due_at, tries, created_at, finished_at, day from deliveries
where webhook_id = $1 and created_at >= $2 and ($3::text is null or state = $3) and table_day = any($4::date[])
order by created_at desc, event_id limit $5 offset $6;

-- describe_events
-- As read_claimed, for lists.
select id, type, block, test from events where day = $1 and id = any($2::text[]);

-- list_attempts
-- The last few attempts of each delivery, in the tables of the days between these times.
select recent.* from unnest($1::text[]) as wanted (event_id) cross join lateral (
    select event_id, number, began_at, took_ms, outcome, status, excerpt
    from attempts a where a.event_id = wanted.event_id and began_at between $3 and $4 order by number desc limit $2
) recent order by recent.event_id, recent.number;

-- read_delivery
select event_id, state, due_at, tries, deliveries.created_at, finished_at, type, block, test, body
from deliveries join events on events.day = deliveries.day and events.id = deliveries.event_id
where deliveries.webhook_id = $1 and deliveries.event_id = $2;

-- read_attempts
-- The last attempts of one delivery, with what was sent and received.
select number, began_at, took_ms, outcome, status, excerpt, sent, reply_headers, reply_body from (
    select * from attempts where event_id = $1 order by number desc limit $2
) recent order by number;

-- recent_attempts
-- The last attempts of each webhook, among its newest deliveries.
select wanted.webhook_id, recent.* from unnest($1::text[]) as wanted (webhook_id) cross join lateral (
    select number, began_at, took_ms, outcome, status, excerpt
    from attempts where event_id in (
        select event_id from deliveries where deliveries.webhook_id = wanted.webhook_id
        order by created_at desc limit $2
    ) order by began_at desc limit $2
) recent order by wanted.webhook_id, recent.began_at;

-- count_last_day
-- The events of each webhook in the last 24 hours, without tests, counted up to a limit.
select wanted.webhook_id, counted.events from unnest($1::text[]) as wanted (webhook_id) cross join lateral (
    select count(*) as events from (
        select from deliveries
        where deliveries.webhook_id = wanted.webhook_id and created_at > now() - interval '1 day'
            and event_id not like 'evt\_test\_%'
        limit $2
    ) newest
) counted;

-- redeliver
-- Restart the retry schedule. An attempt in progress no longer counts, and deliveries of an inactive webhook wait. Claims are
-- the numbers of attempts: a delivery without an attempt in progress keeps its claim, so that no number is skipped.
-- Events removed by a reorganisation are not sent again.
with whose as materialized (
    select id, status from webhooks where id = $1 and status <> 'deleted' for share
)
update deliveries set
    state = case when whose.status = 'active' then 'due' else 'parked' end,
    table_day = delivery_table(day, 'due'), due_at = now(), tries = 0,
    claim = claim + attempt_is_open(event_id, claim, state)::integer, counted = false, finished_at = null
from whose
where webhook_id = whose.id and event_id = $2 and state <> 'dropped'
    and not exists (select from events where events.day = deliveries.day and id = $2 and taken_back)
returning event_id;

-- redeliver_since
-- Redeliver one page of deliveries created in the range, oldest first; return their number and the last one as the
-- cursor. Without a state, only finished deliveries. Events removed by a reorganisation are skipped.
with whose as materialized (
    select id, status from webhooks where id = $1 and status <> 'deleted' for share
), picked as materialized (
    select event_id, table_day, created_at from deliveries
    where webhook_id = $1 and (created_at, event_id) > ($2::timestamptz, $3::text) and created_at <= $4::timestamptz
        and state <> 'dropped' and case when $5::text is null then state in ('delivered', 'failed') else state = $5 end
        and not exists (select from events where events.day = deliveries.day and id = deliveries.event_id and taken_back)
    order by created_at, event_id limit $6 for update
), changed as (
    update deliveries set
        state = case when whose.status = 'active' then 'due' else 'parked' end,
        table_day = delivery_table(day, 'due'), due_at = now(), tries = 0,
        claim = claim + attempt_is_open(deliveries.event_id, claim, state)::integer, counted = false,
        finished_at = null
    from picked, whose
    where deliveries.event_id = picked.event_id and deliveries.table_day = picked.table_day
        and deliveries.webhook_id = whose.id
    returning 1
)
select (select count(*) from changed) as changed, event_id, created_at from picked order by created_at desc, event_id desc limit 1;

-- notify
-- Wake the deliverer when the transaction commits.
select pg_notify('penstock_deliveries', '');

-- purge_other_days
-- Delete old events of days without a table of their own, with their deliveries.
with old as materialized (
    select id, day from events_of_other_days
    where created_at < now() - make_interval(days => $1::integer) and not exists (
        select from open_deliveries d where d.event_id = id and state = 'due'
    )
    order by created_at limit $2
), purged_deliveries as (
    delete from deliveries using old
    where deliveries.event_id = old.id and deliveries.day = old.day
)
delete from events_of_other_days using old where events_of_other_days.id = old.id;

-- purge_attempts
-- Delete old attempts of days without a table of their own.
delete from attempts_of_other_days where ctid = any(array(
    select ctid from attempts_of_other_days where began_at < now() - make_interval(days => $1::integer) limit $2
));

-- purge_addresses
-- Delete the addresses of deleted webhooks.
delete from watched_addresses where ctid = any(array(
    select watched_addresses.ctid from webhooks join watched_addresses on webhook = number
    where status = 'deleted' limit $1
));

-- purge_changes
-- Delete address changes that every process has read by now.
delete from watch_changes where ctid = any(array(
    select ctid from watch_changes where changed_at < now() - interval '1 hour' limit $1
));

-- purge_webhooks
-- Delete rows of deleted webhooks that nothing refers to. Every process has read their deletion by then.
delete from webhooks where id in (
    select id from webhooks where status = 'deleted' and updated_at < now() - interval '1 hour'
        and not exists (select from deliveries where webhook_id = webhooks.id)
        and not exists (select from watched_addresses where webhook = number)
    limit $1
);

-- add_attempt_days
select attempts_add_day((now() at time zone 'UTC')::date + ahead) from generate_series(0, 2) as ahead;

-- remove_attempt_days
select attempts_remove_days(now() - make_interval(days => $1::integer));

-- add_event_days
select add_event_day('events', (now() at time zone 'UTC')::date + ahead) from generate_series(0, 2) as ahead;

-- remove_event_days
select events_remove_days(now() - make_interval(days => $1::integer));

-- add_delivery_days
select add_event_day('deliveries', (now() at time zone 'UTC')::date + ahead) from generate_series(0, 2) as ahead;

-- remove_delivery_days
select deliveries_remove_days(now() - make_interval(days => $1::integer));

-- purge_days
delete from delivery_days where day < current_date - $1::integer;

-- purge_event_days
delete from event_days where day < current_date - $1::integer;
