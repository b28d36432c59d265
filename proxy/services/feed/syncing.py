"""Whether the network's upstreams are syncing: asked now and then, told when it changes, in geth's words."""

from __future__ import annotations

import asyncio

from proxy.services.feed.blocks import BlockSource, BlockUnavailable
from proxy.services.feed.demand import Demand
from proxy.services.feed.topics import FeedEvent, Listener

# Rarely true and slow to change.
EVERY_S = 15.0


class SyncingStatus:
    def __init__(self, blocks: BlockSource, every_s: float = EVERY_S) -> None:
        self._blocks = blocks
        self._every_s = every_s
        self._listeners: dict[Listener, None] = {}
        self._state: bytes | None = None
        self._wanted = Demand(lambda: bool(self._listeners))

    def __repr__(self) -> str:
        return f"<SyncingStatus {self._state!r}, {len(self._listeners)} listeners>"

    def add(self, listener: Listener) -> None:
        self._listeners[listener] = None
        self._wanted.changed()

    def remove(self, listener: Listener) -> None:
        self._listeners.pop(listener, None)
        self._wanted.changed()

    async def run(self) -> None:
        """A supervised loop."""
        await self._wanted.run(self._watch, self._forget)

    async def _watch(self) -> None:
        while True:
            try:
                self._see(await self._blocks.ask("eth_syncing", b"[]"))
            except BlockUnavailable:
                pass
            await asyncio.sleep(self._every_s)

    def _see(self, state: bytes) -> None:
        before, self._state = self._state, state
        # Progress is not a change; and the first state is no news.
        if before is None or (before == b"false") == (state == b"false"):
            return
        event = FeedEvent(state if state == b"false" else b'{"syncing":true,"status":%b}' % state)
        for listener in tuple(self._listeners):
            listener.on_events([event])

    def _forget(self) -> None:
        self._state = None
