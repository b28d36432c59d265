-- The directives that requests with a key may use. Null means the usual ones.

alter table keys add column directives text[];
