"""Hostile replies of upstreams for each background loop that reads a chain: it goes on, and handles what is good.

The values and the long form are those of `test_hostile_rows.py`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import orjson
import pytest
from prometheus_client import REGISTRY

from proxy.errors import Fault
from proxy.services.events import internal_transfers
from proxy.services.rpc.calls import RpcError
from tests.chain_upstream import erc721
from tests.follower.conftest import harness as events
from tests.follower.event_harness import ART, A, B, EventHarness, transaction
from tests.follower.harness import NETWORK
from tests.follower.test_mempool import mempool, watching
from tests.isolation.test_hostile_rows import GOOD, NUMBERS, ROWS, TEXTS, WITHIN_S, chance
from tests.service import until
from tests.store.test_ledger import account

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
        place = chance.randrange(len(value))
        return [*value[:place], spoiled(chance, value[place], parts), *value[place + 1 :]]
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
    monkeypatch.setattr(internal_transfers, "TRIES", 0)
    await events.step()
    await events.webhook("INTERNAL_TRANSFER", addresses=["0x" + B.hex()])
    await events.mine([])
    pool = events.inner.running.pool
    async with pool.connection(within_s=10.0) as connection:
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
    while not await events.events.internal_transfers.trace():
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
    assert not await events.events.internal_transfers.trace()
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
