"""The feed of an SVM network: it passes notifications from an upstream's WebSocket on to all listeners of the same topic.

There is one upstream subscription per topic, however many listeners it has. When the upstream fails, all subscriptions are
made again at the next one, and once more at the first as soon as it can be reached again. A slot is published once, even if
the next upstream is behind. A `signatureSubscribe` ends with its notification. Topics are polled (`svm_poller.py`) while no
upstream with a WebSocket is connected, and if the one that is does not have the method.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from proxy.core import jsonrpc, upstream_errors
from proxy.services.feed.account_queue import AccountQueue
from proxy.services.feed.channel import FeedChannel
from proxy.services.feed.demand import Demand
from proxy.services.feed.feed_terms import FeedTerms
from proxy.services.feed.sources import FeedSource, FeedSources, SourceFailed
from proxy.services.feed.svm_poller import POLLED, SvmPoller
from proxy.services.feed.topics import FeedEvent, Listener, Topic, refusal
from proxy.services.rpc.networks import Route
from proxy.wire.upstream_stream import StreamLost, SubscriptionRefused, UpstreamStream
from proxy.wire.websocket_upstream import WebSocketUpstream

# The supported subscriptions and the method that ends each.
UNSUBSCRIBE_METHODS = {
    f"{kind}Subscribe": f"{kind}Unsubscribe"
    for kind in ("account", "block", "logs", "program", "root", "signature", "slot", "slotsUpdates", "vote")
}
# How often to check for a better source.
CHECK_S = 1.0
# How long a stream may take to open before topics are polled.
PATIENCE_S = 1.0
# Slots come several times a second. A stream with a slot subscription that is silent for this long is dead.
SILENT_S = 10.0
# Subscriptions made or ended concurrently: after a change of sources there may be thousands.
CONCURRENCY = 32
# Two minutes of slots: no source is so far behind, so the network was restarted from an earlier slot.
RESET_SLOTS = 300


class _Context(msgspec.Struct, gc=False):
    slot: int = 0


class _Notification(msgspec.Struct, gc=False):
    """The slot is either in the context or at the top level."""

    context: _Context | None = None
    slot: int = 0
    value: msgspec.Raw = msgspec.Raw()


_notification = msgspec.json.Decoder(_Notification).decode


class SvmFeed:
    def __init__(self, route: Route, terms: FeedTerms, clock: Callable[[], float] = time.monotonic) -> None:
        self._route = route
        self._clock = clock
        self._sources = FeedSources(route, subscribe_method="slotSubscribe", poll_method=None)
        self._channels: dict[Topic, FeedChannel] = {}
        # Channels that have to be subscribed or unsubscribed on the current stream.
        self._todo: AccountQueue[FeedChannel] = AccountQueue()
        self._last_slot = 0
        self._notified_at = 0.0
        # Whether an upstream with a WebSocket is connected, since when none is, and whether upstreams can be polled.
        self._is_streaming = False
        self._unstreamed_at = 0.0
        self._can_poll = bool(route.upstreams)
        self._poller = SvmPoller(route, terms, self._polled, wants=self._is_polled, end=self._drop, clock=clock)
        self._demand = Demand(lambda: bool(self._channels))

    def __repr__(self) -> str:
        return f"<SvmFeed {self._route.network.id}, {len(self._channels)} topics>"

    # Listeners

    async def subscribe(self, topic: Topic, listener: Listener) -> None:
        self._check(topic)
        channel = self._channels.get(topic)
        if channel is None:
            channel = self._channels[topic] = FeedChannel(topic)
            self._todo.put(listener.account, channel)
        channel.listeners.add(listener)
        self._demand.changed()
        why_not = f"no upstream of {self._route.network.id} replies, or the account has no compute units for the calls"
        await channel.until_settled(lambda: self.unsubscribe(topic, listener), why_not)

    async def subscribe_from(self, topic: Topic, listener: Listener, from_block: int) -> None:
        self.check_from(topic, from_block)

    def check_from(self, topic: Topic, from_block: int) -> None:
        raise refusal(f'member "fromBlock" is not supported for {topic.kind[:40]}')

    def unsubscribe(self, topic: Topic, listener: Listener) -> None:
        channel = self._channels.get(topic)
        if channel is None or not channel.listeners.remove(listener) or channel.listeners:
            return
        self._drop(channel)
        self._todo.put(listener.account, channel)

    def _check(self, topic: Topic) -> None:
        if topic.kind not in UNSUBSCRIBE_METHODS:
            raise refusal(f"unknown subscription {topic.kind[:40]!r}", jsonrpc.METHOD_NOT_FOUND)
        if self._sources.is_empty and topic.kind not in POLLED:
            message = f"{topic.kind} is not available: {self._route.network.id} has no upstream with a WebSocket"
            raise refusal(message, jsonrpc.METHOD_NOT_FOUND)

    # The upstream

    async def run(self) -> None:
        """Supervised loop."""
        await self._demand.run(self._follow, self._reset)

    def _reset(self) -> None:
        self._last_slot = 0
        self._todo = AccountQueue()
        self._poller.forget()

    async def _follow(self) -> None:
        self._unstreamed_at = self._clock()
        async with asyncio.TaskGroup() as group:
            if self._can_poll:
                group.create_task(self._poller.run())
            if not self._sources.is_empty:
                group.create_task(self._sources.follow(self._listen, self._clock))

    # Polling

    def _polled(self) -> list[FeedChannel]:
        return [channel for channel in self._channels.values() if self._is_polled(channel)]

    def _is_polled(self, channel: FeedChannel) -> bool:
        if self._channels.get(channel.topic) is not channel or channel.topic.kind not in POLLED:
            return False
        if not self._can_poll or self._sources.is_empty or channel.is_polled:
            return self._can_poll
        return not self._is_streaming and self._clock() - self._unstreamed_at > PATIENCE_S

    def _drop(self, channel: FeedChannel) -> None:
        if self._channels.get(channel.topic) is channel:
            del self._channels[channel.topic]
            self._poller.release(channel)
            self._demand.changed()

    # Streaming

    async def _listen(self, source: FeedSource) -> None:
        assert isinstance(source.upstream, WebSocketUpstream)
        lost = asyncio.Event()
        stream = source.upstream.stream(lambda: self._lose(lost))
        self._todo = AccountQueue()
        try:
            await stream.open()
            self._start_streaming()
            while not lost.is_set() and not await self._sources.has_successor(source, self._clock):
                await self._work(stream)
            if lost.is_set():
                raise SourceFailed("the connection was lost")
        except StreamLost as exc:
            raise SourceFailed(str(exc)) from exc
        finally:
            self._is_streaming, self._unstreamed_at = False, self._clock()
            await stream.close()

    def _start_streaming(self) -> None:
        self._notified_at = self._clock()
        self._is_streaming = True
        self._poller.forget()
        for channel in self._channels.values():
            channel.subscription, channel.is_polled = b"", False
            self._todo.put(next(iter(channel.listeners.accounts), ""), channel)

    def _lose(self, lost: asyncio.Event) -> None:
        lost.set()
        self._todo.put("", FeedChannel(Topic("")))  # Wakes `_work`.

    async def _work(self, stream: UpstreamStream) -> None:
        """Update the next few channels, each once. A channel that is queued again meanwhile is handled in the next round."""
        try:
            async with asyncio.timeout(CHECK_S):
                some = {await self._todo.get(): None}
        except TimeoutError:
            self._check_silence()
            return
        while len(some) < CONCURRENCY and self._todo:
            some[self._todo.get_nowait()] = None
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._update(stream, channel)) for channel in some]
        if lost := next(filter(None, (task.result() for task in tasks)), None):
            raise lost

    async def _update(self, stream: UpstreamStream, channel: FeedChannel) -> StreamLost | None:
        """Subscribe a channel that has listeners, unsubscribe one that has none any more."""
        try:
            if self._channels.get(channel.topic) is channel:
                await self._subscribe(stream, channel)
            elif channel.subscription:
                await stream.unsubscribe(UNSUBSCRIBE_METHODS[channel.topic.kind], channel.subscription)
        except StreamLost as exc:
            return exc
        return None

    def _check_silence(self) -> None:
        has_slots = any(topic.kind == "slotSubscribe" for topic in self._channels)
        if has_slots and self._clock() - self._notified_at > SILENT_S:
            raise SourceFailed("it went silent")

    async def _subscribe(self, stream: UpstreamStream, channel: FeedChannel) -> None:
        if channel.subscription:
            return
        try:
            channel.subscription = await stream.subscribe(
                channel.topic.kind, channel.params, lambda result: self._on_notification(stream, channel, result)
            )
        except SubscriptionRefused as exc:
            verdict = upstream_errors.classify(exc.error)
            if verdict.lacks_method and self._can_poll and channel.topic.kind in POLLED:
                channel.is_polled = True  # The poller confirms it.
                return
            channel.refused = upstream_errors.translate(
                exc.error, verdict, in_our_codes=False, private=stream.private_words
            )
            self._drop(channel)
        if self._channels.get(channel.topic) is not channel:
            stream.forget(channel.subscription)  # Its only notification may have come with the confirmation.
        channel.settled.set()

    def _on_notification(self, stream: UpstreamStream, channel: FeedChannel, result: bytes) -> None:
        self._notified_at = self._clock()
        try:
            notification = _notification(result)
        except jsonrpc.NOT_JSON:
            notification = _Notification()
        slot = notification.slot if notification.context is None else notification.context.slot
        if channel.topic.kind == "slotSubscribe":
            if self._last_slot - RESET_SLOTS < slot <= self._last_slot:
                return
            self._last_slot = slot
        # A signature's "received" notification does not end the subscription.
        last = channel.topic.kind == "signatureSubscribe" and bytes(notification.value) != b'"receivedSignature"'
        channel.publish(FeedEvent(result, slot, last))
        if last and self._channels.get(channel.topic) is channel:
            stream.forget(channel.subscription)
            self._drop(channel)
