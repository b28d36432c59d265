-- What each gas policy refused last, and by which rule: for its owner to read. Written in batches, and trimmed with each.
create table gas_refusals (
    policy_id text not null references gas_policies (id),
    at timestamptz not null,
    sender bytea not null,
    rule text not null,
    message text not null
);

create index gas_refusals_of_policy on gas_refusals (policy_id, at desc);
