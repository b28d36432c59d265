"""Verified replies: the CPU time of each kind of verification beside the plain call, in this process.

The upstreams are three nodes of a real chain, in another process, so that proofs are real. The figures include the client,
which is the same in every row.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import uvloop

from bench.cases import NOT_VERIFIED
from tests.real_harness import ADDRESS, BASE, DEV, RealHarness
from tests.real_nodes import RealNode, hardhat_nodes
from tests.service import node_session
from tests.web.worker import NO_CACHE, running_worker

KINDS = {NOT_VERIFIED: "", "quorum": "quorum 2/3", "proof": "proof"}
# The call of each figure. The newest block has one transaction.
CALLS: dict[str, tuple[str, Sequence[Any]]] = {
    "balance": ("eth_getBalance", (ADDRESS, "latest")),
    "block": ("eth_getBlockByNumber", (hex(len(BASE)), True)),
    "logs": ("eth_getLogs", ({"fromBlock": hex(len(BASE) - 6), "toBlock": hex(len(BASE))},)),
}
REPEATS = 100

# CPU microseconds per call, by figure and kind.
Costs = dict[str, dict[str, float]]


def costs(rounds: int) -> list[Costs]:
    # The worker has no database and would print a warning whenever it cannot store usage.
    logging.getLogger("proxy").addHandler(logging.NullHandler())
    with hardhat_nodes(3) as nodes, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_rounds(nodes, rounds))


async def _rounds(nodes: Sequence[RealNode], rounds: int) -> list[Costs]:
    async with node_session() as session, running_worker({DEV: [node.url for node in nodes]}, **NO_CACHE) as worker:
        for node in nodes:
            node.session = session
            await node.follow(BASE)
        harness = RealHarness(worker, DEV, nodes, [])
        await harness.look()
        return [await _round(harness) for _ in range(rounds)]


async def _round(harness: RealHarness) -> Costs:
    return {
        figure: {kind: await _cpu_us(harness, *call, verify=verify) for kind, verify in KINDS.items()}
        for figure, call in CALLS.items()
    }


async def _cpu_us(harness: RealHarness, method: str, params: Sequence[Any], *, verify: str) -> float:
    headers = {"X_Verify": verify} if verify else {}
    await _call(harness, method, params, headers)
    began = time.process_time()
    for _ in range(REPEATS):
        await _call(harness, method, params, headers)
    return (time.process_time() - began) / REPEATS * 1e6


async def _call(harness: RealHarness, method: str, params: Sequence[Any], headers: dict[str, str]) -> None:
    reply = await harness.call(method, params, **headers)
    assert reply.status == 200, reply
    assert reply.headers.get("x-verified", "") == headers.get("X_Verify", ""), reply
