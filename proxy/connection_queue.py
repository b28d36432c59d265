"""Shares the connections of a pool, or other places, between clients: accounts, or addresses of requests without one.

Each client has its own queue, and the queues are served in turn, so a flood of one client delays only itself. A client may hold
no more connections than are free: alone it gets half of them, and the next one always finds some, also if every statement of
the first is slow. The process itself is a client without these limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

from proxy.core.fair_permits import FairPermits
from proxy.core.round_robin import RoundRobin

# The process itself: loops that no request waits for.
OWN_WORK = ""


class TooManyWaiting(Exception):
    """The client has as many requests in the queue and in progress as it may."""


class ConnectionQueue:
    def __init__(self, size: int, *, per_client: int) -> None:
        self._per_client = per_client
        self._permits = FairPermits(size, per_client=sys.maxsize)
        self._waiting: RoundRobin[asyncio.Future[None]] = RoundRobin()

    def __repr__(self) -> str:
        return f"<ConnectionQueue {self._permits.free} free, {len(self._permits)} held, {len(self._waiting)} waiting>"

    @contextlib.asynccontextmanager
    async def turn(self, client: str, *, within_s: float | None = None) -> AsyncIterator[None]:
        """A connection for the length of a block. Raises like `enter`."""
        await self.enter(client, within_s=within_s)
        try:
            yield
        finally:
            self.leave(client)

    async def enter(self, client: str, *, within_s: float | None) -> None:
        """Wait for a turn. Raises TimeoutError if it does not come in time, TooManyWaiting at once. `within_s` None: the caller
        has its own deadline."""
        if (turn := self.request(client)) is None:
            return
        try:
            async with asyncio.timeout(within_s):
                await turn
        except BaseException:
            self._withdraw(client, turn)
            raise

    def leave(self, client: str) -> None:
        """Return a connection, and give turns to clients that wait."""
        self._permits.give_back(client)
        self._serve()

    def request(self, client: str) -> asyncio.Future[None] | None:
        """Take a connection and return None, or join the client's queue and return the future of its turn."""
        waiting = self._waiting.count_of(client)
        if client != OWN_WORK and self._permits.held_by(client) + waiting >= self._per_client:
            raise TooManyWaiting
        if not waiting and self._may_hold_one_more(client):
            self._permits.take_anyway(client)
            return None
        turn = asyncio.get_running_loop().create_future()
        self._waiting.add(client, turn)
        return turn

    def _withdraw(self, client: str, turn: asyncio.Future[None]) -> None:
        """Give up a turn, also one that came at the moment of the timeout."""
        if turn.done() and not turn.cancelled():
            self.leave(client)
            return
        self._waiting.discard(client, turn)

    def _may_hold_one_more(self, client: str) -> bool:
        return self._permits.free > 0 if client == OWN_WORK else self._permits.has_one_for(client)

    def _serve(self) -> None:
        while (client := next(filter(self._may_hold_one_more, self._waiting), None)) is not None:
            turn = self._waiting.pop(client)
            if turn.cancelled():  # It timed out, and its task runs next.
                continue
            self._permits.take_anyway(client)
            turn.set_result(None)
