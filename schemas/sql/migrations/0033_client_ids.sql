-- The id that a client chose for its request. It may be that of other requests too, so each has an id of ours.

alter table requests add column if not exists client_id text not null default '';
create index if not exists requests_by_client_id on requests (client_id, at desc) where client_id <> '';
