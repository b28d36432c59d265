"""A worker whose upstreams are nodes of a real chain, each behind a proxy that counts calls and can inject faults."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from proxy.services.rpc.tracker import PATIENCE_S
from tests.faults import FaultProxy, fault_proxy
from tests.real_nodes import CONTRACT, Branch, RealNode, geth_nodes, hardhat_nodes, planned
from tests.rpc_harness import NetworkHarness
from tests.service import node_session, until
from tests.web.worker import Worker, running_worker

DEV = "dev/mainnet"
# Blocks that all tests begin with. The development chain counts blocks as final at a depth of four.
BASE: Branch = (1,) * 30
ADDRESS = CONTRACT.lower()


class RealHarness(NetworkHarness):
    """`branch` is that of the honest nodes."""

    def __init__(self, running: Worker, network: str, nodes: Sequence[RealNode], proxies: list[FaultProxy]) -> None:
        super().__init__(running, network)
        self.nodes = nodes
        self.proxies = proxies
        self.branch = BASE

    @property
    def head(self) -> int:
        return len(self.branch)

    @property
    def transaction(self) -> str:
        """The hash of the newest transaction."""
        blocks = (planned(self.branch[:number]) for number in range(self.head, 0, -1))
        return next(block.transactions[-1][1] for block in blocks if block.transactions)

    async def follow(self, branch: Branch, nodes: Sequence[RealNode] | None = None) -> None:
        """Let all nodes follow this branch from now on, or only the given ones."""
        for node in self.nodes if nodes is None else nodes:
            await node.follow(branch)
        self.branch = branch

    def reads(self) -> list[tuple[str, list[Any]]]:
        """Calls whose results depend on the last blocks."""
        head = hex(self.head)
        return [
            ("eth_blockNumber", []),
            ("eth_getBalance", [ADDRESS, "latest"]),
            ("eth_getBalance", [ADDRESS, head]),
            ("eth_call", [{"to": ADDRESS}, "latest"]),
            ("eth_getBlockByNumber", ["latest", False]),
            ("eth_getBlockByNumber", [head, True]),
            ("eth_getBlockByNumber", [hex(self.head - 2), False]),
            ("eth_getTransactionReceipt", [self.transaction]),
            ("eth_getTransactionByHash", [self.transaction]),
            ("eth_getLogs", [{"fromBlock": hex(self.head - 4), "toBlock": head}]),
            ("eth_getLogs", [{"fromBlock": hex(self.head - 2), "address": ADDRESS}]),
        ]

    async def look(self) -> None:
        """Poll the upstreams now, and once more if one was slow: its reply is compared with the others in the next poll."""
        began = time.monotonic()
        await super().look()
        if time.monotonic() - began > PATIENCE_S:
            await super().look()

    async def polled(self) -> None:
        """Wait until the running tracker has polled each upstream and seen the last block of the branch."""
        members, heads = self.route.state.group.members, self.route.heads
        name = (await self.nodes[-1].ask("eth_getBlockByNumber", "latest", False))["hash"]
        self.tracker.wake()
        await until(lambda: {each.head_hash for each in members} == {name})
        await until(lambda: heads.heard_at >= max([each.head_at for each in members]))

    async def check(self, calls: Sequence[tuple[str, list[Any]]]) -> None:
        """Compare each reply with that of the last node. Calls that the node itself refuses are left out."""
        for method, params in calls:
            expected = await self.nodes[-1].reply(method, params)
            if "result" in expected:
                assert await self.result(method, params) == expected["result"], (method, params)


@asynccontextmanager
async def real_harness(
    nodes: Sequence[RealNode], *, network: str = DEV, ws: int = 0, **sections: Any
) -> AsyncIterator[RealHarness]:
    """These nodes at the end of BASE, and a worker that has polled them. The first `ws` are also upstreams by WebSocket."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(node_session())
        for node in nodes:
            node.session = session
            await node.follow(BASE)
        proxies = [await stack.enter_async_context(fault_proxy(node.port)) for node in nodes]
        urls = [each.url for each in proxies] + [node.url.replace("http", "ws") for node in nodes[:ws]]
        running = await stack.enter_async_context(running_worker({network: urls}, **sections))
        harness = RealHarness(running, network, nodes, proxies)
        await harness.look()
        yield harness


@contextmanager
def real_nodes(kind: str, count: int, directory: Path, *geth_options: str) -> Iterator[list[RealNode]]:
    with hardhat_nodes(count) if kind == "hardhat" else geth_nodes(count, directory, *geth_options) as nodes:
        yield nodes
