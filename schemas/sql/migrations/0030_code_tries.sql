-- Codes of second factors that were entered, by person and place, as digests. Unlike other attempts they are counted over days,
-- so the counts outlive a crash. `edge` is the time up to which the bucket is used.
create table code_tries (
    subject bytea primary key,
    edge timestamptz not null
);
