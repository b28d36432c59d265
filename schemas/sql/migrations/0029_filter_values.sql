-- Addresses and other filter values that an account writes into its webhooks are counted per day: a list of 100,000 addresses
-- takes 20 MB of WAL until it is deleted again.
alter table delivery_days add column filter_values bigint not null default 0;
