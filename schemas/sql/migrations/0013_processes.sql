-- The processes of the fleet, as they report themselves: host, version, role, and the networks that a follower indexes.

create unlogged table processes (
    id text primary key,
    seen_at timestamptz not null default now(),
    report json not null
);
