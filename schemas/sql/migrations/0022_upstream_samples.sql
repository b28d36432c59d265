-- The health of upstreams over time, for the operators' charts. Rows are removed after three days.

create table upstream_samples (
    upstream text not null,
    at timestamptz not null,
    network text not null,
    label text not null,
    state text not null,
    breaker text not null,
    lag_blocks bigint,
    error_rate double precision,
    p50_ms double precision,
    p99_ms double precision,
    primary key (upstream, at)
);

create index upstream_samples_by_time on upstream_samples (at);
