-- add_refusals
insert into gas_refusals (policy_id, at, sender, rule, message)
select * from unnest($1::text[], $2::timestamptz[], $3::bytea[], $4::text[], $5::text[]);

-- trim_refusals
-- Keep only the newest of a policy.
delete from gas_refusals
where policy_id = $1
    and at < (select at from gas_refusals where policy_id = $1 order by at desc limit 1 offset $2::integer - 1);

-- list_refusals
select at, sender, rule, message from gas_refusals where policy_id = $1 order by at desc limit $2;
