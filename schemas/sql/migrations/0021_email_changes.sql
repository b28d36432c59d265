-- New email addresses that a link in a mail to them has to confirm.

create table email_changes (
    account_id text primary key references accounts (id),
    email text not null,
    -- Digest of the link's token.
    digest bytea not null unique,
    expires_at timestamptz not null
);
