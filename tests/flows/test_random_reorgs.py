"""Random reads from scripted upstreams, compared with one of them, across reorganisations and beside a bad upstream."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.random_reads import RandomReads, reads_or
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import Chain, Refused, ScriptedUpstream, value_of
from tests.web.worker import on_uvloop

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


class ScriptedReads(RandomReads):
    """The scripted chain, and one bad upstream."""

    def __init__(self, harness: RpcHarness, kind: str) -> None:
        super().__init__(harness, f"{len(harness.upstreams)} upstreams, one {kind}")
        self.chain = harness.chain
        self.kind = kind
        self.node = harness.upstreams[-1]
        self.bad = harness.upstreams[0]
        if kind == "lies_hash":
            self.bad.answers["eth_getBlockByNumber"] = partial(false_hash, self.bad)
        elif kind == "lies_ahead":
            self.bad.answers["eth_getBlockByNumber"] = partial(block_far_ahead, self.bad)
        elif kind.startswith("forked"):
            depth = 80 if kind == "forked_deeply" else self.chance.randint(1, 100)
            self.bad.chain = Chain(
                self.chain.head, self.chain.name, self.chain.identity, {self.chain.head - depth + 1: 1 << 40}
            )

    async def step(self) -> None:
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

    def random_call(self) -> tuple[str, list[Any]]:
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

    async def expected(self, method: str, params: list[Any]) -> dict[str, Any]:
        try:
            return {"result": getattr(self.node, f"_{method}")(params)}
        except Refused as exc:
            return {"error": exc.error}


@pytest.mark.parametrize(("count", "kind"), CASES)
@on_uvloop
async def test_every_read_equals_the_nodes_after_one_poll(count: int, kind: str) -> None:
    async with rpc_harness(count, chain=Chain(head=1000)) as harness:
        reads = ScriptedReads(harness, kind)
        await harness.look()
        await reads.run(reads_or(900))
        print(reads)
        assert reads.wrong == []
        assert reads.counts["right"] > 0.8 * reads.counts.total()
