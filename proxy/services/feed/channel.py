"""One topic of a feed that passes on what an upstream streams, with its listeners."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from proxy.core import jsonrpc
from proxy.errors import Unavailable
from proxy.services.feed.listeners import Listeners
from proxy.services.feed.topics import FeedEvent, Topic
from proxy.services.rpc.calls import RpcError

# How long a subscription waits for an upstream to confirm it.
READY_S = 10.0


@dataclass(slots=True, eq=False, weakref_slot=True)
class FeedChannel:
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

    async def until_settled(self, leave: Callable[[], None], why_not: str) -> None:
        """Return when an upstream has confirmed the topic. Raises RpcError if it has refused, and Unavailable with `why_not` if
        none replies in time. `leave` removes a listener that was not confirmed."""
        try:
            async with asyncio.timeout(READY_S):
                await self.settled.wait()
        except TimeoutError:
            leave()
            raise Unavailable(f"the subscription was not confirmed in time: {why_not}; try again later") from None
        except asyncio.CancelledError:
            leave()
            raise
        if self.refused:
            raise RpcError(self.refused)
