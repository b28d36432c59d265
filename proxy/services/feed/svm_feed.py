"""The feed of an svm network: notices of an upstream's socket, passed on to all who asked for the same.

One subscription at the upstream for each topic, however many listen. When the upstream dies, all are made again at the next
one. A slot that was told is not told again by an upstream that is behind. A `signatureSubscribe` ends with its notice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from proxy.core import jsonrpc
from proxy.errors import Unavailable
from proxy.services.feed.demand import Demand
from proxy.services.feed.head_watcher import SourceFailed
from proxy.services.feed.sources import FeedSource, FeedSources
from proxy.services.feed.topics import MOST_TOPICS, FeedEvent, Listener, Topic, refusal
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.networks import Route
from proxy.wire.upstream_stream import StreamLost, SubscriptionRefused, UpstreamStream
from proxy.wire.websocket_upstream import WebSocketUpstream

log = logging.getLogger("penstock.feed")

# The four subscriptions that are served, and how each is ended.
ENDS = {
    "slotSubscribe": "slotUnsubscribe",
    "accountSubscribe": "accountUnsubscribe",
    "logsSubscribe": "logsUnsubscribe",
    "signatureSubscribe": "signatureUnsubscribe",
}
READY_S = 10.0
# How often it is looked whether a better source is there.
LOOK_S = 1.0
# A network's slots come several times a second: a stream that is silent for this long while somebody listens to them is dead.
SILENT_S = 10.0
# Subscriptions that are made or ended at a time: after a change of sources there may be thousands.
AT_ONCE = 32
# Two minutes of slots: no source is so far behind. The network was started anew.
RESET_SLOTS = 300


class _Context(msgspec.Struct, gc=False):
    slot: int = 0


class _Notice(msgspec.Struct, gc=False):
    """Where the slot stands: in a context, or at the top."""

    context: _Context | None = None
    slot: int = 0
    value: msgspec.Raw = msgspec.Raw()


_notice = msgspec.json.Decoder(_Notice).decode


@dataclass(slots=True, eq=False)
class SvmChannel:
    """One topic. `subscription` is the upstream's id while there is one; `refused` its error where it wants none."""

    topic: Topic
    listeners: dict[Listener, None] = field(default_factory=dict)
    subscription: bytes = b""
    refused: bytes = b""
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def params(self) -> bytes:
        return self.topic.detail if isinstance(self.topic.detail, bytes) else jsonrpc.NO_PARAMS


class SvmFeed:
    def __init__(self, route: Route, clock: Callable[[], float] = time.monotonic) -> None:
        self._route = route
        self._clock = clock
        self._sources = FeedSources(route, subscribes="slotSubscribe", asks=None)
        self._channels: dict[Topic, SvmChannel] = {}
        # Channels that the present stream has to make or end.
        self._todo: asyncio.Queue[SvmChannel] = asyncio.Queue()
        self._last_slot = 0
        self._heard_at = 0.0
        self._wanted = Demand(lambda: bool(self._channels))

    def __repr__(self) -> str:
        return f"<SvmFeed {self._route.network.id}, {len(self._channels)} topics>"

    # Listeners

    async def subscribe(self, topic: Topic, listener: Listener) -> None:
        self._check(topic)
        channel = self._channels.get(topic)
        if channel is None:
            channel = self._channels[topic] = SvmChannel(topic)
            self._todo.put_nowait(channel)
        channel.listeners[listener] = None
        self._wanted.changed()
        try:
            async with asyncio.timeout(READY_S):
                await channel.settled.wait()
        except TimeoutError:
            self.unsubscribe(topic, listener)
            raise Unavailable(f"no upstream of {self._route.network.id} confirms subscriptions at the moment") from None
        except asyncio.CancelledError:
            self.unsubscribe(topic, listener)
            raise
        if channel.refused:
            raise RpcError(channel.refused)

    async def subscribe_from(self, topic: Topic, listener: Listener, from_block: int) -> None:
        self.check_from(topic, from_block)

    def check_from(self, topic: Topic, from_block: int) -> None:
        raise refusal(f'member "fromBlock" has no meaning for {topic.kind[:40]}')

    def unsubscribe(self, topic: Topic, listener: Listener) -> None:
        channel = self._channels.get(topic)
        if channel is None or channel.listeners.pop(listener, self) is self or channel.listeners:
            return
        del self._channels[topic]
        self._todo.put_nowait(channel)
        self._wanted.changed()

    def _check(self, topic: Topic) -> None:
        if topic.kind not in ENDS:
            raise refusal(f"there is no subscription {topic.kind[:40]!r}", jsonrpc.METHOD_NOT_FOUND)
        if self._sources.are_none:
            words = f"{self._route.network.id} has no upstream with a WebSocket: {topic.kind} cannot be served"
            raise refusal(words, jsonrpc.METHOD_NOT_FOUND)
        if topic not in self._channels and len(self._channels) >= MOST_TOPICS:
            raise Unavailable("too many different subscriptions are open at the moment")

    # The upstream

    async def run(self) -> None:
        """A supervised loop."""
        await self._wanted.run(self._follow, self._forget)

    def _forget(self) -> None:
        self._last_slot = 0
        self._todo = asyncio.Queue()

    async def _follow(self) -> None:
        while True:
            now = self._clock()
            source = self._sources.best(now)
            if source is None:
                await asyncio.sleep(max(0.0, self._sources.next_rest_ends() - now))
                continue
            self._sources.begin(source, now)
            try:
                await self._listen(source)
            except SourceFailed as exc:
                self._sources.failed(source, self._clock())
                extra = {"network": self._route.network.id, "source": source.upstream.label, "reason": str(exc)}
                log.info("feed moves to another source", extra=extra)

    async def _listen(self, source: FeedSource) -> None:
        assert isinstance(source.upstream, WebSocketUpstream)
        lost = asyncio.Event()
        stream = source.upstream.stream(lambda: self._lose(lost))
        self._todo = asyncio.Queue()
        try:
            await stream.open()
            self._heard_at = self._clock()
            for channel in self._channels.values():
                channel.subscription = b""
                self._todo.put_nowait(channel)
            while not lost.is_set() and self._sources.is_best(source, self._clock()):
                await self._work(stream)
            if lost.is_set():
                raise SourceFailed("the connection was lost")
        except StreamLost as exc:
            raise SourceFailed(str(exc)) from exc
        finally:
            await stream.close()

    def _lose(self, lost: asyncio.Event) -> None:
        lost.set()
        self._todo.put_nowait(SvmChannel(Topic("")))  # Wakes whoever waits for something to do.

    async def _work(self, stream: UpstreamStream) -> None:
        """A few at a time, each of them once: what comes for one of them meanwhile has its turn when they are done."""
        try:
            async with asyncio.timeout(LOOK_S):
                some = {await self._todo.get(): None}
        except TimeoutError:
            self._check_silence()
            return
        while len(some) < AT_ONCE and not self._todo.empty():
            some[self._todo.get_nowait()] = None
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._settle(stream, channel)) for channel in some]
        if lost := next(filter(None, (task.result() for task in tasks)), None):
            raise lost

    async def _settle(self, stream: UpstreamStream, channel: SvmChannel) -> StreamLost | None:
        """Make it or end it, whichever is wanted by now."""
        try:
            if self._channels.get(channel.topic) is channel:
                await self._begin(stream, channel)
            elif channel.subscription:
                await stream.unsubscribe(ENDS[channel.topic.kind], channel.subscription)
        except StreamLost as exc:
            return exc
        return None

    def _check_silence(self) -> None:
        listens_to_slots = any(topic.kind == "slotSubscribe" for topic in self._channels)
        if listens_to_slots and self._clock() - self._heard_at > SILENT_S:
            raise SourceFailed("it has fallen silent")

    async def _begin(self, stream: UpstreamStream, channel: SvmChannel) -> None:
        if channel.subscription:
            return
        try:
            channel.subscription = await stream.subscribe(
                channel.topic.kind, channel.params, lambda notice: self._hear(stream, channel, notice)
            )
        except SubscriptionRefused as exc:
            channel.refused = exc.error
            if self._channels.get(channel.topic) is channel:
                del self._channels[channel.topic]
        if self._channels.get(channel.topic) is not channel:
            stream.forget(channel.subscription)  # Its only notice may have come with the confirmation.
        channel.settled.set()

    def _hear(self, stream: UpstreamStream, channel: SvmChannel, result: bytes) -> None:
        self._heard_at = self._clock()
        try:
            notice = _notice(result)
        except jsonrpc.NOT_JSON:
            notice = _Notice()
        slot = notice.slot if notice.context is None else notice.context.slot
        if channel.topic.kind == "slotSubscribe":
            if self._last_slot - RESET_SLOTS < slot <= self._last_slot:
                return
            self._last_slot = slot
        # The other notice of a signature, that it was received, is not the last.
        last = channel.topic.kind == "signatureSubscribe" and bytes(notice.value) != b'"receivedSignature"'
        event = FeedEvent(result, slot, last)
        for listener in tuple(channel.listeners):
            listener.on_events([event])
        if last and self._channels.get(channel.topic) is channel:
            stream.forget(channel.subscription)
            del self._channels[channel.topic]
            self._wanted.changed()
