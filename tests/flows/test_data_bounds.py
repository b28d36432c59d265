"""Calls about old blocks go to upstreams that have them: declared bounds, bounds that are found, and those of real nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from proxy.core.data_bounds import ALL_BLOCKS, DATA_KINDS, Bound
from proxy.services.rpc import bound_checks
from tests.real_bounds import bounds_of, pruned_and_archive
from tests.real_nodes import RealNode
from tests.rpc_harness import NetworkHarness, rpc_harness
from tests.rpc_upstreams import Refused, ScriptedUpstream
from tests.web.worker import on_uvloop

NO_CACHE = {"enabled": False}
PROBED = "0x" + 40 * "0"
CLIENT = "0x" + 40 * "1"
KEPT = 200


def pruned_at(first: Callable[[], int]) -> Callable[[list[Any]], Any]:
    def balance(params: list[Any]) -> Any:
        if params[1] != "latest" and int(params[1], 16) < first():
            raise Refused(-32000, "missing trie node")
        return "0x1"

    return balance


def balances(upstream: ScriptedUpstream, address: str = CLIENT) -> int:
    return len([call for call in upstream.calls if call.method == "eth_getBalance" and call.params[0] == address])


async def refused(harness: NetworkHarness, method: str, params: list[Any]) -> dict[str, Any]:
    reply = await harness.call(method, params)
    assert reply.status == 200, reply
    error: dict[str, Any] = reply.json["error"]
    return error


async def checked(harness: NetworkHarness) -> None:
    """Check all bounds that are due, as the tracker does."""
    await harness.tracker._bounds.check()


def due(harness: NetworkHarness) -> None:
    harness.tracker._bounds._due_at.clear()


@on_uvloop
async def test_call_goes_only_to_upstreams_that_declare_its_block() -> None:
    options = [{"bounds": {"state": -128, "blocks": 900}}, {"bounds": {"state": 500}}]
    async with rpc_harness(2, cache=NO_CACHE, options=options) as harness:
        for number in range(500, 520):
            await harness.result("eth_getBalance", [CLIENT, hex(number)])
        assert [balances(each) for each in harness.upstreams] == [0, 20]
        error = await refused(harness, "eth_getBalance", [CLIENT, hex(499)])
        assert error["code"] == -32014
        assert error["data"] == {"oldest_block": hex(500)}
        assert "no upstream of ethereum/mainnet has the state of block 499" in error["message"]
        assert "the oldest block with state is 500" in error["message"]
        assert [balances(each) for each in harness.upstreams] == [0, 20]


@on_uvloop
async def test_only_upstream_names_its_oldest_block_too() -> None:
    async with rpc_harness(1, options=[{"archive": False}]) as harness:
        error = await refused(harness, "eth_getBalance", [CLIENT, "0x1"])
        assert error["data"] == {"oldest_block": hex(harness.chain.head - 127)}


@on_uvloop
async def test_bounds_are_searched_for_after_an_old_read_and_then_confirmed_with_one_call() -> None:
    async with rpc_harness(2, cache=NO_CACHE) as harness:
        harness.upstreams[0].answers["eth_getBalance"] = pruned_at(lambda: harness.chain.head - KEPT + 1)
        await harness.result("eth_getBalance", [CLIENT, "latest"])
        await checked(harness)
        assert harness.count("eth_getBalance", [PROBED]) == 0
        assert [balances(each, PROBED) for each in harness.upstreams] == [0, 0]
        await harness.result("eth_getBalance", [CLIENT, "0x1"])
        await checked(harness)
        found = [each.health.bounds.text for each in harness.route.upstreams]
        assert found == [f"state={harness.chain.head - KEPT + 1}", "state=0"]
        calls = [balances(each, PROBED) for each in harness.upstreams]
        assert calls[0] <= 14
        assert calls[1] == 1
        for _ in range(4):
            due(harness)
            await checked(harness)
        assert [balances(each, PROBED) for each in harness.upstreams] == [calls[0] + 4, calls[1] + 4]
        before = balances(harness.upstreams[0])
        for number in range(1, 20):
            await harness.result("eth_getBalance", [CLIENT, hex(number)])
        assert balances(harness.upstreams[0]) == before


@on_uvloop
async def test_sliding_bound_is_followed() -> None:
    async with rpc_harness(2, cache=NO_CACHE) as harness:
        harness.upstreams[0].answers["eth_getBalance"] = pruned_at(lambda: harness.chain.head - KEPT + 1)
        await harness.result("eth_getBalance", [CLIENT, "0x1"])
        for _ in range(2):
            due(harness)
            await checked(harness)
            harness.chain.head += 50
            await harness.look()
        due(harness)
        await checked(harness)
        assert harness.route.upstreams[0].health.bounds.text == f"state=-{KEPT}"
        harness.chain.head += 7
        await harness.look()
        before = balances(harness.upstreams[0])
        for number in range(harness.chain.head - KEPT - 20, harness.chain.head - KEPT + 1):
            await harness.result("eth_getBalance", [CLIENT, hex(number)])
        assert balances(harness.upstreams[0]) == before


@on_uvloop
async def test_upstream_that_does_not_answer_keeps_an_unknown_bound() -> None:
    def broken(params: list[Any]) -> Any:
        raise Refused(-32603, "internal error")

    async with rpc_harness(1, cache=NO_CACHE) as harness:
        await harness.result("eth_getBalance", [CLIENT, "0x1"])
        harness.upstreams[0].answers["eth_getBalance"] = broken
        await checked(harness)
        await checked(harness)
        assert balances(harness.upstreams[0], PROBED) == 1  # The next search is some seconds away.
        assert harness.route.upstreams[0].health.bounds.text == ""
        assert bound_checks.AGAIN_S > 1


# Real nodes


@pytest.fixture(scope="module")
def geth(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealNode]]:
    with pruned_and_archive(tmp_path_factory.mktemp("bounds")) as nodes:
        yield nodes


@on_uvloop
async def test_bounds_of_pruned_and_archive_geth_are_exact(geth: list[RealNode]) -> None:
    found = await bounds_of(geth)
    assert not found.wrong
    assert max(found.calls) <= 25
    assert max(found.calls_to_refresh) <= len(DATA_KINDS)
    assert [each.of("state") for each in found.bounds] == [Bound(kept=129), ALL_BLOCKS]
    assert found.bounds[1].highest(found.head) == 0
