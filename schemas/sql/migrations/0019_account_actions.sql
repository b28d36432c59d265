-- The origin of each session, and a record of what was done in each account.

alter table sessions add column address text not null default '', add column agent text not null default '';

-- Changes to an account and sign-ins, for its holder to look through. Deleted after a year.
create table account_actions (
    id bigint generated always as identity primary key,
    account_id text not null references accounts (id),
    at timestamptz not null default now(),
    by text not null check (by in ('holder', 'key', 'operator')),
    -- The name of the key or operator; empty for the holder.
    name text not null default '',
    -- The id of the operation in the API spec.
    action text not null,
    -- The id of the key, webhook, policy or session that was changed, if it has one.
    subject text not null default '',
    address text not null default ''
);

create index account_actions_of_account on account_actions (account_id, at desc);
create index account_actions_by_age on account_actions (at);
