"""One topic of an SVM network's feed, with its listeners."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from proxy.core import jsonrpc
from proxy.services.feed.listeners import Listeners
from proxy.services.feed.topics import FeedEvent, Topic


@dataclass(slots=True, eq=False, weakref_slot=True)
class SvmChannel:
    """`subscription` is the upstream's id while subscribed, `refused` the upstream's error if it refused. `is_polled`: no
    upstream streams this topic."""

    topic: Topic
    listeners: Listeners = field(default_factory=Listeners)
    subscription: bytes = b""
    refused: bytes = b""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    is_polled: bool = False

    @property
    def params(self) -> bytes:
        return self.topic.detail if isinstance(self.topic.detail, bytes) else jsonrpc.NO_PARAMS

    def publish(self, event: FeedEvent) -> None:
        for listener in self.listeners:
            listener.on_events([event])
