"""A follower in a separate process, for tests that kill it. The first argument is its settings as JSON.

With a number n as second argument it kills itself by SIGKILL inside its n-th transaction.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

import orjson

from proxy.chains.evm.facts import BlockFacts
from proxy.compose.background import Background
from proxy.settings import load, load_tables
from proxy.store.blocks import BlockMark, BlockStore, Followed
from proxy.store.pool import DatabaseConnection


class KillSink:
    """The last sink. It kills the process after all other sinks have written and before the commit."""

    topics: frozenset[str] | None = frozenset()
    blocks = False
    transactions = False

    def __init__(self, left: int) -> None:
        self._left = left

    async def write(self, connection: DatabaseConnection, network: Followed, found: Sequence[BlockFacts]) -> None:
        self._count_down()

    async def undo(
        self, connection: DatabaseConnection, network: Followed, stays: BlockMark, removed: Sequence[BlockMark]
    ) -> None:
        self._count_down()

    async def settle(self, connection: DatabaseConnection, network: Followed, below: int) -> None: ...
    async def forget(self, connection: DatabaseConnection, network: Followed) -> None: ...

    def _count_down(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


async def main(tree: dict[str, object], kill_in: int) -> None:
    running = Background(load(environ={}, overrides=tree), load_tables())
    running.blocks = BlockStore(running.pool, silent_s=3.0)
    if kill_in:
        running.sinks.append(KillSink(kill_in))
    await running.open()
    running.follow()
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(orjson.loads(sys.argv[1]), int(sys.argv[2])))
