-- Replies of upstreams that others or a proof contradicted, with both replies: evidence for operators.

create table if not exists contradictions (
    id bigint generated always as identity primary key,
    at timestamptz not null,
    network text not null,
    method text not null,
    params text not null,
    kind text not null,
    verified_by text not null,
    upstream text not null,
    operator text not null,
    reply text not null,
    digest text not null,
    others jsonb not null,
    other_reply text not null,
    other_digest text not null,
    reason text not null
);

create index if not exists contradictions_by_network on contradictions (network, at desc);
