-- Separate tables for the holdings of each network, each in eight parts by holder: vacuum and indexes stay small, and one
-- network's writes do not slow another's reads.
-- contract: 1.0.0 goes on with the new tables, which have the old names, columns and keys when this transaction ends.

-- The table so far keeps the rows of the networks that it has. It is attached without being read: it is the default, and no
-- other part exists yet. The check lets later parts be added without reading it; the next migration validates it.
alter table token_holdings rename to token_holdings_before;
alter index token_holdings_pkey rename to token_holdings_before_pkey;

create table token_holdings (
    network smallint not null,
    holder bytea not null,
    contract bytea not null,
    amount numeric not null,
    primary key (network, holder, contract)
) partition by list (network);

alter table nft_holdings rename to nft_holdings_before;
alter index nft_holdings_pkey rename to nft_holdings_before_pkey;
alter index nft_holders rename to nft_holders_before;
alter index nft_holdings_at_zero rename to nft_holdings_at_zero_before;
alter index nft_holders_of_token rename to nft_holders_of_token_before;

create table nft_holdings (
    network smallint not null,
    standard smallint not null,
    holder bytea not null,
    contract bytea not null,
    token_id numeric not null,
    amount numeric not null,
    primary key (network, holder, contract, token_id)
) partition by list (network);

create index nft_holders on nft_holdings (network, contract, holder) include (amount);
create index nft_holdings_at_zero on nft_holdings (network) where amount = 0;
create index nft_holders_of_token on nft_holdings (network, contract, token_id) where standard = 1155;

do $$
declare
    last smallint := (select max(number) from followed_networks);
    allowed record;
begin
    for allowed in
        select left(table_name, -length('_before')) as name, grantee, string_agg(privilege_type, ', ') as privileges
        from information_schema.role_table_grants
        where table_name in ('token_holdings_before', 'nft_holdings_before') and table_schema = current_schema
            and grantee not in (current_user, 'PUBLIC')
        group by 1, 2
    loop
        execute format('grant %s on %I to %I', allowed.privileges, allowed.name, allowed.grantee);
    end loop;
    if last is null then
        drop table token_holdings_before, nft_holdings_before;
        return;
    end if;
    alter table token_holdings attach partition token_holdings_before default;
    alter table nft_holdings attach partition nft_holdings_before default;
    execute format('alter table token_holdings_before add constraint networks_before check (network <= %s) not valid', last);
    execute format('alter table nft_holdings_before add constraint networks_before check (network <= %s) not valid', last);
end $$;

-- Add the tables for the holdings of a network when its row is added. The parts are attached when they are complete, which
-- blocks no reads, or only for a moment those of networks in the default table. The owner's rights are enough, so that the
-- service itself need not be allowed to create tables.
create function holdings_add_network() returns trigger language plpgsql security definer set search_path from current
set lock_timeout = '2s' as $$
declare
    parent text;
    part text;
begin
    foreach parent in array array['token_holdings', 'nft_holdings'] loop
        part := parent || '_' || new.number;
        execute format('create table %I (like %I including all) partition by hash (holder)', part, parent);
        for remainder in 0..7 loop
            execute format(
                'create table %I partition of %I for values with (modulus 8, remainder %s) with (fillfactor = 90)',
                part || '_' || remainder, part, remainder
            );
        end loop;
        execute format('alter table %I attach partition %I for values in (%s)', parent, part, new.number);
    end loop;
    return null;
end $$;

create trigger holdings_add_network after insert on followed_networks
for each row execute function holdings_add_network();
