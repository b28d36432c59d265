-- Gas policies, and the ledger of what they pay. Dollars are whole pico-dollars.

create table gas_policies (
    id text primary key,
    account_id text not null references accounts (id),
    network text not null,
    -- Whether the network's coins are worth something: keys for tests do not reach such a policy.
    live boolean not null,
    name text not null,
    -- As the owner gave them.
    rules json not null,
    status text not null default 'active' check (status in ('active', 'paused', 'deleted')),
    -- Counted up by each change: who has decided by an older one decides again.
    revision integer not null default 1,
    -- The rules that the ledger keeps itself; null: not restricted.
    max_total numeric,
    max_per_user numeric,
    max_per_user_per_day bigint,
    reset text not null default 'never' check (reset in ('never', 'daily', 'weekly', 'monthly')),
    rate_requests bigint,
    rate_seconds bigint,
    rate_by_user boolean not null default false,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now()
);

create index gas_policies_of_account on gas_policies (account_id, created_at desc, id) where status <> 'deleted';

-- What a policy has reserved and spent: for each day and for ever (-infinity), of each sender and of all (empty).
create table gas_meters (
    policy_id text not null references gas_policies (id),
    sender bytea not null,
    day date not null,
    reserved numeric not null default 0 check (reserved >= 0),
    spent numeric not null default 0 check (spent >= 0),
    operations bigint not null default 0 check (operations >= 0),
    primary key (policy_id, sender, day)
) with (fillfactor = 70);

-- Windows of a policy's rate limit; one begins with the first request after the last.
create table gas_rates (
    policy_id text not null references gas_policies (id),
    sender bytea not null,
    began timestamptz not null,
    granted bigint not null,
    primary key (policy_id, sender)
) with (fillfactor = 70);

-- What a policy pays, or may have to, for one nonce of one sender: of all that was signed for it one can land.
-- open: `held` is the most that any of it can cost. spent: one is on the chain and costs `cost`; the rest is held until its block
-- is final, since a reorganisation may bring back another. final: nothing is held. What has expired is removed.
create table gas_reservations (
    id bigint generated always as identity primary key,
    policy_id text not null references gas_policies (id),
    network text not null,
    entry_point bytea not null,
    sender bytea not null,
    nonce numeric not null,
    -- The day whose meters it is in.
    day date not null,
    state text not null default 'open' check (state in ('open', 'spent', 'final')),
    held numeric not null check (held >= 0),
    cost numeric not null default 0 check (cost >= 0),
    -- When the last of the signatures ends, in the chain's time: seconds since 1970.
    valid_until bigint not null,
    -- No block up to this one has it.
    since_block bigint not null,
    op_hash bytea,
    block bigint,
    block_hash bytea,
    transaction bytea,
    looked_at timestamptz not null default '-infinity',
    created_at timestamptz not null default now(),
    unique (network, sender, nonce, entry_point, policy_id)
);

create index gas_reservations_open on gas_reservations (network, valid_until) where state = 'open';
create index gas_reservations_spent on gas_reservations (network, block) where state <> 'open';
create index gas_reservations_of_policy on gas_reservations (policy_id, created_at desc);

-- Everything that was signed and can still land, or has.
create table gas_signatures (
    network text not null,
    -- The hash that the EntryPoint computes.
    op_hash bytea not null,
    reservation_id bigint not null references gas_reservations (id) on delete cascade,
    -- Names the operation and its paymaster, whatever the times.
    digest bytea not null,
    -- paymasterData.
    data bytea not null,
    worst numeric not null,
    -- Of one whole coin.
    price numeric not null,
    valid_until bigint not null,
    primary key (network, op_hash)
);

create index gas_signatures_of_reservation on gas_signatures (reservation_id);

-- What counts towards a limit on this day: the days of its span.
create function gas_used(of_policy text, of_sender bytea, reset text, of_day date) returns numeric
language sql stable as $$
    select coalesce(sum(reserved + spent), 0) from gas_meters
    where policy_id = of_policy and sender = of_sender and case reset
        when 'never' then day = '-infinity'
        when 'daily' then day = of_day
        when 'weekly' then day >= date_trunc('week', of_day)::date and day < (date_trunc('week', of_day) + '7 days')::date
        else day >= date_trunc('month', of_day)::date and day < (date_trunc('month', of_day) + '1 month')::date
    end
$$;

-- Changes the four meters that an operation is in, always in the same order.
create function gas_move(of_policy text, of_sender bytea, of_day date, more_reserved numeric, more_spent numeric, more_operations bigint)
returns void language plpgsql as $$
declare
    who bytea;
    whichever date;
begin
    foreach who in array array[''::bytea, of_sender] loop
        foreach whichever in array array['-infinity'::date, of_day] loop
            update gas_meters set
                reserved = reserved + more_reserved, spent = spent + more_spent, operations = operations + more_operations
            where policy_id = of_policy and sender = who and day = whichever;
            if not found then
                insert into gas_meters (policy_id, sender, day, reserved, spent, operations)
                values (of_policy, who, whichever, more_reserved, more_spent, more_operations);
            end if;
        end loop;
    end loop;
end $$;

-- Takes one request from the policy's rate limit: the seconds until there is one again, or null.
create function gas_take_rate(p gas_policies, of_sender bytea, at timestamptz) returns numeric language plpgsql as $$
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
    insert into gas_rates (policy_id, sender, began, granted) values (p.id, who, at, 1)
    on conflict (policy_id, sender) do update set began = at, granted = 1;
    return null;
end $$;

-- Reserves what an operation can cost at most, if every limit of its policy has room for it, and records what was signed.
-- The policy's row is locked first: all that changes its meters goes one by one, and what is read here is true until the end.
-- outcome: granted; same (`data` is what was signed before); or what refuses: a rule, with what is left of it; absent; stale, the
-- policy has changed; used, the nonce is spent; twice, the same hash is reserved by another policy.
create function gas_reserve(
    of_policy text, at_revision integer, on_network text, at_entry_point bytea, of_sender bytea, of_nonce numeric,
    with_digest bytea, with_hash bytea, with_data bytea, of_worst numeric, at_price numeric, until bigint, fresh_until bigint,
    at_block bigint, at timestamptz,
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
        insert into gas_reservations as g
            (policy_id, network, entry_point, sender, nonce, day, held, valid_until, since_block, created_at)
        values (p.id, on_network, at_entry_point, of_sender, of_nonce, of_day, of_worst, until, at_block, at)
        returning * into r;
        perform gas_move(p.id, of_sender, of_day, of_worst, 0, 1);
    else
        update gas_reservations g set held = g.held + more, valid_until = greatest(g.valid_until, until) where g.id = r.id;
        perform gas_move(p.id, of_sender, of_day, more, 0, 0);
    end if;
    insert into gas_signatures (network, op_hash, reservation_id, digest, data, worst, price, valid_until)
    values (on_network, with_hash, r.id, with_digest, with_data, of_worst, at_price, until);
    outcome := 'granted';
    data := with_data;
    worst := of_worst;
    valid_until := until;
end $$;

-- Locks a reservation the way all do: its policy first.
create function gas_lock(reservation bigint) returns gas_reservations language plpgsql as $$
declare
    r gas_reservations;
begin
    perform from gas_policies where id = (select policy_id from gas_reservations where id = reservation) for no key update;
    select * into r from gas_reservations where id = reservation for update;
    return r;
end $$;

-- An operation is on the chain: what it truly cost, at the price at which it was signed. The rest stays held.
-- `coin` is one whole coin in its smallest units. Whether anything was signed under this hash.
create function gas_settle(
    on_network text, with_hash bytea, wei numeric, coin numeric, in_block bigint, in_block_hash bytea, in_transaction bytea
) returns boolean language plpgsql as $$
declare
    s gas_signatures;
    r gas_reservations;
    true_cost numeric;
    from_held numeric;
begin
    select * into s from gas_signatures where network = on_network and op_hash = with_hash;
    if not found then
        return false;
    end if;
    r := gas_lock(s.reservation_id);
    if r.id is null then
        return false;
    end if;
    if r.state = 'final' or (r.state = 'spent' and r.op_hash = with_hash and r.block = in_block) then
        return true;
    end if;
    if r.state = 'spent' then
        perform gas_reopen(r.id);
        r := gas_lock(r.id);
    end if;
    true_cost := div(wei * s.price + coin - 1, coin);
    from_held := least(true_cost, r.held);
    update gas_reservations set state = 'spent', cost = true_cost, held = held - from_held, op_hash = with_hash,
        block = in_block, block_hash = in_block_hash, transaction = in_transaction
    where id = r.id;
    perform gas_move(r.policy_id, r.sender, r.day, -from_held, true_cost, 0);
    return true;
end $$;

-- What was on the chain is not any more: it is held again, as much as it was.
create function gas_reopen(reservation bigint) returns void language plpgsql as $$
declare
    r gas_reservations := gas_lock(reservation);
begin
    if r.id is null or r.state = 'open' then
        return;
    end if;
    update gas_reservations set state = 'open', held = held + cost, cost = 0,
        op_hash = null, block = null, block_hash = null, transaction = null
    where id = r.id;
    perform gas_move(r.policy_id, r.sender, r.day, r.cost, -r.cost, 0);
end $$;

-- Its block is final: nothing else of it can land, and what was held for that is free.
create function gas_close(reservation bigint, final_block bigint) returns void language plpgsql as $$
declare
    r gas_reservations := gas_lock(reservation);
begin
    if r.id is null or r.state <> 'spent' or r.block > final_block then
        return;
    end if;
    update gas_reservations set state = 'final', held = 0 where id = r.id;
    delete from gas_signatures where reservation_id = r.id and op_hash <> r.op_hash;
    perform gas_move(r.policy_id, r.sender, r.day, -r.held, 0, 0);
end $$;

-- Nothing of it has landed, and by the time of a final block nothing can: as if it had never been.
create function gas_release(reservation bigint, final_time bigint) returns void language plpgsql as $$
declare
    r gas_reservations := gas_lock(reservation);
begin
    if r.id is null or r.state <> 'open' or r.valid_until >= final_time then
        return;
    end if;
    delete from gas_reservations where id = r.id;
    perform gas_move(r.policy_id, r.sender, r.day, -r.held, 0, -1);
end $$;
