-- record
-- At most this many in an hour: no holder reads more, and a program must not fill the disk. None for an erased account.
insert into account_actions (account_id, by, name, action, subject, address)
select $1, $2, $3, $4, $5, $6
where (
    select count(*) from (
        select from account_actions where account_id = $1 and by = $2 and at > now() - interval '1 hour' limit $7
    ) recent
) < $7 and exists (select from accounts where id = $1 and not (disabled and email = '') for key share);

-- list_actions
select at, by, name, action, subject, address from account_actions
where account_id = $1 order by at desc, id desc limit $2 offset $3;

-- count_actions
select count(*) from account_actions where account_id = $1;

-- delete_old_actions
delete from account_actions where at < now() - make_interval(days => $1);
