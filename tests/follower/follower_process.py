"""A follower, or a back-fill, in a separate process, for tests that kill it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from proxy.chains.evm.facts import TOPICS, BlockFacts
from proxy.compose.background import Background
from proxy.errors import InvalidRequest
from proxy.services.follower.backfill import Backfill
from proxy.services.follower.block_reader import BlockReader
from proxy.services.rpc.traces import TraceReader
from proxy.settings import load, load_tables
from proxy.store.postgres.blocks import BlockId, BlockStore, Followed
from proxy.store.postgres.pool import DatabaseConnection


class KillSink:
    """The last sink. It kills the process after all other sinks have written and before the commit."""

    topics: frozenset[str] | None = frozenset()
    blocks = False
    transactions = False
    receipts = False

    def __init__(self, left: int) -> None:
        self._left = left

    async def write(self, connection: DatabaseConnection, network: Followed, facts: Sequence[BlockFacts]) -> None:
        self._count_down()

    async def undo(
        self, connection: DatabaseConnection, network: Followed, stays: BlockId, removed: Sequence[BlockId]
    ) -> None:
        self._count_down()

    async def settle(self, connection: DatabaseConnection, network: Followed, below: int) -> None: ...
    async def forget(self, connection: DatabaseConnection, network: Followed) -> None: ...

    def _count_down(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


async def follow(tree: dict[str, Any], kill_in: int, ready: Connection) -> None:
    running = Background(load(environ={}, overrides=tree), load_tables())
    running.blocks = BlockStore(running.pool, silent_s=3.0)
    if kill_in:
        running.sinks.append(KillSink(kill_in))
    await running.open()
    running.follow()
    ready.send(True)
    await asyncio.Event().wait()


def run(tree: dict[str, Any], kill_in: int, ready: Connection) -> None:
    """Follow with these settings, forever, or up to a SIGKILL inside the transaction with the number `kill_in`."""
    asyncio.run(follow(tree, kill_in, ready))


async def backfill(tree: dict[str, Any], ready: Connection) -> None:
    running = Background(load(environ={}, overrides=tree), load_tables())
    await running.open()
    (route,) = running.networks.routes.values()
    fill = Backfill(
        BlockReader(route, topics=TOPICS),
        TraceReader(route.network, running.internal_calls),
        running.blocks,
        None,
        categories=running.transfers(route).categories,
    )
    ready.send(True)
    while True:
        try:
            await fill.run(0, None, lambda progress: None)
        except InvalidRequest:
            # The session of a killed process may hold the lock for a moment.
            await asyncio.sleep(0.05)
        else:
            break
    await running.close()


def run_backfill(tree: dict[str, Any], kill_in: int, ready: Connection) -> None:
    """Add all older blocks. `kill_in` has no meaning here."""
    asyncio.run(backfill(tree, ready))


class FollowerProcess:
    """Such a process. All are forked from one that has imported this module: importing takes most of a second."""

    target = staticmethod(run)
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([__name__])

    def __init__(self, tree: dict[str, Any], kill_in: int = 0) -> None:
        self._is_ready, ready = self.forks.Pipe(duplex=False)
        self._process = self.forks.Process(target=self.target, args=(tree, kill_in, ready))
        self._process.start()
        ready.close()

    async def ready(self) -> None:
        await asyncio.to_thread(self._is_ready.recv)

    @property
    def code(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


class BackfillProcess(FollowerProcess):
    """A process that adds older blocks."""

    target = staticmethod(run_backfill)
