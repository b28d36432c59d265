"""An attack on verified replies: the nodes of one operator are replaced, and the honest ones are flooded.

Five upstreams of three operators. Two of operator `a` are replaced by liars that agree with each other. The others are
overloaded or do not answer, so that calls fail over to the liars. As long as fewer than two operators answer, a verified call
gets an error: never the lie, over any way in.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from prometheus_client import REGISTRY

from proxy.core.upstream_health import CONTRADICTIONS
from proxy.services.rpc.verifier import MOST_COMPARED
from tests.http_client import rpc
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import Chain, Refused, ScriptedUpstream, value_of
from tests.service import until
from tests.sockets import bare
from tests.web.worker import on_uvloop

OPERATORS = ("a", "a", "b", "b", "c")
LIE = "0x" + "66" * 32
ADDRESS = "0x" + "11" * 20
# Calls over each way in, for each fault.
ROUNDS = 12
VERIFY: dict[str, Any] = {"X_Verify": "quorum 2/3"}
# Deeper than the chain's finality.
HEAD, FINAL = 1000, hex(900)

# The result or the error's message.
Outcome = tuple[Any, str]
Fault = Callable[[RpcHarness, bool], Awaitable[None]]


async def over_http(harness: RpcHarness) -> Outcome:
    reply = await harness.call("eth_getBalance", [ADDRESS, FINAL], **VERIFY)
    return _outcome(reply.json)


async def in_a_batch(harness: RpcHarness) -> Outcome:
    calls: list[tuple[str, list[Any]]] = [("eth_getBalance", [ADDRESS, FINAL]), ("eth_getBalance", [ADDRESS, "latest"])]
    first, second = (await harness.batch(*calls, **VERIFY)).json
    assert second.get("result") != LIE
    return _outcome(first)


async def on_a_socket(harness: RpcHarness) -> Outcome:
    async with bare(harness.worker, network=harness.network, **VERIFY) as socket:
        socket.write(rpc("eth_getBalance", [ADDRESS, FINAL]))
        return _outcome(await socket.json())


def _outcome(reply: dict[str, Any]) -> Outcome:
    return reply.get("result"), reply.get("error", {}).get("message", "")


WAYS_IN = (over_http, in_a_batch, on_a_socket)


async def overload(harness: RpcHarness, is_on: bool) -> None:
    for each in honest(harness):
        each.limited, each.retry_after = (1 << 30, "1") if is_on else (0, "1")


async def hang(harness: RpcHarness, is_on: bool) -> None:
    """Calls are not answered; heads still are."""
    for each in honest(harness):
        each.held = {"eth_getBalance"} if is_on else set()
        if not is_on:
            each.gate.set()


async def kill(harness: RpcHarness, is_on: bool) -> None:
    for each in harness.proxies[2:]:
        await each.switch("dead" if is_on else "pass")


def honest(harness: RpcHarness) -> list[ScriptedUpstream]:
    return harness.upstreams[2:]


@asynccontextmanager
async def five_upstreams(database: str, **sections: Any) -> AsyncIterator[RpcHarness]:
    options = [{"operator": operator} for operator in OPERATORS]
    given = {"database": {"url": database}, **sections}
    async with rpc_harness(5, faults=True, options=options, chain=Chain(HEAD), **given) as harness:
        await harness.worker.app.pool.open()
        yield harness


def counted(harness: RpcHarness) -> tuple[float, float]:
    """The metrics that raise alerts: contradicted replies of the first operator, and calls without a quorum."""
    labels = [each.label for each in harness.route.upstreams[:2]]
    wrong = [REGISTRY.get_sample_value("penstock_contradictions_total", {"upstream": label}) or 0.0 for label in labels]
    split = REGISTRY.get_sample_value("penstock_split_votes_total", {"network": harness.network}) or 0.0
    return sum(wrong), split


async def kept(harness: RpcHarness) -> list[dict[str, Any]]:
    await harness.worker.app.contradictions.flush()
    return await harness.worker.app.contradictions.recent()


def replace_first_operator(harness: RpcHarness) -> None:
    for each in harness.upstreams[:2]:
        each.answers["eth_getBalance"] = lambda _: LIE


@pytest.mark.parametrize("fault", [overload, hang, kill])
def test_replaced_operator_cannot_verify_its_lie_while_the_others_are_flooded(fault: Fault, database: str) -> None:
    @on_uvloop
    async def attack() -> None:
        async with five_upstreams(database, rpc={"call_timeout_s": 0.3}) as harness:
            before, _ = counted(harness)
            true = value_of("balance", ADDRESS, harness.chain.hash_of(int(FINAL, 16)))
            replace_first_operator(harness)
            await fault(harness, True)
            for way_in in WAYS_IN:
                async with asyncio.TaskGroup() as group:
                    calls = [group.create_task(way_in(harness)) for _ in range(ROUNDS)]
                for result, message in [call.result() for call in calls]:
                    assert result is None, (way_in, result)
                    assert message.startswith("not verified: "), message
                    assert message.endswith("; missing: b, c"), message
            await fault(harness, False)
            await harness.look()

            async def is_verified() -> bool:
                result, _ = await over_http(harness)
                assert result in (true, None)
                return bool(result == true)

            await until(is_verified)
            for way_in in WAYS_IN:
                result, _ = await way_in(harness)
                assert result in (true, None)

            # The liars are asked as well, and contradicted. They take turns, so it takes some calls until one is caught.
            async def is_caught() -> bool:
                result, _ = await over_http(harness)
                assert result in (true, None)
                return "distrusted" in harness.states[:2]

            await until(is_caught)
            assert "distrusted" not in harness.states[2:]
            assert counted(harness)[0] >= before + CONTRADICTIONS
            row = next(row for row in await kept(harness) if row["kind"] == "outvoted")
            assert (row["operator"], row["verified_by"], row["method"]) == ("a", "quorum 2/3", "eth_getBalance")
            assert orjson.loads(row["params"]) == [ADDRESS, FINAL]
            assert (orjson.loads(row["reply"]), orjson.loads(row["other_reply"])) == (LIE, true)
            assert {operator for _, operator in row["others"]} == {"b", "c"}

    attack()


def test_one_honest_operator_and_a_replaced_one_verify_nothing(database: str) -> None:
    @on_uvloop
    async def attack() -> None:
        async with five_upstreams(database) as harness:
            _, before = counted(harness)
            replace_first_operator(harness)
            harness.upstreams[4].limited = 1 << 30
            for way_in in WAYS_IN:
                result, message = await way_in(harness)
                assert result is None
                assert message.startswith("not verified: fewer than 2 of "), message
                assert message.endswith("; missing: c"), message
            # Which of them lies is not known: both replies are kept, and neither counts against its upstream.
            assert counted(harness)[1] == before + len(WAYS_IN)
            rows = await kept(harness)
            # Each operator may have been asked at either of its upstreams.
            assert 1 <= len(rows) <= len(WAYS_IN)
            for row in rows:
                assert (row["kind"], row["operator"], orjson.loads(row["reply"])) == ("split", "a", LIE)
                assert [operator for _, operator in row["others"]] == ["b"]
            assert not any(each.health.contradictions for each in harness.route.upstreams)

    attack()


@pytest.mark.parametrize(("named_by_hash", "kept_rows"), [(True, 1), (False, 0)])
@on_uvloop
async def test_contradiction_about_a_recent_block_is_kept_if_its_hash_names_it(
    named_by_hash: bool, kept_rows: int, database: str
) -> None:
    """Upstreams on other branches may differ about a number, but never about the state of a block with the same hash."""

    async with five_upstreams(database) as harness:
        replace_first_operator(harness)
        for each in honest(harness):
            each.answers["eth_getBalance"] = lambda _: "0x1"
        harness.upstreams[4].limited = 1 << 30
        block = {"blockHash": harness.chain.hash_of(HEAD)} if named_by_hash else hex(HEAD)
        reply = await harness.call("eth_getBalance", [ADDRESS, block], **VERIFY)
        assert reply.status == 503, reply.body
        rows = await kept(harness)
        assert [(row["kind"], orjson.loads(row["reply"])) for row in rows] == [("split", LIE)] * kept_rows


@pytest.mark.parametrize(
    ("code", "message"),
    [(-32005, "limit exceeded"), (429, "too many requests"), (-32603, "internal error"), (-32601, "no such method")],
)
@on_uvloop
async def test_operators_that_are_overloaded_do_not_agree_on_an_error(code: int, message: str) -> None:
    """Their trouble is no vote: the error would be verified, although it says nothing about the chain."""

    def refuse(_: list[Any]) -> Any:
        raise Refused(code, message)

    async with rpc_harness(3) as harness:
        for upstream in harness.upstreams[1:]:
            upstream.answers["eth_getBalance"] = refuse
        reply = await harness.call("eth_getBalance", [ADDRESS, "latest"], **VERIFY)
        assert (reply.status, reply.headers.get("x-verified")) == (503, None), reply.body
        assert reply.fault(503)["message"].endswith("; missing: operator-2, operator-3")


@on_uvloop
async def test_operators_agree_on_an_error_about_the_call() -> None:
    def refuse(_: list[Any]) -> Any:
        raise Refused(-32000, "header not found")

    async with rpc_harness(3) as harness:
        for upstream in harness.upstreams:
            upstream.answers["eth_getBalance"] = refuse
        reply = await harness.call("eth_getBalance", [ADDRESS, "0xffffff"], **VERIFY)
        assert (reply.status, reply.headers.get("x-verified")) == (200, "quorum 2/3")
        assert reply.json["error"]["message"] == "header not found"


@on_uvloop
async def test_call_to_another_upstream_of_an_operator_is_paid_for() -> None:
    def refuse(_: list[Any]) -> Any:
        raise Refused(-32603, "internal error")

    async with rpc_harness(3, options=[{"operator": operator} for operator in "aab"]) as harness:
        verify = {"X_Verify": "quorum 2/2"}
        params = [ADDRESS, "latest"]
        usual = await harness.call("eth_getBalance", params, **verify)
        harness.upstreams[0].answers["eth_getBalance"] = refuse
        harness.route.upstreams[0].health.latency_s = 0.0
        again = await harness.call("eth_getBalance", params, **verify)
        assert (again.status, again.headers["x-verified"]) == (200, "quorum 2/2")
        units = [int(reply.headers["x-compute-units"]) for reply in (usual, again)]
        assert units[1] == units[0] // 2 * 3


@on_uvloop
async def test_result_that_is_too_large_to_compare_is_requested_once_from_each_operator() -> None:
    """The client chooses it, so another upstream of the operator would not help."""
    async with rpc_harness(4, options=[{"operator": operator} for operator in "aabb"]) as harness:
        for upstream in harness.upstreams:
            upstream.answers["eth_getCode"] = lambda _: "0x" + "00" * MOST_COMPARED
        reply = await harness.call("eth_getCode", [ADDRESS, "latest"], X_Verify="quorum 2/2")
        assert "too large" in reply.fault(503)["message"]
        assert harness.count("eth_getCode") == 2
