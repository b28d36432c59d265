-- record_transaction
-- Record a transaction before it is sent. If it is sent again, it waits for relays again.
insert into private_transactions as p (network, hash, account_id, key_id, raw, public_after)
values ($1, $2, $3, $4, $5, $6)
on conflict (network, hash, account_id) do update
set status = case when p.status in ('refused', 'cancelled') then 'seen' else p.status end,
    raw = coalesce(excluded.raw, p.raw), public_after = coalesce(excluded.public_after, p.public_after);

-- mark_accepted
update private_transactions set status = 'sent'
where network = $1 and hash = $2 and account_id = $3 and status = 'seen';

-- mark_refused
update private_transactions set status = 'refused', raw = null, public_after = null
where network = $1 and hash = $2 and account_id = $3 and status = 'seen';

-- cancel_transaction
-- From now on it is not sent to the public mempool.
update private_transactions set status = 'cancelled', raw = null, public_after = null
where network = $1 and hash = $2 and account_id = $3 and status in ('seen', 'sent')
returning hash;

-- newest_of_account
-- Transactions of an account which relays may still have, the newest first.
select hash from private_transactions
where network = $1 and account_id = $2 and status in ('seen', 'sent', 'public') order by created_at desc limit $3;

-- read_transaction
-- A transaction of an account, if relays may still have it.
select hash from private_transactions
where network = $1 and hash = $2 and account_id = $3 and status in ('seen', 'sent', 'public');

-- due_transactions
-- Transactions whose senders want them in the public mempool by now.
select hash, account_id, raw from private_transactions
where network = $1 and public_after <= $2 and status in ('seen', 'sent') order by public_after limit $3;

-- end_wait
update private_transactions set status = $4, raw = null, public_after = null
where network = $1 and hash = $2 and account_id = $3 and status in ('seen', 'sent');

-- postpone
-- Try again after this block.
update private_transactions set public_after = $4
where network = $1 and hash = $2 and account_id = $3 and status in ('seen', 'sent');

-- purge
delete from private_transactions where (network, hash, account_id) in (
    select network, hash, account_id from private_transactions
    where created_at < now() - make_interval(days => $1::integer) order by created_at limit $2
);
