-- Peppers in use, so that a changed one is noticed and can be rotated.

create table peppers (
    number integer primary key,
    check_value bytea not null unique,
    since timestamptz not null default clock_timestamp(),
    retired_at timestamptz
);

alter table keys
    add column previous_digest bytea,
    add column pepper integer not null default 1;
