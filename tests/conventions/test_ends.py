"""How processes end, also where something in them does not want to."""

import asyncio
import signal
import sys

from proxy.tasks import Tasks

STUCK = """
import asyncio
from types import SimpleNamespace
from proxy.processes import worker

worker.STOP_GRACE_S = 0.1

async def main():
    stop = worker.watch_supervisor(SimpleNamespace(server=SimpleNamespace(drain_s=0.1)))
    await stop.wait()
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_loop_that_loses_a_cancellation_is_cancelled_again() -> None:
    lost = 0

    async def deaf() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if lost:
                    raise
                lost += 1

    tasks = Tasks()
    tasks.start("deaf", deaf)
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await tasks.close()
    assert lost == 1


async def test_process_whose_supervisor_is_gone_ends_even_if_it_hangs() -> None:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", STUCK, stdin=pipe)
    assert process.stdin is not None
    process.stdin.close()
    async with asyncio.timeout(20):
        assert await process.wait() == -signal.SIGALRM
