"""Poll whether the network's upstreams are syncing and publish changes in geth's format."""

from __future__ import annotations

import asyncio

from proxy.services.feed.blocks import BlockSource, BlockUnavailable
from proxy.services.feed.demand import Demand
from proxy.services.feed.topics import FeedEvent, Listener

# The state changes rarely and slowly.
POLL_S = 15.0


class SyncingStatus:
    def __init__(self, blocks: BlockSource, poll_s: float = POLL_S) -> None:
        self._blocks = blocks
        self._poll_s = poll_s
        self._listeners: dict[Listener, None] = {}
        self._state: bytes | None = None
        self._demand = Demand(lambda: bool(self._listeners))

    def __repr__(self) -> str:
        return f"<SyncingStatus {self._state!r}, {len(self._listeners)} listeners>"

    def add(self, listener: Listener) -> None:
        self._listeners[listener] = None
        self._demand.changed()

    def remove(self, listener: Listener) -> None:
        self._listeners.pop(listener, None)
        self._demand.changed()

    async def run(self) -> None:
        """Supervised loop."""
        await self._demand.run(self._watch, self._reset)

    async def _watch(self) -> None:
        while True:
            try:
                self._update(await self._blocks.call("eth_syncing", b"[]"))
            except BlockUnavailable:
                pass
            await asyncio.sleep(self._poll_s)

    def _update(self, state: bytes) -> None:
        before, self._state = self._state, state
        # Progress is not a change, and the first state is not one either.
        if before is None or (before == b"false") == (state == b"false"):
            return
        event = FeedEvent(state if state == b"false" else b'{"syncing":true,"status":%b}' % state)
        for listener in tuple(self._listeners):
            listener.on_events([event])

    def _reset(self) -> None:
        self._state = None
