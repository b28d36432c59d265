-- Emails to account holders. `ended_at` is null while a mail waits.

-- add
-- Unless the account does not want it, or was erased. The end of its webhook for alerts is always mailed, if it wants mails at all.
insert into mails (account_id, kind, about)
select w.account_id, $2, $3
from webhooks w join accounts a on a.id = w.account_id left join alert_settings s on s.account_id = w.account_id
where w.id = $1 and (s.account_id is null or s.by_mail and (w.network = '-' or 'webhook_paused' = any(s.kinds)))
    and not (a.disabled and a.email = '')
for key share of a;

-- claim
-- Mails of these kinds, each account's first one before any second, so that none waits for the many of another.
update mails set due_at = now() + make_interval(secs => $1::double precision), tries = tries + 1
from accounts
where mails.account_id = accounts.id and mails.id in (
    select m.id from (
        select id, row_number() over (partition by account_id order by due_at) as place from mails
        where ended_at is null and due_at <= now() and kind = any($3::text[])
    ) ranked join mails m on m.id = ranked.id
    where m.ended_at is null and m.due_at <= now()
    order by ranked.place, m.due_at limit $2 for update of m skip locked
)
returning mails.id, kind, about, tries, mails.created_at, accounts.name, accounts.email;

-- finish
update mails set ended_at = now(), sent = $2 where id = $1;

-- postpone
update mails set due_at = now() + make_interval(secs => $2::double precision)
where id = $1 and ended_at is null;

-- next_due
select extract(epoch from min(due_at) - now())::double precision from mails
where ended_at is null and kind = any($1::text[]);

-- purge
delete from mails where ended_at < now() - make_interval(days => $1::integer);
