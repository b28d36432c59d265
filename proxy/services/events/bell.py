"""Notices from Postgres for the rooms of this service, over one connection of a process.

A notice that is lost costs time, nothing else: whoever waits for one looks by itself now and then.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any
from weakref import WeakSet

from proxy.errors import Unavailable
from proxy.store.pool import AWAY, Pool, translated

ALIVE_S = 5.0
RETRY_S = 1.0


class Bell:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        # By channel and network, for as long as somebody has them.
        self._events: defaultdict[str, defaultdict[str, WeakSet[asyncio.Event]]] = defaultdict(
            lambda: defaultdict(WeakSet)
        )

    def __repr__(self) -> str:
        return f"<Bell for {sorted(self._events)}>"

    def of(self, channel: str, network: str) -> asyncio.Event:
        """Set by every notice of this channel and network. The caller's own: one who clears it takes nothing from others. To be
        asked for before `run`."""
        event = asyncio.Event()
        self._events[channel][network].add(event)
        return event

    async def run(self) -> None:
        """A supervised loop."""
        while True:
            try:
                await self._listen()
            except (Unavailable, *AWAY):
                await asyncio.sleep(RETRY_S)

    async def _listen(self) -> None:
        connection = await self._pool.dedicated()
        try:
            for channel in self._events:
                await connection.add_listener(channel, self._hear)
            # Whatever was said while nobody listened.
            for channel, networks in self._events.items():
                for network in networks:
                    self._ring(channel, network)
            while True:
                await asyncio.sleep(ALIVE_S)
                with translated():
                    await connection.execute("select 1", timeout=ALIVE_S)
        finally:
            connection.terminate()

    def _hear(self, _: Any, __: int, channel: str, network: object) -> None:
        self._ring(channel, str(network))

    def _ring(self, channel: str, network: str) -> None:
        for event in [*self._events[channel].get(network, ())]:
            event.set()


async def heard(event: asyncio.Event, within_s: float) -> None:
    """When it rings, or after so long."""
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        return
