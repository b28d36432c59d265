"""Random reads through the service, each compared with the node itself, while the chain is extended and reorganised.

After each change of the chain the upstreams are polled once: from then on every reply must equal the node's. Replies during the
change and the poll may be older; they are counted. RANDOM_READS sets the number of reads for each case and
RANDOM_SEED the seed; long runs need pytest's `-o timeout=0`.
"""

from __future__ import annotations

import asyncio
import os
import random
from abc import ABC, abstractmethod
from collections import Counter
from typing import Any

from tests.http_client import Reply, rpc
from tests.rpc_harness import NetworkHarness
from tests.web.worker import ChunkedClient

SEED = os.environ.get("RANDOM_SEED", "20261")
READS_PER_STEP = 40
CLIENTS = 4


def reads_or(default: int) -> int:
    return int(os.environ.get("RANDOM_READS", default))


class RandomReads(ABC):
    """The reads and their outcomes. Subclasses change the chain and know what the node replies."""

    def __init__(self, harness: NetworkHarness, case: str) -> None:
        self.harness = harness
        self.chance = random.Random(f"{SEED} {case}")
        self.counts: Counter[str] = Counter()
        self.wrong: list[Any] = []
        self._case = case

    def __repr__(self) -> str:
        return f"{self._case}: {dict(self.counts)}, {len(self.wrong)} wrong"

    @abstractmethod
    async def step(self) -> None:
        """Change the chain: add blocks, or replace one to three of them."""

    @abstractmethod
    def random_call(self) -> tuple[str, Any]: ...

    @abstractmethod
    async def expected(self, method: str, params: Any) -> dict[str, Any]:
        """The node's reply: a result or an error."""

    def result_of(self, reply: Reply) -> Any:
        """The result of a reply that has one, in the form in which it is compared."""
        return reply.json["result"]

    async def run(self, reads: int) -> None:
        clients = [await self.harness.worker.connect() for _ in range(CLIENTS)]
        try:
            while self.counts.total() < reads and not self.wrong:
                await asyncio.gather(self.step(), self._reads(clients, READS_PER_STEP // 4, settled=False))
                await asyncio.gather(self.harness.look(), self._reads(clients, READS_PER_STEP // 4, settled=False))
                await self._reads(clients, READS_PER_STEP, settled=True)
        finally:
            for client in clients:
                await client.close()

    async def _reads(self, clients: list[ChunkedClient], count: int, *, settled: bool) -> None:
        async def some(client: ChunkedClient) -> None:
            for _ in range(count // CLIENTS):
                await self._read(client, settled=settled)

        await asyncio.gather(*[some(client) for client in clients])

    async def _read(self, client: ChunkedClient, *, settled: bool) -> None:
        method, params = self.random_call()
        headers = {"Cache_Control": "no-cache"} if self.chance.random() < 0.2 else {}
        harness = self.harness
        reply = await client.send(harness.worker.post(rpc(method, params), network=harness.network, **headers))
        expected = await self.expected(method, params)
        if "result" not in expected:
            self.counts["without"] += 1
        elif "result" not in reply.json:
            self.counts["refused"] += 1
        elif self.result_of(reply) == expected["result"]:
            self.counts["right"] += 1
        elif settled:
            cached = reply.headers.get("x-cache")
            self.wrong.append((method, params, cached, reply.json["result"], expected["result"], harness.route.state))
        else:
            self.counts["young"] += 1
