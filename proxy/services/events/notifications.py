"""Wake the loops of this service by Postgres notifications, each for its network."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from functools import partial
from weakref import WeakSet

from proxy.store.postgres.notices import Notices


class Notifications:
    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        # By channel and network. Weak: an event lives as long as the loop that waits for it.
        self._events: dict[str, defaultdict[str, WeakSet[asyncio.Event]]] = {}

    def __repr__(self) -> str:
        return f"<Notifications for {sorted(self._events)}>"

    def event_for(self, channel: str, network: str) -> asyncio.Event:
        """Return a new event that every notification of this channel and network sets. The caller clears it."""
        if channel not in self._events:
            self._events[channel] = defaultdict(WeakSet)
            self._notices.listen(channel, partial(self._set_events, self._events[channel]))
        event = asyncio.Event()
        self._events[channel][network].add(event)
        return event

    @staticmethod
    def _set_events(events: defaultdict[str, WeakSet[asyncio.Event]], network: str | None) -> None:
        for name in [*events] if network is None else [network]:
            for event in [*events.get(name, ())]:
                event.set()
