-- lock_team
-- Serialise changes of an account's members until the end of the transaction.
select id from accounts where id = $1 and not disabled for no key update;

-- may_manage_members
-- An owner, or a key with the scope.
select exists (select from people where id = $1 and account_id = $2 and role = 'owner')
    or exists (
        select from keys where id = $1 and account_id = $2 and 'members:manage' = any (scopes) and status = 'active'
            and (expires_at is null or expires_at > now())
    );

-- list_members
-- The first owner comes first.
select p.id, p.email, p.role, p.since as joined_at, p.id = p.account_id as is_first_owner,
    f.confirmed_at is not null as has_second_factor, (select max(s.seen_at) from sessions s where s.account_id = p.id) as seen_at
from people p left join account_second_factors f on f.account_id = p.id
where p.account_id = $1 and p.role <> 'visitor' order by p.id <> p.account_id, p.since, p.id;

-- list_invitations
select i.id, i.email, i.role, i.created_at, i.expires_at, coalesce(p.email, 'API key ' || k.name, '') as invited_by
from invitations i left join people p on p.id = i.invited_by left join keys k on k.id = i.invited_by
where i.account_id = $1 and i.expires_at > now() order by i.created_at, i.id;

-- is_in_account
select exists (select from people where account_id = $1 and lower(email) = lower($2));

-- count_team
-- Members and open invitations, without one to this address.
select (select count(*) from members where account_id = $1)
    + (select count(*) from invitations where account_id = $1 and expires_at > now() and lower(email) <> lower($2));

-- invite
-- Replaces an earlier invitation of the account to the address.
insert into invitations (id, account_id, invited_by, email, role, digest, expires_at)
values ($1, $2, $3, $4, $5, $6, now() + make_interval(secs => $7))
on conflict (account_id, lower(email)) do update set id = excluded.id, invited_by = excluded.invited_by, email = excluded.email,
    role = excluded.role, digest = excluded.digest, created_at = now(), expires_at = excluded.expires_at
returning id, email, role, created_at, expires_at;

-- revoke_invitation
delete from invitations where account_id = $1 and id = $2 returning email;

-- read_invitation
select i.email, i.role, a.name as account_name from invitations i join accounts a on a.id = i.account_id
where i.digest = any ($1::bytea[]) and i.expires_at > now() and not a.disabled;

-- take_invitation
-- An invitation works once: the row is deleted.
delete from invitations i using accounts a
where i.digest = any ($1::bytea[]) and a.id = i.account_id and i.expires_at > now() and not a.disabled
returning i.account_id, i.email, i.role, a.email as first_owner;

-- add_member
insert into members (id, account_id, email, role) values ($1, $2, $3, $4);

-- change_role
update members set role = $3 where account_id = $1 and id = $2 returning email;

-- end_invitations_by
delete from invitations where invited_by = $1;

-- read_member
select id, email, role from members where account_id = $1 and id = $2;

-- list_orphans
-- Members of deleted accounts, who joined while it was deleted.
select m.id from members m join accounts a on a.id = m.account_id where a.disabled and a.email = '';

-- remove_members
-- With everything that signs them in, and their invitations.
with sessions_end as (
    delete from sessions where account_id = any ($1::text[])
), links_end as (
    delete from sign_in_links where account_id = any ($1::text[])
), passwords_end as (
    delete from account_passwords where account_id = any ($1::text[])
), email_changes_end as (
    delete from email_changes where account_id = any ($1::text[])
), second_factors_end as (
    delete from account_second_factors where account_id = any ($1::text[])
), invitations_end as (
    delete from invitations where invited_by = any ($1::text[])
)
delete from members where id = any ($1::text[]);

-- begin_visit
insert into account_visits (id, account_id, admin_token_id, ends_at) values ($1, $2, $3, now() + make_interval(secs => $4));

-- delete_expired_invitations
delete from invitations where expires_at < now();

-- delete_expired_visits
delete from account_visits where ends_at < now();
