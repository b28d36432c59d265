-- Buckets of accounts: their keys share the account's rates.

alter table accounts add column slot bigint not null default nextval('key_slots');
