-- find_holder
-- The person whom an email address signs in: the holder of the oldest account that is not disabled, or else a member.
select p.id, p.account_id, p.email, w.hash from people p left join account_passwords w on w.account_id = p.id
where lower(p.email) = lower($1) and p.email <> '' and not p.disabled order by p.id <> p.account_id, p.since, p.id limit 1;

-- read_holder
select p.id, p.account_id, p.email, w.hash from people p left join account_passwords w on w.account_id = p.id
where p.id = $1;

-- set_password
insert into account_passwords (account_id, hash) values ($1, $2)
on conflict (account_id) do update set hash = excluded.hash, changed_at = now();

-- end_account_sessions
-- All sessions except the given one.
delete from sessions where account_id = $1 and digest <> all ($2::bytea[]);

-- end_account_links
delete from sign_in_links where account_id = $1;

-- begin_session
insert into sessions (digest, account_id, admin_token_id, expires_at, address, agent)
values ($1, $2, $3, now() + make_interval(secs => $4), $5, $6);

-- end_session
delete from sessions where digest = any ($1::bytea[]);

-- read_session
-- The session, unless it has expired, was idle for too long, its account is disabled, its token revoked, or its person is gone.
select s.account_id as person_id, p.account_id, p.role, p.visitor, p.email, s.admin_token_id, s.created_at, s.expires_at,
    s.seen_at < now() - interval '30 seconds' as is_stale,
    a.name as account_name, a.email as account_email, a.plan, a.created_at as account_created_at,
    w.account_id is not null as has_password, f.confirmed_at is not null as has_second_factor, t.name as token_name
from sessions s
left join people p on p.id = s.account_id
left join accounts a on a.id = p.account_id
left join account_passwords w on w.account_id = s.account_id
left join account_second_factors f on f.account_id = s.account_id
left join admin_tokens t on t.id = s.admin_token_id
where s.digest = any ($1::bytea[]) and s.expires_at > now() and s.seen_at > now() - make_interval(secs => $2)
    and (not a.disabled or t.revoked_at is null and t.id is not null);

-- touch_session
update sessions set seen_at = now() where digest = any ($1::bytea[]);

-- add_link
insert into sign_in_links (digest, account_id, expires_at) values ($1, $2, now() + make_interval(secs => $3)) returning expires_at;

-- read_link
select p.id, p.email from sign_in_links l join people p on p.id = l.account_id
where l.digest = any ($1::bytea[]) and l.expires_at > now();

-- take_link
-- A link works once: the row is deleted.
delete from sign_in_links l using people p
where l.digest = any ($1::bytea[]) and p.id = l.account_id and l.expires_at > now() and not p.disabled
returning l.account_id;

-- count_try
-- Take one attempt from a bucket that holds one window's worth. Returns the seconds to wait, or zero if it was
-- counted.
with bucket as (
    insert into sign_in_tries as t (subject, edge) values ($1, now() - make_interval(secs => $2) + make_interval(secs => $3))
    on conflict (subject) do update
    set edge = greatest(t.edge, now() - make_interval(secs => $2)) + make_interval(secs => $3)
    where greatest(t.edge, now() - make_interval(secs => $2)) + make_interval(secs => $3) <= now()
    returning 0::float8 as wait
)
select coalesce(
    (select wait from bucket),
    (select extract(epoch from edge - now())::float8 + $3 from sign_in_tries where subject = $1)
);

-- count_code
-- The same for codes of second factors.
with bucket as (
    insert into code_tries as t (subject, edge) values ($1, now() - make_interval(secs => $2) + make_interval(secs => $3))
    on conflict (subject) do update
    set edge = greatest(t.edge, now() - make_interval(secs => $2)) + make_interval(secs => $3)
    where greatest(t.edge, now() - make_interval(secs => $2)) + make_interval(secs => $3) <= now()
    returning 0::float8 as wait
)
select coalesce(
    (select wait from bucket),
    (select extract(epoch from edge - now())::float8 + $3 from code_tries where subject = $1)
);

-- clear_codes
delete from code_tries where subject = any ($1::bytea[]);

-- delete_old_codes
delete from code_tries where edge < now() - make_interval(secs => $1);

-- clear_tries
delete from sign_in_tries where subject = any ($1::bytea[]);

-- known_places
select place from sign_in_places where place = any ($1::bytea[]) and seen_at > now() - make_interval(secs => $2);

-- add_places
insert into sign_in_places (place) select unnest($1::bytea[]) on conflict (place) do update set seen_at = now();

-- add_token
insert into admin_tokens (id, name, digest, hint, previous_digest, pepper)
values ($1, $2, $3, $4, $5, coalesce((select number from peppers where check_value = $6), 1))
returning id, name, hint, created_at;

-- list_tokens
select id, name, hint, created_at, last_used_at, revoked_at from admin_tokens order by created_at, id;

-- revoke_token
update admin_tokens set revoked_at = coalesce(revoked_at, now()) where id = $1
returning id, name, hint, created_at, last_used_at, revoked_at;

-- end_token_sessions
delete from sessions where admin_token_id = $1;

-- find_token
-- A host that has two peppers moves the token to the first of them, and keeps the other digest for hosts that have only this one.
update admin_tokens set
    last_used_at = now(),
    digest = case when cardinality($1::bytea[]) > 1 then ($1::bytea[])[1] else digest end,
    previous_digest = coalesce(($1::bytea[])[2], previous_digest),
    pepper = case
        when cardinality($1::bytea[]) > 1 or digest = ($1::bytea[])[1]
        then coalesce((select number from peppers where check_value = $2), pepper)
        else pepper
    end
where (digest = any ($1::bytea[]) or previous_digest = any ($1::bytea[])) and revoked_at is null
returning id, name;

-- delete_expired_sessions
delete from sessions where expires_at < now() or seen_at < now() - make_interval(secs => $1);

-- delete_expired_links
delete from sign_in_links where expires_at < now();

-- delete_old_places
delete from sign_in_places where seen_at < now() - make_interval(secs => $1);

-- delete_old_tries
delete from sign_in_tries where edge < now() - interval '1 hour';

-- list_sessions
-- The valid sessions of an account, the last used first. The id is a part of the digest, which is useless to sign in.
select 'sess_' || encode(substring(digest for 12), 'hex') as id, created_at, seen_at, expires_at, address, agent,
    digest = any ($2::bytea[]) as is_current
from sessions
where account_id = $1 and expires_at > now() and seen_at > now() - make_interval(secs => $3)
order by seen_at desc, id limit 200;

-- end_session_of_account
delete from sessions where account_id = $1 and 'sess_' || encode(substring(digest for 12), 'hex') = $2 returning digest;

-- begin_email_change
-- Replaces an earlier one of the account.
insert into email_changes (account_id, email, digest, expires_at) values ($1, $2, $3, now() + make_interval(secs => $4))
on conflict (account_id) do update set email = excluded.email, digest = excluded.digest, expires_at = excluded.expires_at;

-- end_email_change
delete from email_changes where account_id = $1;

-- take_email_change
-- A link works once: the row is deleted.
delete from email_changes c using people p
where c.digest = any ($1::bytea[]) and p.id = c.account_id and c.expires_at > now() and not p.disabled
returning p.id as person_id, p.account_id, c.email, p.email as old_email;

-- delete_expired_email_changes
delete from email_changes where expires_at < now();
