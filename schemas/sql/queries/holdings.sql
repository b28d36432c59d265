-- add_tokens
-- Keys are concatenated bytes and amounts one text: arrays and decimals of the driver cost more than the rows.
insert into token_holdings as held (network, holder, contract, amount)
select $1, substr($2::bytea, 40 * place::integer - 39, 20), substr($2::bytea, 40 * place::integer - 19, 20), amount::numeric
from unnest(string_to_array($3, ',')) with ordinality as change (amount, place)
on conflict (network, holder, contract) do update set amount = held.amount + excluded.amount;

-- add_nfts
insert into nft_holdings as held (network, standard, holder, contract, token_id, amount)
select $1, standard::smallint, substr($2::bytea, 40 * place::integer - 39, 20), substr($2::bytea, 40 * place::integer - 19, 20),
    token_id::numeric, amount::numeric
from unnest(string_to_array($3, ','), string_to_array($4, ','), string_to_array($5, ','))
    with ordinality as change (standard, token_id, amount, place)
on conflict (network, holder, contract, token_id) do update set amount = held.amount + excluded.amount;

-- remove_nfts_at_zero
delete from nft_holdings where network = $1 and amount = 0;

-- stage
insert into staged_holdings (network, changes) values ($1, $2) returning id;

-- staged
select id, merged, changes from staged_holdings where network = $1 order by id;

-- mark_merged
update staged_holdings set merged = greatest(merged, $3) where network = $1 and id <= $2;

-- delete_staged
delete from staged_holdings where network = $1 and id <= $2;

-- record_changes
insert into holding_changes (network, block, changes)
select $1, block, changes from unnest($2::bigint[], $3::bytea[]) as change (block, changes);

-- take_changes_above
delete from holding_changes where network = $1 and block > $2 returning changes;

-- delete_changes_below
delete from holding_changes where network = $1 and block < $2;

-- delete_tokens
delete from token_holdings where network = $1;

-- delete_nfts
delete from nft_holdings where network = $1;

-- tokens_of
-- Zero balances are included, after the others: the contract may report a different number. Two parts, each in index
-- order, so no more rows are read than returned. One value, because decoding ten thousand rows takes the event loop's time;
-- an aggregate takes the rows of its subquery in their order.
select string_agg(contract, ''::bytea) as contracts
from (
    (
        select contract from token_holdings
        where network = (select number from followed_networks where network = $1) and holder = $2 and amount > 0
        order by contract limit $3
    )
    union all
    (
        select contract from token_holdings
        where network = (select number from followed_networks where network = $1) and holder = $2 and amount <= 0
        order by contract limit $3
    )
    limit $3
) held;

-- nfts_of
select contract, token_id, amount, standard from nft_holdings
where network = (select number from followed_networks where network = $1) and holder = $2 and amount > 0
    and ($5::bytea[] is null or contract = any($5::bytea[]))
order by contract, token_id limit $3 offset $4;

-- count_nfts
select count(*) from nft_holdings
where network = (select number from followed_networks where network = $1) and holder = $2 and amount > 0
    and ($3::bytea[] is null or contract = any($3::bytea[]));

-- holders_of
select holder, amount from nft_holdings
where network = (select number from followed_networks where network = $1)
    and contract = $2 and token_id = $3::text::numeric and standard = 1155 and amount > 0
limit $4;

-- read_collection
select count(distinct holder) as owners, count(*) as pieces, coalesce(sum(amount), 0) as supply,
    (select standard from nft_holdings s
        where s.network = (select number from followed_networks where network = $1) and s.contract = $2 limit 1) as standard
from nft_holdings
where network = (select number from followed_networks where network = $1) and contract = $2 and amount > 0;

-- count_holders
-- The holders of a token, or else of an NFT contract, counted up to a number of rows.
select
    (select count(*) from (
        select from token_holdings
        where network = (select number from followed_networks where network = $1) and contract = $2 limit $3
    ) as t) as tokens,
    (select count(*) from (
        select from nft_holdings
        where network = (select number from followed_networks where network = $1) and contract = $2 limit $3
    ) as n) as nfts;

-- token_holders
select holder, amount, count(*) over () as holders from token_holdings
where network = (select number from followed_networks where network = $1) and contract = $2 and amount > 0
order by amount desc, holder limit $3;

-- nft_holders
select holder, sum(amount) as amount, count(*) over () as holders from nft_holdings
where network = (select number from followed_networks where network = $1) and contract = $2 and amount > 0
group by holder order by 2 desc, holder limit $3;

-- as_of
select first_block, block, block_hash, block_time, fault from followed_networks where network = $1 and block is not null;
