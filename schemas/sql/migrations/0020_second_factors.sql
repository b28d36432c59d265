-- Sign-in with a code from an authenticator app, in addition to the password or link.

create table account_second_factors (
    account_id text primary key references accounts (id),
    -- The app's secret, encrypted.
    sealed bytea not null,
    -- Null until the holder has shown that the app has the secret. Sign-in asks for a code from then on.
    confirmed_at timestamptz,
    -- The time step of the last code: a code works once.
    last_step bigint not null default 0,
    -- Digests of the recovery codes that are left.
    recovery bytea[] not null default '{}',
    created_at timestamptz not null default now()
);
