"""The feed of a network whose upstreams stream events by topics or queries: passes them on to all listeners of the same ones.

There is one upstream stream for each topic, however many listeners it has. When it is lost, or its upstream falls behind or
goes silent, another upstream is asked. It may repeat the last events, so events that were just sent are not sent again. Events
between the two streams are lost: nodes do not replay them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from proxy.core.credits import EVENT
from proxy.core.fair_permits import FairPermits
from proxy.errors import RateLimited
from proxy.services.feed.channel import FeedChannel
from proxy.services.feed.event_sources import EventSource, NextEvents, TopicRefused, event_source_of
from proxy.services.feed.feed_terms import FeedTerms
from proxy.services.feed.sources import FeedSource, FeedSources, SourceFailed
from proxy.services.feed.topics import FeedEvent, Listener, Topic, refusal
from proxy.services.rpc.networks import Route
from proxy.wire.upstream_stream import StreamLost

# Upstream streams of one network in a worker, in total and for one account: each topic takes one. CometBFT accepts 100.
MOST_STREAMS, MOST_OF_ACCOUNT = 64, 8
# How often to check whether the upstream is still good.
CHECK_S = 1.0
# A stream with an event for each block that is silent while this many blocks are made elsewhere is dead.
SILENT_BLOCKS = 3
# The last events, which another upstream may repeat, and for how many blocks it may.
REPEATED_EVENTS, REPEATED_BLOCKS = 64, 2


@dataclass(slots=True, eq=False)
class StreamChannel(FeedChannel):
    """`account`: holds the permit for the stream. `refused_by`: upstreams that refused the topic. `recent`: hashes of the last
    events. `repeats_until`: until then, events in `recent` are not sent again."""

    account: str = ""
    task: asyncio.Task[None] | None = None
    refused_by: set[str] = field(default_factory=set)
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=REPEATED_EVENTS))
    repeats_until: float = 0.0


class StreamFeed:
    def __init__(self, route: Route, terms: FeedTerms, clock: Callable[[], float] = time.monotonic) -> None:
        self._route = route
        self._source: EventSource = event_source_of(route.network)
        self._clock = clock
        self._channels: dict[Topic, StreamChannel] = {}
        self._new: asyncio.Queue[StreamChannel] = asyncio.Queue()
        self._permits = FairPermits(MOST_STREAMS, per_client=MOST_OF_ACCOUNT)

    def __repr__(self) -> str:
        return f"<StreamFeed {self._route.network.id}, {len(self._channels)} streams>"

    # Listeners

    async def subscribe(self, topic: Topic, listener: Listener) -> None:
        channel = self._channels.get(topic)
        if channel is None:
            channel = self._open(topic, listener.account)
        channel.listeners.add(listener)
        why_not = f"no upstream of {self._route.network.id} streams events"
        await channel.until_settled(lambda: self.unsubscribe(topic, listener), why_not)

    def _open(self, topic: Topic, account: str) -> StreamChannel:
        if not self._permits.take(account):
            message = "this account has too many streams with different topics: use the same topics in several of them"
            raise RateLimited(message, retry_after_s=5)
        channel = self._channels[topic] = StreamChannel(topic, account=account)
        self._new.put_nowait(channel)
        return channel

    async def subscribe_from(self, topic: Topic, listener: Listener, from_block: int) -> None:
        self.check_from(topic, from_block)

    def check_from(self, topic: Topic, from_block: int) -> None:
        raise refusal("these events cannot start from an old block")

    def unsubscribe(self, topic: Topic, listener: Listener) -> None:
        channel = self._channels.get(topic)
        if channel is not None and channel.listeners.remove(listener) and not channel.listeners:
            self._close(channel)

    def _close(self, channel: StreamChannel) -> None:
        if self._channels.get(channel.topic) is channel:
            del self._channels[channel.topic]
            self._permits.give_back(channel.account)
            if channel.task is not None:
                channel.task.cancel()

    # Upstreams

    async def run(self) -> None:
        """Supervised loop."""
        async with asyncio.TaskGroup() as group:
            for channel in self._channels.values():
                channel.task = group.create_task(self._follow(channel))
            while True:
                channel = await self._new.get()
                if self._channels.get(channel.topic) is channel and channel.task is None:
                    channel.task = group.create_task(self._follow(channel))

    async def _follow(self, channel: StreamChannel) -> None:
        kind = self._source
        sources = FeedSources(self._route, subscribe_method=kind.method, poll_method=None, streaming=kind.upstream_type)
        await sources.follow(partial(self._listen, channel, sources), self._clock)

    async def _listen(self, channel: StreamChannel, sources: FeedSources, source: FeedSource) -> None:
        try:
            async with self._source.open(source.upstream, channel.topic) as next_events:
                self._start(channel)
                await self._read(channel, sources, source, next_events)
        except TopicRefused as exc:
            self._refused(channel, source, exc, len(sources))
            raise SourceFailed("it refused the stream") from None
        except StreamLost as exc:
            raise SourceFailed(str(exc)) from None

    def _start(self, channel: StreamChannel) -> None:
        channel.refused_by.clear()
        if channel.settled.is_set():
            channel.repeats_until = self._clock() + REPEATED_BLOCKS * self._route.network.facts.block_time_s
            if self._source.resumed:
                channel.publish(FeedEvent(self._source.resumed))
        channel.settled.set()

    async def _read(
        self, channel: StreamChannel, sources: FeedSources, source: FeedSource, next_events: NextEvents
    ) -> None:
        heads, has_blocks = self._route.heads, self._source.has_blocks(channel.topic)
        tip = heads.tip
        while True:
            try:
                async with asyncio.timeout(CHECK_S):
                    events = await next_events()
            except TimeoutError:
                events = []
            self._check(sources, source)
            if events:
                tip = heads.tip
            elif has_blocks and heads.tip > tip + SILENT_BLOCKS:
                raise SourceFailed("it went silent")
            for event in events:
                self._publish(channel, source, event)

    def _check(self, sources: FeedSources, source: FeedSource) -> None:
        if source.upstream.health.standing != "good":
            raise SourceFailed("it is of another chain or branch")
        if sources.has_better(source, self._clock()):
            raise SourceFailed("it is behind, or does not reply")

    def _publish(self, channel: StreamChannel, source: FeedSource, event: bytes) -> None:
        if source.upstream.health.meter is not None:
            source.upstream.health.meter.began((EVENT, "", ""))
        if self._clock() < channel.repeats_until and hash(event) in channel.recent:
            return
        channel.recent.append(hash(event))
        channel.publish(FeedEvent(event))

    def _refused(self, channel: StreamChannel, source: FeedSource, why: TopicRefused, count: int) -> None:
        """End a channel whose topic every upstream has refused. An old one may not know it, and others do."""
        channel.refused_by.add(source.upstream.label)
        if len(channel.refused_by) >= count and not channel.settled.is_set():
            channel.refused = why.error
            channel.settled.set()
            self._close(channel)
