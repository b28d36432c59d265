-- Alerts of accounts: which are wanted and where they are sent, and those that were raised.
-- contract: the check on mails.kind gets wider; 1.0.0 writes one of its values only

-- 1.0.0 claims every mail whose ended_at is null, and fails on a kind that it does not know. Mails of the kind alert therefore
-- wait with an ended_at of infinity. This comes first: deleting an account locks mails before accounts, as here.
alter table mails drop constraint mails_kind_check;
alter table mails add constraint mails_kind_check check (kind in ('webhook_paused', 'alert'));
-- Mails that wait, in either way.
create index mails_waiting on mails (due_at) where coalesce(ended_at, 'infinity') = 'infinity';

create table alert_settings (
    account_id text primary key references accounts (id),
    -- The kinds that are wanted.
    kinds text[] not null,
    -- Raise error_rate above this share of failed requests.
    error_percent integer not null check (error_percent between 1 and 100),
    by_mail boolean not null
);

-- Each threshold is raised once per period: a day, or the period of a policy's budget. A row is written in the transaction
-- of its mail and its event.
create table alerts (
    id bigint generated always as identity primary key,
    account_id text not null references accounts (id),
    kind text not null,
    -- The id of the webhook or policy; empty for the account.
    subject text not null,
    threshold integer not null,
    period text not null,
    -- False if a higher threshold was reached at the same time: only the highest one is sent.
    is_sent boolean not null,
    about json not null,
    -- The event of the account's webhook for alerts, if it has one.
    event_id text,
    raised_at timestamptz not null default now(),
    unique (account_id, kind, subject, threshold, period)
);

create index alerts_of_account on alerts (account_id, raised_at desc) where is_sent;
create index alerts_by_age on alerts (raised_at);
