-- begin
-- Replaces one that was not confirmed. Returns no row if one is on.
insert into account_second_factors as f (account_id, sealed) values ($1, $2)
on conflict (account_id) do update set sealed = excluded.sealed, last_step = 0, created_at = now() where f.confirmed_at is null
returning account_id;

-- read
select sealed, confirmed_at is not null as is_on from account_second_factors where account_id = $1;

-- confirm
update account_second_factors set confirmed_at = now(), last_step = $2, recovery = $3
where account_id = $1 and confirmed_at is null and last_step < $2 and sealed = $4 returning account_id;

-- use_step
-- Returns no row if this code or a later one was used.
update account_second_factors set last_step = $2
where account_id = $1 and confirmed_at is not null and last_step < $2 returning account_id;

-- use_recovery
update account_second_factors set recovery = array_remove(recovery, $2)
where account_id = $1 and confirmed_at is not null and $2 = any (recovery) returning cardinality(recovery) as codes;

-- remove
delete from account_second_factors where account_id = $1 returning account_id;
