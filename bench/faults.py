"""Failing upstreams: the slowest calls of a load while one of three upstreams fails, in this process."""

import asyncio
import logging
from dataclasses import dataclass

import uvloop

from tests.faults import Mode
from tests.rpc_harness import Load, rpc_harness
from tests.service import until

MODES: tuple[Mode, ...] = ("dead", "black_hole", "slow", "reset", "garbage", "half", "high_head", "low_head")
# The second load starts with healthy upstreams; the first of them fails after a twentieth of it.
HEALTHY_CALLS, FAULTY_CALLS = 1_000, 2_000


@dataclass(frozen=True, slots=True)
class Tail:
    """p99 in milliseconds: with healthy upstreams, and with the failure that made calls slowest compared to that."""

    healthy: float
    failing: float
    mode: Mode


def slowest(rounds: int) -> list[Tail]:
    """For each round, the failure with the largest p99."""
    # The worker has no database and would print a warning whenever it cannot store usage.
    logging.getLogger("proxy").addHandler(logging.NullHandler())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return [max((runner.run(_tail(mode)) for mode in MODES), key=lambda tail: tail.failing) for _ in range(rounds)]


async def _tail(mode: Mode) -> Tail:
    async with rpc_harness(3, faults=True) as harness:
        healthy = await harness.load(HEALTHY_CALLS)
        proxy = harness.proxies[0]
        before = proxy.methods["eth_call"]
        async with asyncio.TaskGroup() as group:
            loading = group.create_task(harness.load(FAULTY_CALLS))
            await until(lambda: proxy.methods["eth_call"] - before > FAULTY_CALLS // 60, every_s=0.001)
            await proxy.switch(mode)
            await harness.look()
        failing = loading.result()
    for load in (healthy, failing):
        _check(load, mode)
    return Tail(healthy.quantile_s(0.99) * 1000, failing.quantile_s(0.99) * 1000, mode)


def _check(load: Load, mode: Mode) -> None:
    assert not load.failed, f"{mode}: {load}"
    assert not load.wrong, f"{mode}: {load}"
