-- Several people in an account: members, who are invited by email, and operators who look at it for a while.

-- Transactions of the service lock these tables in different orders. The migration takes all of them at once, and gives up
-- before a transaction that waits for it could fail: Postgres looks for deadlocks after a second.
do $$
begin
    set local lock_timeout = '200ms';
    for attempt in 1..50 loop
        begin
            lock table sessions, accounts, account_passwords, account_second_factors, admin_tokens, sign_in_links, email_changes
                in access exclusive mode;
            return;
        exception when lock_not_available or deadlock_detected then
            perform pg_sleep(0.05);
        end;
    end loop;
    raise lock_not_available using message = 'the tables of accounts are busy', hint = 'run the migration again';
end $$;

create table members (
    id text primary key,
    account_id text not null references accounts (id),
    email text not null,
    role text not null check (role in ('owner', 'developer', 'read-only')),
    joined_at timestamptz not null default now()
);

create index members_of_account on members (account_id, joined_at);
-- An address signs in to one account.
create unique index members_by_email on members (lower(email));

-- Invitations that were not accepted yet. Accepting one deletes its row.
create table invitations (
    id text primary key,
    account_id text not null references accounts (id),
    email text not null,
    role text not null check (role in ('owner', 'developer', 'read-only')),
    -- The member who sent it, or the account if its first owner did. It ends with the member.
    invited_by text not null,
    -- Digest of the link's token.
    digest bytea not null unique,
    created_at timestamptz not null default now(),
    expires_at timestamptz not null
);

-- A new invitation to an address replaces the one before.
create unique index invitations_of_account on invitations (account_id, lower(email));
create index invitations_by_end on invitations (expires_at);

-- Operators who look at an account, each until the given time.
create table account_visits (
    id text primary key,
    account_id text not null references accounts (id),
    admin_token_id text not null references admin_tokens (id),
    ends_at timestamptz not null
);

create index account_visits_by_end on account_visits (ends_at);

-- Everyone who can be signed in to an account. The first owner is the account itself, by whose email address it is known.
create view people as
select a.id, a.id as account_id, a.email, 'owner' as role, '' as visitor, a.created_at as since, a.disabled
from accounts a
union all
select m.id, m.account_id, m.email, m.role, '', m.joined_at, a.disabled from members m join accounts a on a.id = m.account_id
union all
select v.id, v.account_id, '', 'visitor', t.name, v.ends_at, a.disabled
from account_visits v join accounts a on a.id = v.account_id join admin_tokens t on t.id = v.admin_token_id
where v.ends_at > now() and t.revoked_at is null;

-- The tables of passwords, second factors, links and sessions refer to a person: `account_id` is the id of an account or of a
-- member. 1.0.0 finds no account for a member, so members cannot sign in there, and their sessions have digests of another kind,
-- which it does not look for.
-- contract: only the references to accounts are dropped, which 1.0.0 and versions before do not rely on.
alter table account_passwords drop constraint account_passwords_account_id_fkey;
alter table account_second_factors drop constraint account_second_factors_account_id_fkey;
alter table email_changes drop constraint email_changes_account_id_fkey;
alter table sign_in_links drop constraint sign_in_links_account_id_fkey;
alter table sessions drop constraint sessions_account_id_fkey;
