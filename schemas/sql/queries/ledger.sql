-- reserve
select * from gas_reserve($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16);

-- settle
-- Settle included operations in block order. Returns for each the reservation that pays, or null.
select gas_settle($1, entry_point, sender, nonce, hash, wei, $2, block, block_hash, transaction)
from unnest($3::bytea[], $4::bytea[], $5::numeric[], $6::bytea[], $7::numeric[], $8::bigint[], $9::bytea[], $10::bytea[])
    with ordinality as e (entry_point, sender, nonce, hash, wei, block, block_hash, transaction, place)
order by place;

-- reopen_above
-- Reopen reservations settled in blocks above this one, which were removed.
select gas_reopen(id) from (
    select id from gas_reservations where network = $1 and state <> 'open' and block > $2 order by id
) gone;

-- reopen_unsettled
-- Reopen everything that is not final, because its blocks are read again.
select gas_reopen(id) from (
    select id from gas_reservations where network = $1 and state = 'spent' order by id
) doubtful;

-- reopen
select gas_reopen($1);

-- close
select gas_close($1, $2);

-- release
select gas_release($1, $2);

-- list_unsettled_networks
select distinct network from gas_reservations where state in ('open', 'spent');

-- claim_due
-- Claim reservations whose outcome is final: they expired before the time of a final block, or were spent in a final
-- block. The claim keeps other workers from checking the same ones.
with due as (
    select id from gas_reservations
    where network = $1 and looked_at < $4::timestamptz - make_interval(secs => $5)
        and ((state = 'open' and valid_until < $3) or (state = 'spent' and block <= $2))
    order by since_block, id limit $6
    for update skip locked
)
update gas_reservations r set looked_at = $4 from due where r.id = due.id
returning r.id, r.state, r.entry_point, r.sender, r.nonce, r.since_block,
    array(
        select s.op_hash from gas_signatures s where s.reservation_id = r.id
        union select r.op_hash where r.op_hash is not null
    ) as hashes;

-- read_totals
-- Amounts that count towards the policies' limits today, and lifetime totals.
select p.id, m.reserved, m.spent, m.operations, gas_used(p.id, '', p.reset, $2) as used
from gas_policies p left join gas_meters m on m.policy_id = p.id and m.sender = '' and m.day = '-infinity'
where p.id = any($1::text[]);

-- list_days
select day, reserved, spent, operations from gas_meters
where policy_id = $1 and sender = '' and day > '-infinity'
order by day desc limit $2;

-- list_users
-- Highest spending first.
select m.sender, m.reserved, m.spent, m.operations, gas_used(p.id, m.sender, p.reset, $2) as used,
    coalesce(d.operations, 0) as operations_today
from gas_policies p
join gas_meters m on m.policy_id = p.id and m.sender <> '' and m.day = '-infinity'
left join gas_meters d on d.policy_id = p.id and d.sender = m.sender and d.day = $2
where p.id = $1
order by m.reserved + m.spent desc, m.sender limit $3 offset $4;

-- count_users
select count(*) from gas_meters where policy_id = $1 and sender <> '' and day = '-infinity';
