"""Hostile replies of upstreams for each background loop that reads a chain: it goes on, and handles what is good.

The values and the long form are those of `test_hostile_rows.py`.
"""

from __future__ import annotations

import datetime
import itertools
import json
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import orjson
import pytest
from prometheus_client import REGISTRY

from proxy.chains.evm import operations
from proxy.chains.evm.facts import BlockFacts, ChainLog, Header
from proxy.chains.registry import Network
from proxy.errors import Fault
from proxy.services.feed import head_watcher, sources, svm_poller
from proxy.services.follower import block_tracer
from proxy.services.rpc.calls import RpcError
from proxy.services.sponsor.settlement import SettlementLoop, SettlementSink
from proxy.store.postgres.blocks import Followed
from proxy.store.postgres.ledger import LedgerStore
from proxy.store.postgres.pool import Pool
from tests.chain_upstream import erc721
from tests.feed_upstreams import HEADS, feed_harness, logs_topic
from tests.flows.test_solana_polling import BASE64, SOLANA, Polled, SlotUpstream
from tests.follower.conftest import harness as events
from tests.follower.event_harness import ART, A, B, EventHarness, transaction
from tests.follower.harness import NETWORK
from tests.follower.test_mempool import mempool, watching
from tests.isolation.test_hostile_rows import GOOD, NUMBERS, ROWS, TEXTS, WITHIN_S, chance
from tests.service import until
from tests.shipped_tables import TABLES
from tests.spl import TOKEN
from tests.store.test_ledger import ALICE, AT, NOW, account, make, want
from tests.svm_upstreams import PAYEE, PAYER, SvmChain
from tests.web.worker import on_uvloop

__all__ = ("account", "chance", "events")

pytestmark = pytest.mark.timeout(120.0 + ROWS / 10)


def _as_json(value: Any) -> Any:
    """The value as an upstream can send it."""
    try:
        orjson.dumps(value)
    except TypeError:
        return orjson.Fragment(str(value) if isinstance(value, int) else orjson.dumps(ascii(value)))
    return value


PARTS: tuple[Any, ...] = (
    *map(_as_json, (*TEXTS, *NUMBERS)), None, [], {}, True, [None], {"a": [[]]}, hex(2**64), hex(10**400), "0x-1", "0x_1",
    orjson.Fragment("1e400"), orjson.Fragment('"\\ud800"'), orjson.Fragment("[" * 500 + "]" * 500),
)  # fmt: skip


# Without those that make a whole reply unreadable.
PLAIN = tuple(each for each in PARTS if not isinstance(each, orjson.Fragment))


def spoiled(chance: random.Random, value: Any, parts: Sequence[Any] = PARTS) -> Any:
    """The value with a hostile part, or a hostile value instead."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        name = chance.choice([*value])
        return {**value, name: spoiled(chance, value[name], parts)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        index = chance.randrange(len(value))
        return [*value[:index], spoiled(chance, value[index], parts), *value[index + 1 :]]
    return chance.choice(parts)


def failures_of(loop: str) -> float:
    return REGISTRY.get_sample_value("penstock_loop_failures_total", {"loop": loop}) or 0.0


async def test_finality(events: EventHarness, chance: random.Random) -> None:
    """Hostile blocks instead of the safe one: its events wait, and those for the finalized one do not."""
    await events.step()
    for tag in ("safe", "finalized"):
        await events.webhook("nft_transfer", contracts=["0x" + ART.hex()], finality=tag)
    await events.mine([erc721(ART, B, A, 1)])
    gate, upstream = events.events.finality, events.inner.upstream
    is_good, sent = False, 0

    def block(params: list[Any]) -> Any:
        nonlocal sent
        if params[0] not in ("safe", "finalized"):
            return upstream._eth_getBlockByNumber(params)
        found = upstream._eth_getBlockByNumber(["0x1"])
        if is_good or params[0] == "finalized":
            return found
        sent += 1
        return {**(found or {}), "number": chance.choice(PARTS)}

    upstream.answers["eth_getBlockByNumber"] = block
    while sent < ROWS:
        with suppress(Fault):
            await gate.release()
        gate._checked_at.clear()
    assert len(await events.bodies()) == 1
    is_good = True

    async def is_released() -> bool:
        with suppress(Fault):
            await gate.release()
        return len(await events.bodies()) == 2

    await until(is_released, within_s=WITHIN_S)


async def test_traces(events: EventHarness, chance: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_tracer, "TRIES", 0)
    await events.step()
    await events.webhook("INTERNAL_TRANSFER", addresses=["0x" + B.hex()])
    await events.mine([])
    pool = events.inner.running.pool
    async with pool.connection(within_s=45.0) as connection:
        await connection.execute(
            "insert into trace_jobs (network, block, block_hash)"
            " select $1, n, decode(lpad(to_hex(n), 64, '0'), 'hex') from generate_series(2, $2::bigint) as n",
            NETWORK,
            ROWS,
        )
    call = {"type": "CALL", "from": "0x" + A.hex(), "to": "0x" + B.hex(), "value": "0x5"}
    good = [{"txHash": "0x" + "79" * 32, "result": {**call, "calls": [call]}}]

    def trace(params: list[Any]) -> Any:
        return spoiled(chance, good) if int(params[0][-8:], 16) % GOOD else good

    events.inner.upstream.answers["debug_traceBlockByHash"] = trace
    while not await events.events.tracer.trace():
        pass
    (jobs,) = await events.rows("select count(*) from trace_jobs")
    (found,) = await events.rows(f"select count(distinct block) from events where block % {GOOD} = 0")
    assert (jobs["count"], found["count"]) == (0, ROWS // GOOD)


async def test_one_bad_trace_does_not_hold_up_other_blocks(events: EventHarness) -> None:
    await events.step()
    await events.webhook("INTERNAL_TRANSFER", addresses=["0x" + B.hex()])
    await events.mine([], [])
    bad = events.inner.chain.blocks[1].hash
    call = {"type": "CALL", "from": "0x" + A.hex(), "to": "0x" + B.hex(), "value": "0x5"}
    good = [{"txHash": "0x" + "79" * 32, "result": {**call, "calls": [call]}}]
    events.inner.upstream.answers["debug_traceBlockByHash"] = lambda params: 5 if params[0] == bad else good
    assert not await events.events.tracer.trace()
    assert [each["data"]["blockNumber"] for each in await events.bodies()] == [2]
    assert await events.rows("select block, tries from trace_jobs") == [{"block": 1, "tries": 1}]


async def test_mempool(events: EventHarness, chance: random.Random) -> None:
    new = mempool(events)
    await watching(events)
    good = list[str]()

    def read(params: list[Any]) -> Any:
        found = transaction(params[0], A, B, 5)
        return found if params[0] in good else spoiled(chance, found)

    events.inner.upstream.answers["eth_getTransactionByHash"] = read
    for first in range(0, ROWS, 50):
        named: list[Any] = []
        for number in range(first, first + 50):
            named.append("0x" + f"{number:064x}")
            if number % GOOD == 0:
                good.append(named[-1])
            elif chance.random() < 0.2:
                named[-1] = chance.choice(PLAIN)
        new += named
        with suppress(Fault, RpcError, ValueError):
            await events.events.mempool.poll()

    async def are_sent() -> bool:
        with suppress(Fault, RpcError, ValueError):
            await events.events.mempool.poll()
        rows = await events.rows("select body from events")
        return {*good} <= {json.loads(row["body"])["data"]["transactionHash"] for row in rows}

    await until(are_sent, within_s=WITHIN_S)


DEV = TABLES.chains.find("dev", "mainnet")
assert DEV is not None
PAYMASTER = b"\x99" * 20


class SettledChain:
    """A chain whose logs are given. Header and logs are hostile every other time."""

    def __init__(self, network: Network, logs: list[ChainLog], chance: random.Random) -> None:
        self.network = network
        self._logs = logs
        self._chance = chance
        self._turns = itertools.count()

    @property
    def final(self) -> int:
        return 11

    async def header(self, number: int) -> Header | None:
        time = self._chance.choice(TEXTS) if next(self._turns) % 2 else hex(NOW + 1)
        return Header(hex(number), "0x", "0x", time)

    async def blocks(self, first: int, last: int) -> BlockFacts:
        return facts(self._logs)


def facts(logs: list[ChainLog]) -> BlockFacts:
    return BlockFacts(11, 11, b"", b"h" * 32, NOW, None, logs, [], 0)


def operation_log(sender: bytes, nonce: int, op_hash: bytes) -> ChainLog:
    assert DEV is not None
    return ChainLog(
        address=DEV.chain.entry_points["0.7"],
        topics=[operations.INCLUDED, *("0x" + each.rjust(32, b"\0").hex() for each in (op_hash, sender, PAYMASTER))],
        block_number="0xb",
        block_hash="0x" + (b"h" * 32).hex(),
        transaction_hash="0x" + op_hash.hex(),
        log_index="0x0",
        data="0x" + "".join(f"{word:064x}" for word in (nonce, 1, 10**15, 1)),
    )


async def test_settlement(pool: Pool, account: str, chance: random.Random) -> None:
    """Hostile logs among those of operations: in the follower's sink, and in the loop that settles final blocks."""
    assert DEV is not None
    ledger, policy = LedgerStore(pool), await make(pool, account)
    entry_point = bytes.fromhex(DEV.chain.entry_points["0.7"][2:])
    logs = list[ChainLog]()
    for number in range(20):
        wanted = want(policy, 5, nonce=number, entry_point=entry_point, network=DEV.id)
        assert (await ledger.reserve(wanted)).kind == "granted"
        logs.append(operation_log(ALICE, number, wanted.op_hash))
    for number in range(ROWS):
        log = msgspec.to_builtins(operation_log(ALICE, 1000 + number, (2**200 + number).to_bytes(32, "big")))
        for name in chance.sample(["blockNumber", "blockHash", "transactionHash", "logIndex", "topics", "data"], k=2):
            value = chance.choice((*TEXTS, hex(2**64), hex(10**400), "0x" + "ff" * 128))
            log[name] = [value, *log[name][1:]] if name == "topics" else value
        # Malformed ones are refused when they are decoded.
        for each in operations.read_logs([log]):
            logs.insert(chance.randrange(len(logs)), each)
    payers = {DEV.id: frozenset((PAYMASTER,))}
    sink, followed = SettlementSink([DEV], payers), Followed(DEV.id, 1, 0, None)
    async with pool.connection(within_s=45.0, for_s=WITHIN_S) as connection, connection.transaction():
        await sink.write(connection, followed, [facts(logs)])
    assert (await ledger.total(policy.id, AT.date())).spent > 0
    later = AT + datetime.timedelta(minutes=10)
    loop = SettlementLoop(ledger, [SettledChain(DEV, logs, chance)], payers, now=lambda: later)

    async def is_settled() -> bool:
        await loop.look()
        return not await ledger.unsettled_networks()

    await until(is_settled, within_s=WITHIN_S)
    assert (await ledger.total(policy.id, AT.date())).operations == 20


@pytest.fixture
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (head_watcher, svm_poller):
        for name in ("SHORTEST_POLL_S", "LONGEST_POLL_S"):
            monkeypatch.setattr(module, name, 0.002)
    monkeypatch.setattr(svm_poller, "PROGRAM_POLL_S", 0.002)
    for name in ("FIRST_BACKOFF_S", "LONGEST_BACKOFF_S"):
        monkeypatch.setattr(sources, name, 0.002)


FEED_METHODS = ("eth_getBlockByNumber", "eth_getBlockByHash", "eth_getLogs", "eth_blockNumber")


@pytest.mark.usefixtures("quick_polls")
@on_uvloop
@pytest.mark.parametrize("kind", ["http", "ws"])
async def test_feeds(kind: str, chance: random.Random) -> None:
    before = failures_of("feed")
    async with feed_harness([kind]) as harness:
        heads, logs = await harness.listen(HEADS), await harness.listen(logs_topic())
        upstream, sent = harness.upstreams[0], 0

        def hostile(method: str) -> Callable[[list[Any]], Any]:
            def answer(params: list[Any]) -> Any:
                nonlocal sent
                found = getattr(upstream, f"_{method}")(params)
                if sent >= ROWS or chance.random() < 0.2:
                    return found
                sent += 1
                return spoiled(chance, found, PLAIN)

            return answer

        upstream.answers |= {method: hostile(method) for method in FEED_METHODS}

        def has_more_than(done: int) -> Callable[[], bool]:
            return lambda: sent > done

        while sent < ROWS:
            more = has_more_than(sent)
            await harness.chain.mine()
            if kind == "ws":
                for name in harness.chain.canonical[-3:]:
                    head = spoiled(chance, harness.chain.blocks[name], PLAIN)
                    await upstream.notify(lambda _, params: params == ["newHeads"], head)
                sent += 3
            await until(more, within_s=WITHIN_S)
        await harness.chain.mine()
        for listener in (heads, logs):
            await harness.until_tip(listener, within_s=60.0)
        heads.heads()
    assert failures_of("feed") == before


class HostileUpstream(SlotUpstream):
    """Spoils four in five replies until it has spoiled as many as it is told."""

    chance = random.Random(31)
    left = 0

    def _result(self, call: Any) -> Any:
        found = super()._result(call)
        if self.left <= 0 or self.chance.random() < 0.2:
            return found
        self.left -= 1
        return spoiled(self.chance, found)


@pytest.mark.usefixtures("quick_polls")
@on_uvloop
async def test_solana_polls() -> None:
    before = failures_of("feed")
    chain = SvmChain(lands_ahead=True, lead=4)
    async with feed_harness(["http"], kind=HostileUpstream, chain=chain, network=SOLANA) as harness:
        polling = Polled(harness, chain)
        upstream = harness.upstreams[0]
        assert isinstance(upstream, HostileUpstream)
        for kind, *params in (
            ("account", str(PAYEE), BASE64), ("slot",), ("root",), ("slotsUpdates",),
            ("program", str(TOKEN), BASE64), ("logs", "all"),
            ("logs", {"mentions": [str(PAYER.pubkey())]}), ("signature", "5" * 88),
        ):  # fmt: skip
            await polling.listen(kind, *params)
        upstream.left = ROWS

        def is_over() -> bool:
            chain.head += 1
            return upstream.left <= 0

        await until(is_over, within_s=WITHIN_S)
        payee = await polling.listen("account", str(PAYEE), BASE64 | {"dataSlice": {"offset": 0, "length": 0}})
        await polling.send(2_000_000)
        await until(lambda: payee.events, within_s=20.0)
    assert failures_of("feed") == before
