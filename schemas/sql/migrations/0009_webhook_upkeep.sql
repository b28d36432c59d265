-- Webhooks: notes of changed addresses go by their age, and events may wait for what the chain itself calls safe or finalized.

create index watch_changes_by_age on watch_changes (changed_at);

-- What the block must be first, by the chain's own word; after_block is then the event's block. Null: so many blocks later.
alter table events add column finality text check (finality in ('safe', 'finalized'));
create index events_final on events (network, finality, after_block) where finality is not null;
