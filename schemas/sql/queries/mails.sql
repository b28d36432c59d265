-- Emails to account holders.

-- add
insert into mails (account_id, kind, about)
select account_id, $2, $3 from webhooks where id = $1;

-- claim
update mails set due_at = now() + make_interval(secs => $1::double precision), tries = tries + 1
from accounts
where mails.account_id = accounts.id and mails.id in (
    select id from mails where ended_at is null and due_at <= now() order by due_at limit $2 for update skip locked
)
returning mails.id, kind, about, tries, mails.created_at, accounts.name, accounts.email;

-- finish
update mails set ended_at = now(), sent = $2 where id = $1;

-- postpone
update mails set due_at = now() + make_interval(secs => $2::double precision) where id = $1 and ended_at is null;

-- next_due
select extract(epoch from min(due_at) - now())::double precision from mails where ended_at is null;

-- purge
delete from mails where ended_at < now() - make_interval(days => $1::integer);
