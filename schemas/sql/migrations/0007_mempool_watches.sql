-- The version of a network's webhooks for which its mempool is watched. Absent while it is not watched.

create table mempool_watches (
    network text primary key,
    version bigint not null
);
