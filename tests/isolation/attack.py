"""One attacker beside one good client: the good client's traffic is steady, checked reply by reply, and must not notice.

The bounds are on failures, bytes and memory. Speed belongs to `bench/`: the only bound on time is one that a stalled worker
breaks and a busy machine does not.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from tests.rpc_scene import Load, Scene

# A reply that takes longer has waited for a worker that served someone else only.
STALL_S = 2.5


@asynccontextmanager
async def beside(attack: Callable[[], Awaitable[None]], *, at_once: int = 1) -> AsyncIterator[None]:
    """Run the attack again and again, over so many connections, until the block ends. The last round runs to its end."""
    ended = False

    async def repeat() -> None:
        while not ended:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await attack()
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(repeat())
        try:
            yield
        finally:
            ended = True


async def steady_load(scene: Scene, calls: int, *, at_once: int = 4) -> Load:
    """The good client's traffic; it fails where one call fails, is wrong or stalls."""
    load = await scene.load(calls, at_once=at_once)
    assert not load.failed, (load, load.failed[0].status, load.failed[0].body)
    assert not load.wrong, load
    assert max(load.took_s) < STALL_S, load
    return load
