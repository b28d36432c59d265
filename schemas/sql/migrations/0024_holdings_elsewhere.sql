-- The index of a network may be in another database. Once a block was written here without its holdings, those that are here
-- are incomplete until the index is reset.
alter table followed_networks add column indexes_holdings boolean not null default true;
