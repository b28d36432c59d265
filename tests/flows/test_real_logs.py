"""Logs of real chains whose nodes return ten blocks at a time: nothing is left out, however new the last block is."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.faults import MAX_RANGE
from tests.real_harness import RealHarness, real_harness, real_nodes
from tests.real_nodes import HardhatNode, RealNode, planned
from tests.web.worker import on_uvloop

# So many blocks before the last one: refused and split, or accepted.
SPANS = [2 * MAX_RANGE + 1, 2]


@pytest.fixture(scope="module", params=["hardhat", "geth"])
def nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealNode]]:
    directory = tmp_path_factory.mktemp("nodes")
    with real_nodes(request.param, 2, directory, "--rpc.rangelimit", str(MAX_RANGE)) as found:
        yield found


async def limit(harness: RealHarness, span: int) -> None:
    """Hardhat has no limit, so the proxies before its nodes apply geth's."""
    for node, proxy in zip(harness.nodes, harness.proxies, strict=True):
        await proxy.switch("range_limit" if isinstance(node, HardhatNode) and span > MAX_RANGE else "pass")


async def mine(harness: RealHarness, seed: int) -> dict[str, Any]:
    """Mine a block and read a receipt in it as a client does. Returns a query up to this block. All nodes but the last may be
    one block behind: the receipt is null if one of them is asked, and the service does not know the block then."""
    branch = (*harness.branch, seed)
    for node in harness.nodes[:-1]:
        await node.follow(branch[: len(branch) - seed % 2])
    await harness.follow(branch, harness.nodes[-1:])
    await harness.result("eth_getTransactionReceipt", [harness.transaction])
    return {"toBlock": hex(harness.head)}


def expected(harness: RealHarness, first: int) -> list[str]:
    blocks = [planned(harness.branch[:number]) for number in range(first, harness.head + 1)]
    return [name for block in blocks for _, name in block.transactions]


def check(harness: RealHarness, first: int, logs: list[dict[str, Any]]) -> None:
    assert [log["transactionHash"] for log in logs] == expected(harness, first), (first, harness.head)


async def queries(harness: RealHarness) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    """Ranges that end at a new block, with their first block, each under a smaller limit of the upstreams than the last."""
    for seed in (1, 2, 4, 5):
        asked = await mine(harness, seed)
        for span in SPANS:
            await limit(harness, span)
            first = harness.head - span
            yield first, {**asked, "fromBlock": hex(first)}
        await harness.look()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("last", ["number", "latest"])
@on_uvloop
async def test_logs_up_to_a_block_that_is_new_are_complete(nodes: list[RealNode], count: int, last: str) -> None:
    async with real_harness(nodes[-count:]) as harness:
        async for first, query in queries(harness):
            asked = query | ({} if last == "number" else {"toBlock": "latest"})
            check(harness, first, await harness.result("eth_getLogs", [asked]))


async def filter_at(harness: RealHarness, index: int, query: dict[str, Any]) -> str:
    """Create a filter at one of the upstreams, which may be the one that is behind."""
    for upstream in harness.route.upstreams:
        upstream.health.cordon(cordoned=upstream.health.index != index, now=time.monotonic())
    name = str(await harness.result("eth_newFilter", [query]))
    for upstream in harness.route.upstreams:
        upstream.health.cordon(cordoned=False, now=time.monotonic())
    return name


@pytest.mark.parametrize("count", [1, 2])
@on_uvloop
async def test_logs_of_a_filter_up_to_a_block_that_is_new_are_complete(nodes: list[RealNode], count: int) -> None:
    async with real_harness(nodes[-count:]) as harness:
        async for first, query in queries(harness):
            for index in range(count):
                name = await filter_at(harness, index, query)
                check(harness, first, await harness.result("eth_getFilterLogs", [name]))
