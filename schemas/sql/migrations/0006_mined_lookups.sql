-- Transactions that a webhook has named, to look up whether they were mined before. Deleted once that is known.

create table mined_lookups (
    webhook_id text not null references webhooks (id) on delete cascade,
    network text not null,
    tx_hash text not null,
    created_at timestamptz not null default now(),
    primary key (webhook_id, tx_hash)
);

create index mined_lookups_by_network on mined_lookups (network, created_at);
