"""The blocks that a pruned node and an archive of the same chain have, as the service finds them and as the nodes answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy.core.data_bounds import DATA_KINDS, DataBounds, DataKind
from tests.real_harness import ADDRESS, RealHarness, real_harness
from tests.real_nodes import Branch, RealNode, geth_nodes

# With the newer scheme, geth builds an index before it serves old states.
WHOLE = ("--gcmode", "archive", "--state.scheme", "hash")
LONG: Branch = (1,) * 200


@contextmanager
def pruned_and_archive(directory: Path) -> Iterator[list[RealNode]]:
    with (
        geth_nodes(1, directory / "pruned", "--gcmode", "full") as pruned,
        geth_nodes(1, directory / "all", *WHOLE) as whole,
    ):
        yield [*pruned, *whole]


@dataclass(frozen=True, slots=True)
class FoundBounds:
    """`wrong`: the bounds that are not exact. `calls`: those that finding all bounds of a node
    took, and finding them again."""

    bounds: list[DataBounds]
    wrong: list[str]
    calls: list[int]
    calls_to_refresh: list[int]
    head: int


async def bounds_of(nodes: Sequence[RealNode]) -> FoundBounds:
    """Find all bounds of the nodes twice, and compare them with what the nodes answer."""
    async with real_harness(nodes) as harness:
        await harness.follow(LONG)
        await harness.look()
        calls, calls_to_refresh = await _calls_to_find(harness), await _calls_to_find(harness)
        bounds = [each.health.bounds for each in harness.route.upstreams]
        wrong = [
            f"{kind} of {node!r}"
            for node, found in zip(nodes, bounds, strict=True)
            for kind in DATA_KINDS
            if not await _is_exact(node, kind, found, harness.head)
        ]
        return FoundBounds(bounds, wrong, calls, calls_to_refresh, harness.head)


async def _calls_to_find(harness: RealHarness) -> list[int]:
    """Find all bounds. Returns how many calls each node got for it."""
    harness.tracker._bounds._due_at.clear()
    before = [each.methods.total() for each in harness.proxies]
    await harness.tracker.find_bounds()
    return [each.methods.total() - one for each, one in zip(harness.proxies, before, strict=True)]


async def _is_exact(node: RealNode, kind: DataKind, bounds: DataBounds, head: int) -> bool:
    bound = bounds.of(kind)
    if bound is None:
        return False
    oldest = max(1, bound.oldest(head))
    return await has(node, kind, oldest) and (oldest == 1 or not await has(node, kind, oldest - 1))


async def has(node: RealNode, kind: str, number: int) -> bool:
    at, before = hex(number), hex(number - 1)
    questions: dict[str, tuple[str, list[Any]]] = {
        "blocks": ("eth_getBlockByNumber", [at, False]),
        "state": ("eth_getBalance", [ADDRESS, at]),
        "receipts": ("eth_getBlockReceipts", [at]),
        "logs": ("eth_getLogs", [{"fromBlock": at, "toBlock": at}]),
        "traces": ("debug_traceCall", [{}, before]),
        "proofs": ("eth_getProof", [ADDRESS, [], at]),
    }
    return (await node.reply(*questions[kind])).get("result") is not None
