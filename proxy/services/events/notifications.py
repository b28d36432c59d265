"""Notices from Postgres for the rooms of this service, each for its network."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from functools import partial
from weakref import WeakSet

from proxy.store.notices import Notices


class Notifications:
    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        # By channel and network, for as long as somebody has them.
        self._events: dict[str, defaultdict[str, WeakSet[asyncio.Event]]] = {}

    def __repr__(self) -> str:
        return f"<Notifications for {sorted(self._events)}>"

    def of(self, channel: str, network: str) -> asyncio.Event:
        """Set by every notice of this channel and network. The caller's own: one who clears it takes nothing from others."""
        if channel not in self._events:
            self._events[channel] = defaultdict(WeakSet)
            self._notices.listen(channel, partial(self._ring, self._events[channel]))
        event = asyncio.Event()
        self._events[channel][network].add(event)
        return event

    @staticmethod
    def _ring(events: defaultdict[str, WeakSet[asyncio.Event]], network: str | None) -> None:
        for name in [*events] if network is None else [network]:
            for event in [*events.get(name, ())]:
                event.set()
