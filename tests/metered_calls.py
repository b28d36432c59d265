"""A worker whose upstreams are providers that meter their calls, and a mixed load for it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.metering_upstream import MeteringUpstream, billing_by
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.service import until

ADDRESS = "0x" + "22" * 20


class MeteredHarness:
    """A worker whose upstreams are providers that meter their calls."""

    def __init__(self, harness: RpcHarness) -> None:
        self.rpc = harness
        self.stubs = [each for each in harness.upstreams if isinstance(each, MeteringUpstream)]

    @property
    def counted(self) -> list[int]:
        """The credits that were counted, by upstream."""
        return [each.total.credits for each in self.rpc.worker.app.networks.meters()]

    @property
    def billed(self) -> list[int]:
        """The credits that the providers bill."""
        return [each.billed for each in self.stubs]

    @property
    def is_idle(self) -> bool:
        return not any(each.health.inflight for each in self.rpc.route.upstreams)

    async def agrees(self) -> None:
        """Replies that came too late may still be under way: then no more is counted, and the sums must be equal."""
        await until(lambda: self.is_idle)
        await until(lambda: self.counted == self.billed)

    @property
    def spent(self) -> dict[tuple[str, str, str], int]:
        """The credits by method, account and key."""
        found: dict[tuple[str, str, str], int] = {}
        for meter in self.rpc.worker.app.networks.meters():
            for spender, spent in meter.counts.items():
                found[spender] = found.get(spender, 0) + spent.credits
        return {spender: credits_ for spender, credits_ in found.items() if credits_}


@asynccontextmanager
async def metered(
    *providers: str, candidate: dict[str, Any] | None = None, **sections: Any
) -> AsyncIterator[MeteredHarness]:
    """`candidate`: more settings of the last provider."""
    given = [{"cost": name} for name in providers]
    given[-1] |= candidate or {}
    async with rpc_harness(len(providers), kind=billing_by(*providers), options=given, **sections) as harness:
        yield MeteredHarness(harness)


async def one_of(harness: RpcHarness, draw: random.Random) -> None:
    """One call of a mixed load."""
    number = draw.randrange(1 << 40)
    match draw.randrange(10):
        case 0:
            old = hex(harness.chain.head - 500)
            await harness.call("eth_getBalance", [f"0x{number:040x}", old])
        case 1:
            first = harness.chain.head - (90 if number % 3 else 500)
            await harness.call("eth_getLogs", [{"fromBlock": hex(first), "toBlock": hex(first + number % 90)}])
        case 2:
            calls = [("eth_getBalance", [f"0x{number + n:040x}", "latest"]) for n in range(1 + number % 7)]
            await harness.batch(*calls)
        case 3:
            await harness.call("eth_getBalance", [f"0x{number:040x}", "latest"], X_Verify="quorum 2/3")
        case 4:
            await harness.call("eth_sendRawTransaction", [f"0x{number:x}".ljust(22, "0")])
        case 5:
            await harness.look()
        case 6:
            await harness.call("eth_call", [{"to": ADDRESS}, "latest"])  # Often answered by the cache.
        case 7:
            await harness.call("debug_traceCall", [{"to": ADDRESS, "data": hex(number)}, "latest", {}])
        case _:
            await harness.call("eth_call", [{"to": ADDRESS, "data": hex(number)}, "latest"])


@asynccontextmanager
async def mixed_calls(count: int) -> AsyncIterator[MeteredHarness]:
    """The harness after so many calls: retries after errors and refusals, hedges of late calls, quorums, batches, split logs,
    polls. The credits that were counted equal those that were billed."""
    async with metered("alchemy", "infura", "chainstack", rpc={"logs_chunk_blocks": 20}) as harness:
        for stub in harness.stubs:
            stub.refuses, stub.fails, stub.lacks, stub.is_late = 0.002, 0.03, 0.02, 0.03
        harness.stubs[0].max_range, harness.stubs[1].batch = 30, 3
        draw = random.Random(38)

        async def load(calls: int) -> None:
            for _ in range(calls):
                await one_of(harness.rpc, draw)
                harness.rpc.chain.head += draw.random() < 0.02

        async with asyncio.TaskGroup() as group:
            for _ in range(16):
                group.create_task(load(count // 16))
        await harness.agrees()
        yield harness
