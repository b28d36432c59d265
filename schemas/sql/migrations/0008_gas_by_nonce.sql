-- What pays for an operation is found by what is unique on the chain: an EntryPoint pays once for a nonce of a sender, under
-- whatever hash. That of 0.8 covers what the sender delegates to when the operation lands (EIP-7702), which no paymaster signs.
-- Beside that: what an account may have sponsored in a day, whatever its policies are; and nothing is kept that nobody needs.

-- Whose day it counts in; null: the account had no limit when it was reserved.
alter table gas_reservations add column account_id text references accounts (id);
-- Of one whole coin: the highest at which anything was signed for it.
alter table gas_reservations add column price numeric not null default 0;
update gas_reservations r set price = coalesce((select max(s.price) from gas_signatures s where s.reservation_id = r.id), 0);
alter table gas_reservations alter column price drop default;

delete from gas_signatures s using gas_reservations r where r.id = s.reservation_id and r.state = 'final';

-- Of all that is ever sponsored little is not final.
create index gas_reservations_unsettled on gas_reservations (network) where state in ('open', 'spent');
create index gas_reservations_landed on gas_reservations (network, block) where state = 'spent';
create index gas_rates_of_policy on gas_rates (policy_id, began);

-- What an account whose plan has a limit has reserved and spent on a day, by all its policies together.
create table gas_account_days (
    account_id text not null references accounts (id),
    day date not null,
    used numeric not null default 0 check (used >= 0),
    primary key (account_id, day)
) with (fillfactor = 70);

-- Changes the four meters that an operation is in, always in the same order, and its account's day.
create function gas_move(r gas_reservations, more_reserved numeric, more_spent numeric, more_operations bigint)
returns void language plpgsql as $$
declare
    who bytea;
    whichever date;
    more_used numeric := more_reserved + more_spent;
begin
    foreach who in array array[''::bytea, r.sender] loop
        foreach whichever in array array['-infinity'::date, r.day] loop
            update gas_meters set
                reserved = reserved + more_reserved, spent = spent + more_spent, operations = operations + more_operations
            where policy_id = r.policy_id and sender = who and day = whichever;
            if not found then
                insert into gas_meters (policy_id, sender, day, reserved, spent, operations)
                values (r.policy_id, who, whichever, more_reserved, more_spent, more_operations);
            end if;
        end loop;
    end loop;
    -- What is only moved from reserved to spent takes no lock that other policies wait for.
    if r.account_id is not null and more_used <> 0 then
        update gas_account_days set used = used + more_used where account_id = r.account_id and day = r.day;
    end if;
end $$;

-- Takes one request from the policy's rate limit: the seconds until there is one again, or null.
create or replace function gas_take_rate(p gas_policies, of_sender bytea, at timestamptz) returns numeric language plpgsql as $$
declare
    who bytea := case when p.rate_by_user then of_sender else '' end;
    w gas_rates;
begin
    if p.rate_requests is null then
        return null;
    end if;
    select * into w from gas_rates where policy_id = p.id and sender = who;
    if found and at < w.began + make_interval(secs => p.rate_seconds) then
        if w.granted >= p.rate_requests then
            return ceil(extract(epoch from w.began + make_interval(secs => p.rate_seconds) - at));
        end if;
        update gas_rates set granted = granted + 1 where policy_id = p.id and sender = who;
        return null;
    end if;
    -- With each window that begins two go that are over, or one for every sender there ever was would stay.
    delete from gas_rates where policy_id = p.id and sender in (
        select sender from gas_rates
        where policy_id = p.id and began <= at - make_interval(secs => p.rate_seconds) order by began limit 2);
    insert into gas_rates (policy_id, sender, began, granted) values (p.id, who, at, 1)
    on conflict (policy_id, sender) do update set began = at, granted = 1;
    return null;
end $$;

-- Reserves what an operation can cost at most, if every limit of its policy and of its account has room for it, and records what
-- was signed. The policy's row is locked first: all that changes its meters goes one by one, and what is read here is true until
-- the end. So is the account's day, where the account has a limit.
-- outcome: granted; same (`data` is what was signed before); or what refuses: a rule, with what is left of it; absent; stale, the
-- policy has changed; used, the nonce is spent; twice, the same hash is reserved by another policy.
drop function gas_reserve(text, integer, text, bytea, bytea, numeric, bytea, bytea, bytea, numeric, numeric, bigint, bigint, bigint, timestamptz);
create function gas_reserve(
    of_policy text, at_revision integer, on_network text, at_entry_point bytea, of_sender bytea, of_nonce numeric,
    with_digest bytea, with_hash bytea, with_data bytea, of_worst numeric, at_price numeric, until bigint, fresh_until bigint,
    at_block bigint, at timestamptz, account_most numeric default null,
    out outcome text, out remains numeric, out data bytea, out worst numeric, out valid_until bigint
) language plpgsql as $$
declare
    p gas_policies;
    r gas_reservations;
    s gas_signatures;
    more numeric := of_worst;
    of_day date := (at at time zone 'UTC')::date;
begin
    select * into p from gas_policies where id = of_policy and status <> 'deleted' for no key update;
    if not found then
        outcome := 'absent';
        return;
    end if;
    if p.revision <> at_revision then
        outcome := 'stale';
        return;
    end if;
    if exists (
        select from gas_reservations g
        where g.network = on_network and g.sender = of_sender and g.nonce = of_nonce and g.entry_point = at_entry_point
            and g.state <> 'open'
    ) then
        outcome := 'used';
        return;
    end if;
    select * into r from gas_reservations g
    where g.network = on_network and g.sender = of_sender and g.nonce = of_nonce and g.entry_point = at_entry_point
        and g.policy_id = p.id;
    if r.id is not null then
        select * into s from gas_signatures g
        where g.reservation_id = r.id and g.digest = with_digest and g.valid_until >= fresh_until
        order by g.valid_until desc limit 1;
        if found then
            outcome := 'same';
            data := s.data;
            worst := s.worst;
            valid_until := s.valid_until;
            return;
        end if;
        of_day := r.day;
        more := greatest(0, of_worst - r.held);
    end if;

    if p.max_total is not null then
        remains := p.max_total - gas_used(p.id, '', p.reset, of_day);
        if more > remains then
            outcome := 'max_total_usd';
            remains := greatest(remains, 0);
            return;
        end if;
    end if;
    if p.max_per_user is not null then
        remains := p.max_per_user - gas_used(p.id, of_sender, p.reset, of_day);
        if more > remains then
            outcome := 'max_per_user_usd';
            remains := greatest(remains, 0);
            return;
        end if;
    end if;
    if p.max_per_user_per_day is not null and r.id is null then
        remains := p.max_per_user_per_day - coalesce(
            (select operations from gas_meters m where m.policy_id = p.id and m.sender = of_sender and m.day = of_day), 0);
        if remains < 1 then
            outcome := 'max_per_user_per_day';
            remains := 0;
            return;
        end if;
    end if;
    if account_most is not null then
        insert into gas_account_days (account_id, day) values (p.account_id, of_day) on conflict do nothing;
        select account_most - d.used into remains from gas_account_days d
        where d.account_id = p.account_id and d.day = of_day for update;
        if more > remains then
            outcome := 'sponsored_usd_per_day';
            remains := greatest(remains, 0);
            return;
        end if;
    end if;
    if exists (select from gas_signatures g where g.network = on_network and g.op_hash = with_hash) then
        outcome := 'twice';
        return;
    end if;
    -- The last question, because asking takes.
    remains := gas_take_rate(p, of_sender, at);
    if remains is not null then
        outcome := 'rate_limit';
        return;
    end if;

    if r.id is null then
        insert into gas_reservations as g (
            policy_id, account_id, network, entry_point, sender, nonce, day, held, price, valid_until, since_block, created_at
        ) values (
            p.id, case when account_most is not null then p.account_id end, on_network, at_entry_point, of_sender, of_nonce,
            of_day, of_worst, at_price, until, at_block, at
        ) returning * into r;
        perform gas_move(r, of_worst, 0, 1);
    else
        update gas_reservations g set held = g.held + more, price = greatest(g.price, at_price),
            valid_until = greatest(g.valid_until, until)
        where g.id = r.id;
        perform gas_move(r, more, 0, 0);
    end if;
    insert into gas_signatures (network, op_hash, reservation_id, digest, data, worst, price, valid_until)
    values (on_network, with_hash, r.id, with_digest, with_data, of_worst, at_price, until);
    outcome := 'granted';
    data := with_data;
    worst := of_worst;
    valid_until := until;
end $$;

-- An operation is on the chain: what it truly cost, at the price at which it was signed. The rest stays held. `coin` is one whole
-- coin in its smallest units. The reservation that pays, or null where there is none.
-- Under a hash that nobody signed it is one of those that were signed for the nonce: it costs no more than is held for them, and
-- where several policies have signed, the one that holds most pays.
drop function gas_settle(text, bytea, numeric, numeric, bigint, bytea, bytea);
create function gas_settle(
    on_network text, at_entry_point bytea, of_sender bytea, of_nonce numeric, with_hash bytea, wei numeric, coin numeric,
    in_block bigint, in_block_hash bytea, in_transaction bytea
) returns bigint language plpgsql as $$
declare
    s gas_signatures;
    r gas_reservations;
    true_cost numeric;
    from_held numeric;
begin
    select * into s from gas_signatures where network = on_network and op_hash = with_hash;
    if found then
        r := gas_lock(s.reservation_id);
    else
        r := gas_lock((
            select g.id from gas_reservations g
            where g.network = on_network and g.sender = of_sender and g.nonce = of_nonce and g.entry_point = at_entry_point
            order by (g.op_hash = with_hash) desc nulls last, g.held + g.cost desc, g.id limit 1
        ));
    end if;
    if r.id is null then
        return null;
    end if;
    if r.state = 'final' or (
        r.state = 'spent' and r.op_hash = with_hash and r.block = in_block and r.block_hash = in_block_hash
    ) then
        return r.id;
    end if;
    if r.state = 'spent' then
        perform gas_reopen(r.id);
        r := gas_lock(r.id);
    end if;
    true_cost := div(wei * coalesce(s.price, r.price) + coin - 1, coin);
    if s.op_hash is null then
        true_cost := least(true_cost, r.held);
    end if;
    from_held := least(true_cost, r.held);
    update gas_reservations set state = 'spent', cost = true_cost, held = held - from_held, op_hash = with_hash,
        block = in_block, block_hash = in_block_hash, transaction = in_transaction
    where id = r.id;
    perform gas_move(r, -from_held, true_cost, 0);
    return r.id;
end $$;

-- What was on the chain is not any more: it is held again, as much as it was.
create or replace function gas_reopen(reservation bigint) returns void language plpgsql as $$
declare
    r gas_reservations := gas_lock(reservation);
begin
    if r.id is null or r.state = 'open' then
        return;
    end if;
    update gas_reservations set state = 'open', held = held + cost, cost = 0,
        op_hash = null, block = null, block_hash = null, transaction = null
    where id = r.id;
    perform gas_move(r, r.cost, -r.cost, 0);
end $$;

-- Its block is final: nothing else of it can land, and what was held for that is free.
create or replace function gas_close(reservation bigint, final_block bigint) returns void language plpgsql as $$
declare
    r gas_reservations := gas_lock(reservation);
begin
    if r.id is null or r.state <> 'spent' or r.block > final_block then
        return;
    end if;
    update gas_reservations set state = 'final', held = 0 where id = r.id;
    delete from gas_signatures where reservation_id = r.id;
    perform gas_move(r, -r.held, 0, 0);
end $$;

-- Nothing of it has landed, and by the time of a final block nothing can: as if it had never been.
create or replace function gas_release(reservation bigint, final_time bigint) returns void language plpgsql as $$
declare
    r gas_reservations := gas_lock(reservation);
begin
    if r.id is null or r.state <> 'open' or r.valid_until >= final_time then
        return;
    end if;
    delete from gas_reservations where id = r.id;
    perform gas_move(r, -r.held, 0, -1);
    delete from gas_meters
    where policy_id = r.policy_id and sender = r.sender and day in ('-infinity', r.day)
        and reserved = 0 and spent = 0 and operations = 0;
end $$;

drop function gas_move(text, bytea, date, numeric, numeric, bigint);
