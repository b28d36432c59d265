-- lock_peppers
-- One process at a time introduces or retires a pepper.
lock table peppers in share row exclusive mode;

-- list_peppers
select number, check_value, since from peppers where retired_at is null order by since, number;

-- add_pepper
-- Numbers are never reused. A retired pepper that comes back keeps its number.
insert into peppers (number, check_value) select coalesce(max(number), 0) + 1, $1 from peppers
on conflict (check_value) do update set since = clock_timestamp(), retired_at = null;

-- retire_other_peppers
update peppers set retired_at = now() where check_value <> $1 and retired_at is null;

-- hold_oldest_pepper
-- The pepper that every host has. It cannot be retired before the transaction ends.
select check_value from peppers where retired_at is null order by since, number limit 1 for share;

-- count_unmoved
-- Keys and admin tokens that still work and whose digest was made with another pepper.
select
    (select count(*) from keys where status <> 'revoked' and (expires_at is null or expires_at > now()) and pepper <> p.number)
        as keys,
    (select count(*) from admin_tokens where revoked_at is null and pepper <> p.number) as tokens
from peppers p where p.check_value = $1;

-- drop_previous_digests
update keys set previous_digest = null
where previous_digest is not null and pepper = (select number from peppers where check_value = $1);

-- drop_previous_token_digests
update admin_tokens set previous_digest = null
where previous_digest is not null and pepper = (select number from peppers where check_value = $1);

-- move_keys
-- Store the digests under the current pepper and keep the previous ones, which hosts with the old settings look for.
update keys k set previous_digest = k.digest, digest = v.digest, pepper = p.number
from unnest($1::text[], $2::bytea[]) as v (id, digest), peppers p
where k.id = v.id and k.digest <> v.digest and p.check_value = $3;

-- list_sealed_secrets
-- Secrets of webhooks, and of the second factors of accounts.
select id, secret, old_secret from (
    select id, secret, old_secret from webhooks where status <> 'deleted' and id > $1
    union all
    select account_id, sealed, null from account_second_factors where account_id > $1
) sealed order by id limit $2;

-- newest_sealed_secret
select id, secret from webhooks where status <> 'deleted' order by number desc limit 1;

-- reseal_secret
-- Nothing changes if the secret was rotated in the meantime: a new secret is sealed with the current key.
with factor as (
    update account_second_factors set sealed = $4 where account_id = $1 and sealed = $2
)
update webhooks set secret = $4, old_secret = $5
where id = $1 and secret = $2 and old_secret is not distinct from $3;

-- copy_method_cordon
insert into method_cordons (upstream, method, label, reason, by_whom, created_at)
select $2, method, label, reason, by_whom, created_at from method_cordons where upstream = $1
on conflict (upstream, method) do nothing;

-- copy_share
insert into canary_shares (upstream, label, share, reason, changed_at)
select $2, label, share, reason, changed_at from canary_shares where upstream = $1
on conflict (upstream) do nothing;

-- copy_cordon
insert into cordons (upstream, label, reason, by_whom, created_at)
select $2, label, reason, by_whom, created_at from cordons where upstream = $1
on conflict (upstream) do nothing;
