-- record
-- At most this many in an hour, except by operators: no holder reads more, and a program must not fill the disk. None for an
-- erased account.
insert into actions (account_id, by, name, action, subject, address, before, after)
select $1, $2, $3, $4, $5, $6, $8::json, $9::json
where ($2 = 'operator' or (
    select count(*) from (
        select from actions where account_id = $1 and by = $2 and at > now() - interval '1 hour' limit $7
    ) recent
) < $7) and ($1::text is null or exists (select from accounts where id = $1 and not (disabled and email = '') for key share));

-- list_actions
select at, by, name, action, subject, address, before, after from actions
where account_id = $1 order by at desc, id desc limit $2 offset $3;

-- count_actions
select count(*) from actions where account_id = $1;

-- search_actions
-- Actions of all accounts and operators, newest first, that match each filter that is not null; $7: only those before this id.
select a.id, a.at, a.account_id, accounts.name as account_name, a.by, a.name, a.action, a.subject, a.address, a.before, a.after
from actions a left join accounts on accounts.id = a.account_id
where ($1::text is null or a.account_id = $1) and ($2::text is null or a.by = $2) and ($3::text is null or a.name = $3)
    and ($4::text is null or a.action = $4) and ($5::timestamptz is null or a.at >= $5)
    and ($6::timestamptz is null or a.at < $6) and ($7::bigint is null or a.id < $7)
order by a.id desc limit $8;

-- delete_old_actions
delete from actions where at < now() - make_interval(days => $1);
