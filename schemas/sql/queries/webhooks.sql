-- next_webhook
-- Number for a new webhook.
select nextval('webhook_numbers');

-- lock_webhooks
-- Serialise creation per account until the end of the transaction: two concurrent inserts could both take the last
-- place.
select pg_advisory_xact_lock(hashtextextended('webhooks of ' || $1, 0));

-- lock_webhook
-- Taken before changing addresses, which is slow: the network's version must not stay locked meanwhile.
select pg_advisory_xact_lock(hashtextextended('webhook ' || $1, 0));

-- change_webhooks
-- Increment the network's version and hold it until the transaction ends.
select change_webhooks($1);

-- count_of_account
-- An account's webhook for alerts ('-') does not count with the others.
select count(*) from webhooks where account_id = $1 and status <> 'deleted' and (network = '-') = ($2::text = '-');

-- take_values
-- Count filter values that the account is about to write, unless they would exceed its day.
insert into delivery_days as d (account_id, day, filter_values)
select $1, (now() at time zone 'utc')::date, $2::bigint where $2 <= $3::bigint
on conflict (account_id, day) do update set filter_values = d.filter_values + excluded.filter_values
where d.filter_values + excluded.filter_values <= $3
returning true;

-- create_webhook
insert into webhooks (
    number, id, account_id, network, live, url, event_type, config, addresses, secret, version, addresses_version, test_key,
    fault
)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $11, $12, $13)
returning number, id, account_id, network, url, event_type, config, addresses, status, reason, secret, old_secret_until, version,
    created_at, updated_at, test_key, fault;

-- read_webhook
select number, id, account_id, network, url, event_type, config, addresses, status, reason, secret, old_secret_until,
    version, created_at, updated_at, test_key, fault
from webhooks where id = $1 and account_id = $2 and status <> 'deleted' and network <> '-';

-- read_addresses
select address from watched_addresses where webhook = $1 order by address;

-- list_webhooks
select number, id, account_id, network, url, event_type, config, addresses, status, reason, secret, old_secret_until,
    version, created_at, updated_at, test_key, fault
from webhooks
where account_id = $1 and (not live or $2) and ($3::text is null or status = $3) and status <> 'deleted' and network <> '-'
    and ($4::text[] is null or network = any($4))
order by created_at desc, id limit $5 offset $6;

-- count_webhooks
select count(*) from webhooks
where account_id = $1 and (not live or $2) and ($3::text is null or status = $3) and status <> 'deleted' and network <> '-'
    and ($4::text[] is null or network = any($4));

-- update_webhook
-- Null keeps a value. A config is set together with its number of addresses, which may be null. An empty fault ends it.
update webhooks set
    url = coalesce($3, url),
    config = coalesce($4, config),
    addresses = case when $4 is null then addresses else $5 end,
    addresses_version = case when $4 is null then addresses_version else $6 end,
    version = $6,
    fault = nullif(coalesce($7, fault), ''),
    updated_at = now()
where id = $1 and account_id = $2 and status <> 'deleted'
returning number, id, account_id, network, url, event_type, config, addresses, status, reason, secret, old_secret_until, version,
    created_at, updated_at, test_key, fault;

-- count_addresses
-- Adjust the number of addresses by the difference. A filter without an address list gets one when the first address
-- is added, and none when removing an address that was not there.
update webhooks set
    addresses = case when addresses is null and $2::integer = 0 then null else coalesce(addresses, 0) + $2 end,
    addresses_version = case when addresses is null and $2 <> 0 then version else addresses_version end
where id = $1
returning number, id, account_id, network, url, event_type, config, addresses, status, reason, secret, old_secret_until, version,
    created_at, updated_at, test_key, fault;

-- status_of
-- Locked, so a decision based on it holds until the end of the transaction.
select status, reason from webhooks where id = $1 and status <> 'deleted' for no key update;

-- set_status
-- Sets the network's version, which the transaction has incremented before.
update webhooks set
    status = $2,
    reason = $3,
    version = (select v.version from webhook_versions v where v.network = webhooks.network),
    updated_at = now()
where id = $1
returning number, id, account_id, network, url, event_type, config, addresses, status, reason, secret, old_secret_until, version,
    created_at, updated_at, test_key, fault;

-- unpark
-- Make up to this many parked deliveries due again; returns their number.
with kept as (
    select event_id from open_deliveries where webhook_id = $1 and state = 'parked' order by created_at limit $2 for update
), freed as (
    update open_deliveries d set state = 'due', due_at = clock_timestamp(), tries = 0 from kept
    where d.event_id = kept.event_id
    returning 1
)
select count(*), pg_notify('penstock_deliveries', '') from freed;

-- list_parked
-- Active webhooks with parked deliveries, left by an interrupted resume. A loose index scan: one step per webhook.
with recursive parked as (
    (select webhook_id from open_deliveries where state = 'parked' order by webhook_id limit 1)
    union all
    select next.webhook_id
    from parked cross join lateral (
        select webhook_id from open_deliveries where state = 'parked' and webhook_id > parked.webhook_id
        order by webhook_id limit 1
    ) next
)
select id from parked join webhooks on webhooks.id = parked.webhook_id and webhooks.status = 'active';

-- rotate_secret
-- The old secret keeps signing for a while.
update webhooks set
    old_secret = secret,
    old_secret_until = now() + make_interval(secs => $4),
    secret = $3,
    updated_at = now()
where id = $1 and account_id = $2 and status <> 'deleted'
returning number, id, account_id, network, url, event_type, config, addresses, status, reason, secret, old_secret_until, version,
    created_at, updated_at, test_key, fault;

-- clear_addresses
delete from watched_addresses where webhook = $1;

-- add_addresses
-- Returns the addresses that were not there before.
insert into watched_addresses (webhook, address)
select $1, address from unnest($2::bytea[]) as t (address)
on conflict do nothing
returning address;

-- remove_addresses
-- Returns the addresses that were there.
delete from watched_addresses where webhook = $1 and address = any($2::bytea[])
returning address;

-- note_addresses
insert into watch_changes (webhook, version, address, added)
select $1, $2, address, $4 from unnest($3::bytea[]) as t (address);

-- version_of
-- Locked until the end of the transaction, so no webhook of the network changes meanwhile.
select version from webhook_versions where network = $1 for share;

-- changed_since
-- Webhooks of the network changed after this version, including deleted ones.
select number, id, account_id, event_type, config, addresses, status, version, addresses_version
from webhooks where network = $1 and version > $2 and ($2 > 0 or status in ('active', 'paused'));

-- addresses_of
select webhook, address from watched_addresses where webhook = any($1::bigint[]);

-- address_changes
select webhook, address, added from watch_changes where webhook = any($1::bigint[]) and version > $2 order by version;
