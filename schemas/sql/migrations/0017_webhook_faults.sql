-- Fault plans of webhooks that test keys created, and the events that such a plan adds.

alter table webhooks
    add column test_key boolean not null default false,
    add column fault text;

alter table events add column injected boolean not null default false;
