"""Internal transfers are found by any trace method that upstreams support, and wait while upstreams fail."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.services.follower import block_tracer
from proxy.services.rpc import traces
from proxy.store.postgres import trace_jobs
from tests.follower.event_harness import A, B, EventHarness, with_transaction
from tests.follower.harness import NETWORK
from tests.rpc_harness import rpc_harness
from tests.rpc_upstreams import Refused
from tests.web.worker import on_uvloop


async def test_block_dropped_before_it_is_traced_makes_no_events(harness: EventHarness) -> None:
    await harness.step()
    await harness.webhook("INTERNAL_TRANSFER", addresses=["0x" + B.hex()])
    await harness.mine([], [])
    first, second = (block.hash for block in harness.inner.chain.blocks[1:])
    requested: list[str] = []

    def trace(params: list[Any]) -> Any:
        requested.append(params[0])
        call = {"type": "CALL", "from": "0x" + A.hex(), "to": "0x" + B.hex(), "value": "0x5"}
        return [{"txHash": "0x" + "79" * 32, "result": {**call, "calls": [call]}}]

    harness.inner.upstream.answers["debug_traceBlockByHash"] = trace
    async with harness.inner.running.pool.connection() as connection:
        jobs = await trace_jobs.waiting(connection, NETWORK, limit=10)
    calls = await harness.events.tracer._traces.calls(jobs[1].block, jobs[1].hash)
    harness.inner.chain.drop(1)
    await harness.mine([], [])
    await harness.step()
    await harness.events.tracer._write(jobs[1], calls)
    assert await harness.bodies() == []
    assert await harness.events.tracer.trace()
    assert {first} < {*requested}
    bodies = await harness.bodies()
    assert second not in {block.hash for block in harness.inner.chain.blocks}
    assert sorted(each["data"]["blockNumber"] for each in bodies) == [1, 2, 3]
    assert bodies[0]["data"]["traceAddress"] == [0]


async def test_event_of_a_trace_is_corrected_when_its_block_is_dropped(harness: EventHarness) -> None:
    await harness.step()
    await harness.webhook("INTERNAL_TRANSFER", addresses=["0x" + B.hex()])
    call = {"type": "CALL", "from": "0x" + A.hex(), "to": "0x" + B.hex(), "value": "0x5"}
    harness.inner.upstream.answers["debug_traceBlockByHash"] = lambda _: [
        {"txHash": "0x" + "79" * 32, "result": {**call, "calls": [call]}}
    ]
    await harness.mine([], [])
    await harness.events.tracer.trace()
    await harness.deliver()
    harness.inner.chain.drop(1)
    await harness.mine([], [])
    await harness.step()
    assert [each["type"] for each in await harness.bodies()] == ["CORRECTION"]


async def test_upstream_that_cannot_trace_blocks_is_called_with_another_method(
    harness: EventHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await harness.step()
    await harness.webhook("INTERNAL_TRANSFER", addresses=["0x" + B.hex()])
    await harness.mine([])

    def refuse(_: list[Any]) -> Any:
        raise Refused(-32601, "the method does not exist/is not available")

    answers = harness.inner.upstream.answers
    answers["debug_traceBlockByHash"] = refuse
    answers["trace_block"] = lambda _: [
        {
            "type": "call",
            "traceAddress": [0],
            "transactionHash": "0x" + "79" * 32,
            "blockHash": harness.inner.chain.blocks[1].hash,
            "action": {"callType": "call", "from": "0x" + A.hex(), "to": "0x" + B.hex(), "value": "0x9"},
        }
    ]
    assert await harness.events.tracer.trace()
    (body,) = await harness.bodies()
    assert body["data"]["value"] == "9"
    assert repr(harness.events.tracer).endswith("by _by_list>>")
    # An upstream that supports it has come: it is found once the chosen method has expired.
    monkeypatch.setattr(traces, "KEEP_S", -1.0)
    answers["debug_traceBlockByHash"] = lambda _: []
    await harness.mine([])
    assert await harness.events.tracer.trace()
    assert repr(harness.events.tracer).endswith("by _by_tracer>>")


@on_uvloop
async def test_oldest_blocks_of_arbitrum_are_traced_by_its_own_method() -> None:
    def refuse(_: list[Any]) -> Any:
        raise Refused(-32601, "the method does not exist/is not available")

    name = bytes.fromhex("ab" * 32)
    trace = {
        "type": "call",
        "traceAddress": [0],
        "transactionHash": "0x" + "79" * 32,
        "blockHash": "0x" + name.hex(),
        "action": {"callType": "call", "from": "0x" + A.hex(), "to": "0x" + B.hex(), "value": "0x9"},
    }
    async with rpc_harness(1, network="arbitrum/mainnet") as harness:
        answers = harness.upstreams[0].answers
        answers |= dict.fromkeys(("debug_traceBlockByHash", "trace_block"), refuse)
        answers["arbtrace_block"] = lambda params: [trace] if params == ["0x5"] else None
        reader = traces.TraceReader(harness.route.network, harness.worker.app.plane.internal_calls)
        (found,) = await reader.calls(5, name)
        assert (found.sender, found.recipient, found.value) == (A, B, 9)
        # It is tried first from now on.
        await reader.calls(5, name)
        assert harness.count("arbtrace_block") == 2
        assert harness.count("trace_block") == 1


async def tries(harness: EventHarness) -> list[int]:
    """The failed attempts of each trace job."""
    return [row["tries"] for row in await harness.rows("select tries from trace_jobs order by block")]


@pytest.mark.parametrize(
    ("reply", "counted"),
    [
        (Refused(-32005, "rate limit exceeded"), 0),
        (Refused(-32603, "internal error"), 0),
        (Refused(-32601, "the method does not exist/is not available"), 1),
        (Refused(-32000, "missing trie node"), 1),
        ([{"txHash": None}], 1),
    ],
    ids=lambda each: str(each)[:40],
)
async def test_attempts_count_for_missing_traces_and_not_for_failing_upstreams(
    harness: EventHarness, reply: Any, counted: int
) -> None:
    await harness.step()
    await harness.webhook("INTERNAL_TRANSFER", addresses=["0x" + B.hex()])
    await harness.mine([])

    def trace(_: list[Any]) -> Any:
        if isinstance(reply, Refused):
            raise reply
        return reply

    answers = harness.inner.upstream.answers
    answers |= dict.fromkeys(("debug_traceBlockByHash", "trace_block", "debug_traceTransaction"), trace)
    with_transaction(harness, "0x" + "77" * 32)
    answers["eth_getBlockByHash"] = lambda params: {"hash": params[0], "transactions": ["0x" + "77" * 32]}
    assert not await harness.events.tracer.trace()
    assert await tries(harness) == [counted]


async def test_job_is_dropped_after_too_many_attempts(harness: EventHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_tracer, "TRIES", 2)
    await harness.step()
    await harness.webhook("INTERNAL_TRANSFER", addresses=["0x" + B.hex()])
    await harness.mine([])
    harness.inner.upstream.answers["debug_traceBlockByHash"] = lambda _: 5
    for expected in ([1], [2], []):
        await harness.events.tracer.trace()
        assert await tries(harness) == expected
