-- Admin tokens that hosts with the old pepper find while it is rotated.

alter table admin_tokens
    add column previous_digest bytea,
    add column pepper integer not null default 1;
