"""Random reads from real chains, Hardhat's and geth's, compared with one of their nodes, across reorganisations and beside a
bad upstream."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest

from proxy.dev.funded_accounts import FUNDED
from tests.faults import Mode
from tests.random_reads import RandomReads, reads_or
from tests.real_harness import ADDRESS, BASE, RealHarness, real_harness
from tests.real_nodes import Branch, RealNode, planned
from tests.web.worker import on_uvloop

# The development chain counts blocks as final at this depth: a reorganisation does not reach them.
FINALITY = 4
# A bad upstream of two must be one that can be known to be wrong: it lags, claims the future, or contradicts a final block.
CASES = [
    (2, "lags"),
    (2, "lies_ahead"),
    (2, "forked"),
    (3, "lags"),
    (3, "forked"),
    (3, "lies_ahead"),
    (3, "lies_hash"),
]
LIES: dict[str, Mode] = {"lies_ahead": "high_head", "lies_hash": "false_hash"}


class RealReads(RandomReads):
    """A real chain, and one bad upstream."""

    harness: RealHarness

    def __init__(self, harness: RealHarness, kind: str) -> None:
        node = harness.nodes[-1]
        super().__init__(harness, f"{type(node).__name__}, {len(harness.nodes)} upstreams, one {kind}")
        self.kind = kind
        self.node = node
        self._highest = harness.head
        self._fork = BASE[: -2 * FINALITY]
        # Transactions of the last blocks, also of those that were replaced.
        self._transactions: deque[str] = deque([harness.transaction], maxlen=12)
        self._replies: dict[str, dict[str, Any]] = {}
        self._is_changing = False

    async def step(self) -> None:
        branch = self._next_branch()
        self._transactions += [name for _, name in planned(branch).transactions]
        self._replies.clear()
        self._is_changing = True
        await asyncio.gather(*[node.follow(branch) for node in self.harness.nodes[1:]], self._misbehave(branch))
        self._is_changing = False
        self.harness.branch = branch
        self._highest = max(self._highest, len(branch))

    def _next_branch(self) -> Branch:
        """New blocks, or another branch from one to three blocks ago: a shorter, an equal or a longer one."""
        chance, branch = self.chance, self.harness.branch
        depth = min(chance.choice([0, 0, 0, 1, 2, 3]), len(branch) - self._highest + FINALITY)
        blocks = chance.randint(0, depth + 2) if depth else chance.randint(1, 2)
        return branch[: len(branch) - depth] + tuple([chance.randrange(1 << 20) for _ in range(blocks)])

    async def _misbehave(self, branch: Branch) -> None:
        bad, chance = self.harness.nodes[0], self.chance
        if self.kind == "lags":
            await bad.follow(branch[: len(branch) - chance.randint(0, 3)])
        elif self.kind == "forked":
            blocks = len(branch) + chance.randint(-1, 1) - len(self._fork)
            self._fork += tuple([chance.randrange(1 << 20) for _ in range(blocks)])
            await bad.follow(self._fork)
        else:
            await bad.follow(branch)

    def random_call(self) -> tuple[str, list[Any]]:
        chance, head = self.chance, self.harness.head
        number = hex(head - chance.randint(0, FINALITY + 1))
        block = chance.choice(["latest", number])
        address = chance.choice([ADDRESS, FUNDED.address.lower(), planned(self.harness.branch).miner])
        calls: list[tuple[str, list[Any]]] = [
            ("eth_blockNumber", []),
            ("eth_getBalance", [address, block]),
            ("eth_getTransactionCount", [FUNDED.address, block]),
            ("eth_getStorageAt", [ADDRESS, "0x0", block]),
            ("eth_call", [{"to": ADDRESS}, block]),
            ("eth_getBlockByNumber", [block, chance.random() < 0.3]),
            ("eth_getBlockTransactionCountByNumber", [block]),
            ("eth_getTransactionReceipt", [chance.choice(self._transactions)]),
            ("eth_getTransactionByHash", [self.harness.transaction]),
            ("eth_getLogs", [{"fromBlock": number, "toBlock": block}]),
            ("eth_getLogs", [{"fromBlock": number, "toBlock": hex(head), "address": ADDRESS}]),
        ]
        return chance.choice(calls)

    async def expected(self, method: str, params: list[Any]) -> dict[str, Any]:
        if self._is_changing:
            return await self.node.reply(method, params)
        name = f"{method} {params}"
        if name not in self._replies:
            self._replies[name] = await self.node.reply(method, params)
        return self._replies[name]


@pytest.mark.parametrize(("count", "kind"), CASES)
@on_uvloop
async def test_every_read_of_a_real_chain_equals_the_nodes_after_one_poll(
    nodes: list[RealNode], count: int, kind: str
) -> None:
    async with real_harness(nodes[:count]) as harness:
        await harness.proxies[0].switch(LIES.get(kind, "pass"))
        reads = RealReads(harness, kind)
        await reads.run(reads_or(180))
        print(reads)
        assert reads.wrong == []
        assert reads.counts["right"] > 0.5 * reads.counts.total()
