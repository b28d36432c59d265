-- The code of a failed request's error, for counts by code.

alter table requests add column code text not null default '';
