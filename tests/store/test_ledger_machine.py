"""The ledger against a model: reserve, settle, release, expire, reorganise and crash, in any order, on a real Postgres.

The model stores only reservations and computes sums on demand; the ledger stores sums. They must agree, and two invariants must
hold at every step: no limit is exceeded, and every operation that can still land is covered by a reservation. An operation may
land under an unsigned hash, because the hash of entry point 0.8 includes the sender's current delegate.
"""

from __future__ import annotations

import asyncio
import datetime
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import asyncpg
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from proxy.chains.evm import operations
from proxy.chains.evm.facts import BlockFacts, ChainLog, Header
from proxy.chains.registry import Network
from proxy.services.sponsor.policies import read_rules
from proxy.services.sponsor.settlement import SettlementLoop, SettlementSink
from proxy.store.postgres import sql
from proxy.store.postgres.blocks import BlockId, Followed
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.ledger import LedgerStore, ReserveRequest
from proxy.store.postgres.policies import Policy, PolicyStore
from proxy.store.postgres.pool import DatabaseConnection, Pool
from tests.database import MIGRATED, Server
from tests.shipped_tables import TABLES

T = TypeVar("T")

FOUND = TABLES.chains.find("dev", "mainnet")
assert FOUND is not None
NETWORK: Network = FOUND
ENTRY_POINT = bytes.fromhex(NETWORK.chain.entry_points["0.7"][2:])
PAYER = b"\x99" * 20
# At this price for a whole coin one wei is one pico-dollar.
PRICE = 10**NETWORK.chain.native.decimals
DOLLAR = 10**12
BEGAN = int(datetime.datetime(2026, 1, 31, 23, 30, tzinfo=datetime.UTC).timestamp())
FINALITY = 2
RULES: tuple[dict[str, Any], ...] = (
    {"max_total_usd": "100", "max_per_user_usd": "60", "max_per_user_per_day": 3},
    {"max_total_usd": "80", "reset": "daily"},
)
# The account's daily limit over both policies.
ACCOUNT_MOST = 130 * DOLLAR
SENDERS = tuple(bytes([n]) * 20 for n in (1, 2))
EVER = datetime.date.min


@dataclass
class Signed:
    op_hash: bytes
    digest: bytes
    worst: int
    until: int


@dataclass
class Reservation:
    policy: int
    sender: bytes
    nonce: int
    day: datetime.date
    held: int
    since: int
    until: int
    state: str = "open"
    cost: int = 0
    landed: bytes = b""
    block: int = 0
    block_name: bytes = b""
    # The order of creation.
    id: int = 0
    signed: list[Signed] = field(default_factory=list)


@dataclass(frozen=True)
class Landed:
    """An operation on the chain, under a signed hash or another."""

    op_hash: bytes
    sender: bytes
    nonce: int
    cost: int


@dataclass
class Block:
    name: bytes
    time: int
    events: list[Landed]


class Model:
    def __init__(self) -> None:
        self.all: dict[tuple[int, bytes, int], Reservation] = {}
        self.made = 0

    def meter(self, policy: int, sender: bytes, day: datetime.date) -> tuple[int, int, int]:
        """Return the sums of reserved, spent and operations."""
        found = [
            each
            for each in self.all.values()
            if each.policy == policy and sender in (b"", each.sender) and day in (EVER, each.day)
        ]
        return sum(e.held for e in found), sum(e.cost for e in found), len(found)

    def reserve(self, asked: Reservation, signed: Signed, fresh: int) -> str:
        if any(r.state != "open" for r in self.all.values() if (r.sender, r.nonce) == (asked.sender, asked.nonce)):
            return "used"
        there = self.all.get((asked.policy, asked.sender, asked.nonce))
        if there and any(s.digest == signed.digest and s.until >= fresh for s in there.signed):
            return "same"
        day, more = (there.day, max(0, signed.worst - there.held)) if there else (asked.day, signed.worst)
        refusal = self._refusal(asked, day, more, is_new=there is None)
        if refusal:
            return refusal
        kept = self.all.setdefault((asked.policy, asked.sender, asked.nonce), asked)
        self.made += 1
        kept.id = kept.id or self.made
        kept.held = kept.held + more if there else more
        kept.until = max(kept.until, signed.until)
        kept.signed.append(signed)
        return "granted"

    def _refusal(self, asked: Reservation, day: datetime.date, more: int, *, is_new: bool) -> str:
        rules = RULES[asked.policy]
        span = day if rules.get("reset") == "daily" else EVER
        limits = (("max_total_usd", b""), ("max_per_user_usd", asked.sender))
        for name, who in limits:
            reserved, spent, _ = self.meter(asked.policy, who, span)
            if name in rules and reserved + spent + more > int(rules[name]) * DOLLAR:
                return name
        most = rules.get("max_per_user_per_day")
        if is_new and most is not None and self.meter(asked.policy, asked.sender, day)[2] >= most:
            return "max_per_user_per_day"
        return "sponsored_usd_per_day" if self.of_day(day) + more > ACCOUNT_MOST else ""

    def of_day(self, day: datetime.date) -> int:
        """Return the account's reserved and spent amount over all its policies."""
        return sum(each.held + each.cost for each in self.all.values() if each.day == day)

    def paying(self, event: Landed) -> Reservation | None:
        """Return the reservation that signed the hash; else the one that paid before; else the largest for the nonce."""
        for each in self.all.values():
            if any(signed.op_hash == event.op_hash for signed in each.signed):
                return each
        can = [each for each in self.all.values() if (each.sender, each.nonce) == (event.sender, event.nonce)]
        return max(can, key=lambda each: (each.landed == event.op_hash, each.held + each.cost, -each.id), default=None)

    def settle(self, event: Landed, block: int, name: bytes) -> Reservation | None:
        found = self.paying(event)
        here = event.op_hash, block, name
        if found is None or found.state == "final" or (found.landed, found.block, found.block_name) == here:
            return found
        self.reopen(found)
        found.state, found.cost = "spent", event.cost
        found.landed, found.block, found.block_name = here
        found.held -= found.cost
        return found

    def reopen(self, found: Reservation) -> None:
        if found.state != "open":
            found.held, found.cost, found.state, found.landed, found.block = found.held + found.cost, 0, "open", b"", 0

    def close(self, final: int, time: int, landed: dict[tuple[bytes, int], tuple[Landed, int, bytes]]) -> None:
        """One pass of SettlementLoop. Reservations that become due during the pass wait for the next one."""
        due = [
            (name, each)
            for name, each in self.all.items()
            if (each.state == "open" and each.until < time) or (each.state == "spent" and each.block <= final)
        ]
        for name, each in due:
            on_chain = landed.get((each.sender, each.nonce))
            if on_chain is not None and self.settle(*on_chain) is each:
                each.state, each.held, each.signed = "final", 0, []
            elif each.state == "spent":
                self.reopen(each)
            else:
                del self.all[name]


class ModelChain:
    """Answers the settlement loop like a node."""

    network = NETWORK

    def __init__(self) -> None:
        self.blocks_: list[Block] = [Block(b"genesis", BEGAN, [])]
        self.most_final = 0

    @property
    def final(self) -> int:
        self.most_final = max(self.most_final, len(self.blocks_) - 1 - FINALITY)
        return self.most_final

    async def header(self, number: int) -> Header | None:
        block = self.blocks_[number]
        return Header(hex(number), _hex(block.name), "0x", hex(block.time))

    async def blocks(self, first: int, last: int) -> BlockFacts:
        logs = [
            log_of(event, number, self.blocks_[number].name)
            for number in range(first, last + 1)
            for event in self.blocks_[number].events
        ]
        return facts_of(first, last, self.blocks_[last], logs)


def facts_of(first: int, last: int, block: Block, logs: list[ChainLog]) -> BlockFacts:
    return BlockFacts(first, last, b"", block.name, block.time, None, logs, [], 0)


def log_of(event: Landed, number: int, name: bytes) -> ChainLog:
    words = [event.nonce, 1, event.cost, 1]
    parties = [_hex(who.rjust(32, b"\0")) for who in (event.sender, PAYER)]
    return ChainLog(
        address=NETWORK.chain.entry_points["0.7"],
        topics=[operations.INCLUDED, _hex(event.op_hash), *parties],
        block_number=hex(number),
        block_hash=_hex(name),
        transaction_hash=_hex(event.op_hash),
        log_index="0x0",
        data="0x" + "".join(f"{word:064x}" for word in words),
    )


def _hex(data: bytes) -> str:
    return "0x" + data.hex()


# Any, since the types of `rule` do not allow for strategies from a dict.
ASKED: Any = {
    "policy": st.sampled_from(range(len(RULES))),
    "sender": st.sampled_from(SENDERS),
    "nonce": st.integers(0, 1),
    "worst": st.integers(1, 45),
    "kind": st.integers(0, 1),
}


class LedgerMachine(RuleBasedStateMachine):
    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.model = Model()
        self.chain = ModelChain()
        self.now = BEGAN
        self.serial = 0
        # The chain as the follower has written it.
        self.followed = list(self.chain.blocks_)
        self.payers = {NETWORK.id: frozenset((PAYER,))}
        self.sink = SettlementSink([NETWORK], self.payers)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @initialize()
    def begin(self) -> None:
        self.pool = Pool(self.url, size=2, acquire_timeout_s=10.0)
        self.run(self.pool.open())
        self.ledger = LedgerStore(self.pool)
        self.policies = self.run(self._begin())
        self.settling = SettlementLoop(self.ledger, [self.chain], self.payers, now=lambda: _moment(self.now))

    async def _begin(self) -> list[Policy]:
        async with self.pool.connection() as connection:
            await connection.execute("truncate accounts cascade")
        keys = KeyStore(self.pool, pepper="p" * 32, plans={"free": 10})
        account = (await keys.create_account(name="m", email="a@b", plan="free"))["id"]
        store = PolicyStore(self.pool)
        return [
            await store.create(
                account=account, network=NETWORK.id, live=True, name="m", given=r, rules=read_rules(r), most=9
            )
            for r in RULES
        ]

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.run(self.pool.close())
        self.runner.close()

    # Callers

    def wanted(self, policy: int, sender: bytes, nonce: int, worst: int, kind: int) -> ReserveRequest:
        self.serial += 1
        return ReserveRequest(
            policy=self.policies[policy].id,
            revision=self.policies[policy].revision,
            network=NETWORK.id,
            entry_point=ENTRY_POINT,
            sender=sender,
            nonce=nonce,
            digest=bytes([policy, nonce, kind, worst]) * 8,
            op_hash=self.serial.to_bytes(32, "big"),
            data=b"%d" % self.serial,
            worst=worst * DOLLAR,
            price=PRICE,
            valid_until=self.now + 270,
            fresh_until=self.now + 50,
            block=self.chain.final,
            at=_moment(self.now),
            account_most=ACCOUNT_MOST,
        )

    @rule(**ASKED, lost=st.booleans())
    def reserve(self, policy: int, sender: bytes, nonce: int, worst: int, kind: int, lost: bool) -> None:
        """Reserve. With `lost` the worker dies before it replies: a repeated request must get the same reservation."""
        wanted = self.wanted(policy, sender, nonce, worst, kind)
        outcome = self.run(self.ledger.reserve(wanted))
        asked = Reservation(policy, sender, nonce, _moment(self.now).date(), 0, wanted.block, wanted.valid_until)
        signed = Signed(wanted.op_hash, wanted.digest, wanted.worst, wanted.valid_until)
        expected = self.model.reserve(asked, signed, wanted.fresh_until)
        assert outcome.kind == expected
        if lost and outcome.kind == "granted":
            again = self.run(self.ledger.reserve(self.wanted(policy, sender, nonce, worst, kind)))
            assert (again.kind, again.data) == ("same", outcome.data)

    @rule(**ASKED)
    def reserve_and_crash(self, policy: int, sender: bytes, nonce: int, worst: int, kind: int) -> None:
        """Lose the connection before the statement is committed."""
        wanted = self.wanted(policy, sender, nonce, worst, kind)
        fields = [getattr(wanted, name) for name in ReserveRequest.__slots__]

        async def crash() -> None:
            connection = await asyncpg.connect(self.url)
            await connection.execute("begin")
            await connection.fetchrow(sql.ledger.reserve, *fields)
            connection.terminate()

        self.run(crash())

    # The chain

    @rule(
        seconds=st.sampled_from((1, 12, 60, 130)),
        chosen=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.booleans()), max_size=3),
    )
    def mine(self, seconds: int, chosen: list[tuple[int, int, bool]]) -> None:
        """Mine a block with some operations that can land: signed, unexpired, nonce unused; under any hash."""
        self.now += seconds
        events: list[Landed] = []
        for pick, share, is_known in chosen:
            used = {(e.sender, e.nonce) for block in self.chain.blocks_ for e in block.events}
            used |= {(e.sender, e.nonce) for e in events}
            can = [
                (r, s)
                for r in self.model.all.values()
                for s in r.signed
                if s.until >= self.now and (r.sender, r.nonce) not in used
            ]
            if can:
                by, signed = can[pick % len(can)]
                op_hash = signed.op_hash if is_known else b"\xff" + signed.op_hash[1:]
                cost = signed.worst * (share + 1) // 100
                events.append(Landed(op_hash, by.sender, by.nonce, cost))
        self.serial += 1
        self.chain.blocks_.append(Block(b"block %d" % self.serial, self.now, events))

    @rule(depth=st.integers(1, FINALITY))
    def reorganise(self, depth: int) -> None:
        """Drop blocks that were never final."""
        keep = max(self.chain.final + 1, len(self.chain.blocks_) - depth)
        del self.chain.blocks_[keep:]

    # The follower and settlement

    @rule(crash=st.booleans())
    def follow(self, crash: bool) -> None:
        """Undo removed blocks and write new ones, in one transaction each, like the follower."""
        blocks = self.chain.blocks_
        stays = max(n for n in range(min(len(blocks), len(self.followed))) if blocks[n] is self.followed[n])
        self.run(self._follow(stays, crash=crash))
        if crash:
            return
        for each in self.model.all.values():
            if each.state != "open" and each.block > stays:
                self.model.reopen(each)
        for number in range(stays + 1, len(blocks)):
            for event in blocks[number].events:
                self.model.settle(event, number, blocks[number].name)
        self.followed = list(blocks)

    async def _follow(self, stays: int, *, crash: bool) -> None:
        network = Followed(NETWORK.id, 1, 0, None)
        connection: DatabaseConnection = await asyncpg.connect(self.url)
        transaction = connection.transaction()
        await transaction.start()
        await self.sink.undo(connection, network, BlockId(stays, b""), [])
        new = [await self.chain.blocks(n, n) for n in range(stays + 1, len(self.chain.blocks_))]
        await self.sink.write(connection, network, new)
        if not crash:
            await transaction.commit()
        connection.terminate()

    @rule(seconds=st.integers(11, 60))
    def settle(self, seconds: int) -> None:
        """Settle expired and final reservations by the chain's logs."""
        self.now += seconds
        self.run(self.settling.look())
        final = self.chain.final
        landed = {
            (event.sender, event.nonce): (event, number, block.name)
            for number, block in enumerate(self.chain.blocks_[: final + 1])
            for event in block.events
        }
        self.model.close(final, self.chain.blocks_[final].time, landed)

    # Invariants

    @invariant()
    def sums_equal_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        days = {EVER, *(each.day for each in self.model.all.values())}
        for index, policy in enumerate(self.policies):
            rows = self.run(self._meters(policy.id))
            for who in (b"", *SENDERS):
                for day in days:
                    found = rows.get((who, day), (0, 0, 0))
                    assert found == self.model.meter(index, who, day), (index, who, day)
                    assert min(found) >= 0

    @invariant()
    def no_policy_exceeds_its_limit(self) -> None:
        for index, rules in enumerate(RULES):
            spans = {each.day for each in self.model.all.values()} if rules.get("reset") == "daily" else {EVER}
            for day in spans:
                reserved, spent, _ = self.model.meter(index, b"", day)
                assert reserved + spent <= int(rules["max_total_usd"]) * DOLLAR

    @invariant()
    def account_never_exceeds_its_daily_limit(self) -> None:
        if not hasattr(self, "pool"):
            return
        days = self.run(self._account_days())
        assert max(days.values(), default=0) <= ACCOUNT_MOST
        for day in {*days, *(each.day for each in self.model.all.values())}:
            assert days.get(day, 0) == self.model.of_day(day)

    @invariant()
    def every_possible_landing_is_covered(self) -> None:
        """For each nonce, the landed cost, or the highest that can still land, is reserved or spent by some policy."""
        paid: Counter[tuple[bytes, int]] = Counter()
        owed: dict[tuple[bytes, int], int] = {}
        for each in self.model.all.values():
            name = each.sender, each.nonce
            paid[name] += each.held + each.cost
            can = [s.worst for s in each.signed if s.until >= self.chain.blocks_[-1].time]
            owed[name] = max(owed.get(name, 0), *can, 0)
        owed |= {(event.sender, event.nonce): event.cost for block in self.chain.blocks_ for event in block.events}
        assert all(amount <= paid[name] for name, amount in owed.items())

    async def _account_days(self) -> dict[datetime.date, int]:
        async with self.pool.connection() as connection:
            rows = await connection.fetch("select day, used from gas_account_days")
        return {row["day"]: int(row["used"]) for row in rows}

    async def _meters(self, policy: str) -> dict[tuple[bytes, datetime.date], tuple[int, int, int]]:
        async with self.pool.connection() as connection:
            rows = await connection.fetch("select * from gas_meters where policy_id = $1", policy)
        return {(r["sender"], r["day"]): (int(r["reserved"]), int(r["spent"]), r["operations"]) for r in rows}


def _moment(seconds: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


async def test_ledger_holds_in_any_order(server: Server) -> None:
    name = await server.create(MIGRATED)

    def drive() -> None:
        LedgerMachine.url = server.url(name)
        run_state_machine_as_test(
            LedgerMachine,
            settings=settings(
                max_examples=40,
                stateful_step_count=40,
                derandomize=True,
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )

    try:
        await asyncio.to_thread(drive)
    finally:
        await server.drop(name)
