-- Addresses from which holders have signed in, so that other people's wrong passwords do not keep them out.

create table sign_in_places (
    place bytea primary key,
    seen_at timestamptz not null default now()
);

create index sign_in_places_by_time on sign_in_places (seen_at);
