"""A trial between two real nodes, of which one is behind a proxy that changes some of its results: which are reported?"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from proxy.services.rpc.shadow import MOST_WAITING
from tests.real_harness import ADDRESS, BASE, DEV
from tests.real_nodes import RealNode
from tests.rpc_harness import NetworkHarness
from tests.service import node_session, until
from tests.web.worker import running_worker

TRIED = {"shadow": 1.0, "requests_per_second": 10_000, "name": "new"}


class PlantingProxy:
    """Passes calls on to a node, and changes a part of the results really, and another part only in their form."""

    def __init__(self, node: RealNode) -> None:
        self._node = node
        self._turn = itertools.count()
        # By method.
        self.planted: Counter[str] = Counter()

    async def answer(self, request: web.Request) -> web.Response:
        call = await request.json()
        method, params = call["method"], call["params"]
        reply = await self._node.reply(method, params)
        result = reply.get("result")
        if isinstance(result, dict | list) and result:
            turn = next(self._turn) % 4
            if turn == 0:
                self.planted[method] += 1
                reply["result"] = _changed(result)
            elif turn == 1:
                reply["result"] = _in_another_form(result)
            elif turn == 2 and method == "eth_getBlockByNumber" and params[0] not in ("latest", "0x1"):
                self.planted[method] += 1
                reply = await self._node.reply(method, [hex(int(params[0], 16) - 1), *params[1:]])
        return web.json_response({**reply, "id": call["id"]})


def _changed(result: Any) -> Any:
    """One digit of a hash, or without the last item of a list."""
    if isinstance(result, list):
        return result[:-1]
    name = "hash" if "hash" in result else "transactionHash"
    digit = "1" if result[name][-1] == "0" else "0"
    return {**result, name: result[name][:-1] + digit}


def _in_another_form(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _in_another_form(member) for name, member in reversed(value.items())}
    if isinstance(value, list):
        return [_in_another_form(member) for member in value]
    return "0x" + value[2:].upper() if isinstance(value, str) and value.startswith("0x") else value


@dataclass(frozen=True, slots=True)
class PlantedReads:
    """`differing`: the reads that were reported as different, by method; `failed`: those with any other outcome than *same*."""

    reads: int
    planted_in: Mapping[str, int]
    differing: Mapping[str, int]
    failed: int
    skipped: int

    @property
    def planted(self) -> int:
        return sum(self.planted_in.values())

    @property
    def missed(self) -> int:
        return (Counter(self.planted_in) - Counter(self.differing)).total()

    @property
    def false(self) -> int:
        return (Counter(self.differing) - Counter(self.planted_in)).total() + self.failed


async def planted_reads(nodes: Sequence[RealNode], count: int) -> PlantedReads:
    """Make at least so many reads of two nodes, about 210 at a time."""
    planting = PlantingProxy(nodes[1])
    app = web.Application()
    app.router.add_post("/", planting.answer)
    runner = web.AppRunner(app)
    async with node_session() as session:
        for node in nodes:
            node.session = session
            await node.follow(BASE)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        given: list[dict[str, Any]] = [{"url": nodes[0].url}, {**TRIED, "url": f"http://127.0.0.1:{port}/"}]
        try:
            async with running_worker({DEV: given}, cache={"enabled": False}) as worker:
                harness = NetworkHarness(worker, DEV)
                await harness.look()
                trial = harness.route.shadows[0].trial
                reads = 0
                while reads < count:
                    reads += await _read_everything(harness)
                await until(lambda: trial.total.reads + trial.skipped >= reads)
        finally:
            await runner.cleanup()
    differing = {name: each.outcomes["different"] for name, each in trial.methods.items()}
    failed = trial.total.reads - trial.total.outcomes["same"] - sum(differing.values())
    return PlantedReads(reads, planting.planted, differing, failed, trial.skipped)


async def _read_everything(harness: NetworkHarness) -> int:
    """Blocks, receipts, logs, state, and calls at the latest block. Returns how many."""
    reads = 0
    for number in range(1, len(BASE) + 1):
        at = hex(number)
        for method, params in (
            ("eth_getBlockByNumber", [at, True]),
            ("eth_getBlockReceipts", [at]),
            ("eth_getLogs", [{"fromBlock": at, "toBlock": at}]),
            ("eth_getBalance", [ADDRESS, at]),
            ("eth_getBalance", [ADDRESS, "latest"]),
            ("eth_call", [{"to": ADDRESS}, "latest"]),
            ("eth_call", [{"data": "0x60006000fd"}, at]),
        ):
            await harness.call(method, params)
            reads += 1
            await until(lambda: len(harness.route.shadows[0]._queue) < MOST_WAITING // 2, every_s=0.002)
    return reads
