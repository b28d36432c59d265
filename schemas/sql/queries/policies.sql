-- create_policy
-- Unless the account has reached its limit.
insert into gas_policies (
    id, account_id, network, live, name, rules,
    max_total, max_per_user, max_per_user_per_day, reset, rate_requests, rate_seconds, rate_by_user
)
select $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13
where (select count(*) from gas_policies where account_id = $2 and status <> 'deleted') < $14::bigint
returning id, account_id, network, name, rules, status, revision, created_at, updated_at;

-- lock_policies
-- Serialise creation per account until the end of the transaction: two concurrent inserts could both take the last
-- place.
select pg_advisory_xact_lock(hashtextextended('policies of ' || $1, 0));

-- read_policy
select id, account_id, network, name, rules, status, revision, created_at, updated_at from gas_policies
where id = $1 and ($2::text is null or account_id = $2) and status <> 'deleted';

-- list_policies
-- Of long lists in the rules only the first $7 entries: a page of whole ones could have hundreds of megabytes.
select id, account_id, network, name, status, revision, created_at, updated_at, (
    select coalesce(json_object_agg(
        name, case
            when json_typeof(rule) = 'array'
            then jsonb_path_query_array(rule::jsonb, '$[0 to $last]', jsonb_build_object('last', $7::int - 1))::json
            else rule
        end order by place
    ), '{}')
    from json_each(rules) with ordinality as each(name, rule, place)
) as rules
from gas_policies
where account_id = $1 and (not live or $2) and ($3::text is null or status = $3) and status <> 'deleted'
    and ($4::text[] is null or network = any($4))
order by created_at desc, id limit $5 offset $6;

-- count_policies
select count(*) from gas_policies
where account_id = $1 and (not live or $2) and ($3::text is null or status = $3) and status <> 'deleted'
    and ($4::text[] is null or network = any($4));

-- update_policy
-- Null keeps a value. Rules and the limits derived from them change together.
update gas_policies set
    name = coalesce($3, name),
    status = coalesce($4, status),
    rules = coalesce($5, rules),
    max_total = case when $5 is null then max_total else $6 end,
    max_per_user = case when $5 is null then max_per_user else $7 end,
    max_per_user_per_day = case when $5 is null then max_per_user_per_day else $8 end,
    reset = case when $5 is null then reset else $9 end,
    rate_requests = case when $5 is null then rate_requests else $10 end,
    rate_seconds = case when $5 is null then rate_seconds else $11 end,
    rate_by_user = case when $5 is null then rate_by_user else $12 end,
    revision = revision + 1,
    updated_at = now()
where id = $1 and account_id = $2 and status <> 'deleted' and revision = $13
returning id, account_id, network, name, rules, status, revision, created_at, updated_at;

-- delete_policy
-- The row stays, hidden: existing sponsorships are still settled.
update gas_policies set status = 'deleted', revision = revision + 1, updated_at = now()
where id = $1 and account_id = $2 and status <> 'deleted'
returning id;
