"""Random reads through the service, compared with the node itself, across reorganisations and beside a bad upstream.

After each change of the chain the upstreams are polled once: from then on every reply must equal the node's. Replies between
the change and the poll may be older; they are counted. PENSTOCK_RANDOM_READS sets the number of reads for each case.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from functools import partial
from typing import Any

import pytest

from tests.http_client import rpc
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import Chain, Refused, ScriptedUpstream, value_of
from tests.web.worker import ChunkedClient, on_uvloop

SEED = 20_261
READS = int(os.environ.get("PENSTOCK_RANDOM_READS", "900"))
READS_PER_STEP = 30
CLIENTS = 4
ADDRESSES = [f"0x{n:040x}" for n in range(1, 5)]

# A bad upstream of two must be one that can be known to be wrong: it lags, claims the future, or contradicts a final block.
CASES = [
    (2, "lags"),
    (2, "lies_ahead"),
    (2, "forked_deeply"),
    (3, "lags"),
    (3, "forked"),
    (3, "lies_ahead"),
    (3, "lies_hash"),
]


def false_hash(upstream: ScriptedUpstream, params: list[Any]) -> Any:
    block = upstream._eth_getBlockByNumber(params)
    return block and {**block, "hash": value_of("lie", block["hash"])}


def block_far_ahead(upstream: ScriptedUpstream, params: list[Any]) -> Any:
    block = upstream._eth_getBlockByNumber(params)
    return block and ({**block, "number": hex(upstream.head + 1000)} if params[0] == "latest" else block)


class Chaos:
    """The chain, one bad upstream, and the reads."""

    def __init__(self, harness: RpcHarness, kind: str) -> None:
        self.harness = harness
        self.chain = harness.chain
        self.kind = kind
        self.chance = random.Random(f"{SEED} {kind} {len(harness.upstreams)}")
        self.node = harness.upstreams[-1]
        self.bad = harness.upstreams[0]
        self.counts: Counter[str] = Counter()
        self.wrong: list[Any] = []
        if kind == "lies_hash":
            self.bad.answers["eth_getBlockByNumber"] = partial(false_hash, self.bad)
        elif kind == "lies_ahead":
            self.bad.answers["eth_getBlockByNumber"] = partial(block_far_ahead, self.bad)
        elif kind.startswith("forked"):
            depth = 80 if kind == "forked_deeply" else self.chance.randint(1, 100)
            self.bad.chain = Chain(
                self.chain.head, self.chain.name, self.chain.identity, {self.chain.head - depth + 1: 1 << 40}
            )

    def step(self) -> None:
        """A new block, or a reorganisation by one to three blocks to a shorter, an equal or a longer branch."""
        chain, chance = self.chain, self.chance
        if chance.random() < 0.5:
            chain.head += chance.randint(1, 2)
        else:
            depth = chance.randint(1, 3)
            chain.reorganise(depth)
            chain.mined = {tx: n for tx, n in chain.mined.items() if n <= chain.head - depth or chance.random() < 0.5}
            chain.head += chance.randint(-depth, 2)
            chain.mined = {tx: n for tx, n in chain.mined.items() if n <= chain.head}
        chain.mined[value_of("tx", chance.random())] = chain.head
        if self.kind == "lags":
            self.bad.behind = chance.randint(0, 3)
        elif self.kind.startswith("forked"):
            self.bad.chain.head = chain.head + chance.randint(-1, 1)

    def call(self) -> tuple[str, list[Any]]:
        chance, head = self.chance, self.chain.head
        number = hex(head - chance.randint(0, 4))
        block = chance.choice(["latest", number])
        txs = list(self.chain.mined)[-8:] or [value_of("tx")]
        calls: list[tuple[str, list[Any]]] = [
            ("eth_getBalance", [chance.choice(ADDRESSES), block]),
            ("eth_getBlockByNumber", [block, False]),
            ("eth_getTransactionReceipt", [chance.choice(txs)]),
            ("eth_getTransactionCount", [chance.choice(ADDRESSES), "latest"]),
            ("eth_getLogs", [{"fromBlock": number, "toBlock": block}]),
            ("eth_getLogs", [{"fromBlock": number, "toBlock": hex(head)}]),
            ("eth_blockNumber", []),
        ]
        return chance.choice(calls)

    async def read(self, client: ChunkedClient, *, settled: bool) -> None:
        method, params = self.call()
        headers = {"Cache_Control": "no-cache"} if self.chance.random() < 0.2 else {}
        reply = await client.send(
            self.harness.worker.post(rpc(method, params), network=self.harness.network, **headers)
        )
        try:
            expected = getattr(self.node, f"_{method}")(params)
        except Refused:
            self.counts["without"] += 1
            return
        if "result" not in reply.json:
            self.counts["refused"] += 1
        elif reply.json["result"] == expected:
            self.counts["right"] += 1
        elif settled:
            self.wrong.append((method, params, reply.headers.get("x-cache"), reply.json["result"], expected))
        else:
            self.counts["young"] += 1

    async def run(self, reads: int) -> None:
        clients = [await self.harness.worker.connect() for _ in range(CLIENTS)]
        try:
            while self.counts.total() < reads and not self.wrong:
                self.step()
                await self._reads(clients, READS_PER_STEP // 3, settled=False)
                await self.harness.look()
                await self._reads(clients, READS_PER_STEP, settled=True)
        finally:
            for client in clients:
                await client.close()

    async def _reads(self, clients: list[ChunkedClient], count: int, *, settled: bool) -> None:
        async def some(client: ChunkedClient) -> None:
            for _ in range(count // CLIENTS + 1):
                await self.read(client, settled=settled)

        await asyncio.gather(*[some(client) for client in clients])


@pytest.mark.parametrize(("count", "kind"), CASES)
def test_every_read_equals_the_nodes_after_one_poll(count: int, kind: str) -> None:
    @on_uvloop
    async def run() -> None:
        async with rpc_harness(count, chain=Chain(head=1000)) as harness:
            chaos = Chaos(harness, kind)
            await harness.look()
            await chaos.run(READS)
            print(f"{count} upstreams, one {kind}: {dict(chaos.counts)}, {len(chaos.wrong)} wrong")
            assert chaos.wrong == []
            assert chaos.counts["right"] > 0.8 * chaos.counts.total()

    run()
