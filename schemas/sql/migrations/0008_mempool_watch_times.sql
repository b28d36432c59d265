-- When the watch was last confirmed: a follower that is killed does not delete its row.

alter table mempool_watches add column watched_at timestamptz not null default now();
