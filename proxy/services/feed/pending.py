"""Transactions that wait for their block: as one upstream tells of them, by hash or whole.

From a stream where an upstream has one, else by polling a filter. Which transactions an upstream hears of, and when, is its
own affair, so there is nothing to fill in after a change of sources; but nobody is told of one twice. Where whole ones are
wanted and the upstream tells hashes, they are asked for.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

import msgspec

from proxy.core import jsonrpc
from proxy.errors import Unavailable
from proxy.services.feed.blocks import BlockSource, BlockUnavailable
from proxy.services.feed.demand import Demand
from proxy.services.feed.head_watcher import SourceFailed
from proxy.services.feed.sources import FeedSource, FeedSources
from proxy.services.feed.topics import FeedEvent, Listener
from proxy.services.rpc.networks import Route
from proxy.services.rpc.tracker import Probe
from proxy.tasks import until_set
from proxy.wire.upstream_stream import StreamLost, SubscriptionRefused, UpstreamStream
from proxy.wire.websocket_upstream import WebSocketUpstream

POLL_S = 1.0
# How long a subscription waits for the first source.
READY_S = 10.0
# How often it is looked whether something else is wanted, or a better source is there.
LOOK_S = 0.25
# Hashes that are remembered, so that none is told twice; and those that wait to be asked for: more are left out.
REMEMBERED = 16_384
MOST_WAITING = 2_048
AT_ONCE = 8

_HASHES, _WHOLE = b'["newPendingTransactions"]', b'["newPendingTransactions",true]'
_hashes = msgspec.json.Decoder(list[str]).decode


class _Named(msgspec.Struct, gc=False):
    hash: str


_named = msgspec.json.Decoder(_Named).decode
_text = msgspec.json.Decoder(str).decode


class PendingChannel:
    """Listeners of one of the two kinds, and what they were told."""

    def __init__(self, *, full: bool) -> None:
        self.full = full
        self.listeners: dict[Listener, None] = {}
        # Whether a source tells of this kind.
        self.ready = asyncio.Event()
        self._told: OrderedDict[str, None] = OrderedDict()

    def tell(self, name: str, result: bytes) -> None:
        if name in self._told:
            return
        self._told[name] = None
        if len(self._told) > REMEMBERED:
            self._told.popitem(last=False)
        event = FeedEvent(result)
        for listener in tuple(self.listeners):
            listener.on_events([event])


class PendingTransactions:
    def __init__(self, route: Route, blocks: BlockSource, clock: Callable[[], float] = time.monotonic) -> None:
        self._route = route
        self._blocks = blocks
        self._clock = clock
        self._sources = FeedSources(route, subscribes="eth_subscribe", asks="eth_newPendingTransactionFilter")
        self._channels = {full: PendingChannel(full=full) for full in (False, True)}
        self._waiting = 0
        self._asked: deque[str] = deque(maxlen=MOST_WAITING)
        self._wake = asyncio.Event()
        self._wanted = Demand(lambda: bool(self._kinds() or self._waiting))

    def __repr__(self) -> str:
        listeners = sum(len(each.listeners) for each in self._channels.values())
        return f"<PendingTransactions {self._route.network.id}, {listeners} listeners>"

    async def subscribe(self, listener: Listener, *, full: bool) -> None:
        """Unavailable where no upstream tells of any."""
        self._waiting += 1
        self._channels[full].listeners[listener] = None
        self._wanted.changed()
        try:
            async with asyncio.timeout(READY_S):
                await self._channels[full].ready.wait()
        except BaseException as exc:
            self._channels[full].listeners.pop(listener, None)
            if not isinstance(exc, TimeoutError):
                raise
            words = f"no upstream of {self._route.network.id} tells of pending transactions at the moment"
            raise Unavailable(words) from None
        finally:
            self._waiting -= 1
            self._wanted.changed()

    def remove(self, listener: Listener, *, full: bool) -> None:
        self._channels[full].listeners.pop(listener, None)
        self._wanted.changed()

    def _kinds(self) -> frozenset[bool]:
        return frozenset(full for full, channel in self._channels.items() if channel.listeners)

    # Sources

    async def run(self) -> None:
        """A supervised loop."""
        await self._wanted.run(self._follow, lambda: self._serve(frozenset()))

    def _serve(self, kinds: frozenset[bool]) -> None:
        for full, channel in self._channels.items():
            (channel.ready.set if full in kinds else channel.ready.clear)()

    async def _follow(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._ask_for_whole_ones())
            group.create_task(self._follow_sources())

    async def _follow_sources(self) -> None:
        while True:
            now = self._clock()
            source = self._sources.best(now)
            if source is None:
                await asyncio.sleep(max(0.0, self._sources.next_rest_ends() - now))
                continue
            self._sources.begin(source, now)
            try:
                await (self._listen(source) if source.streams else self._poll(source))
            except SourceFailed:
                self._sources.failed(source, self._clock())

    async def _listen(self, source: FeedSource) -> None:
        """Until the stream is lost, a better one is there, or another kind is wanted."""
        assert isinstance(source.upstream, WebSocketUpstream)
        lost = asyncio.Event()
        stream = source.upstream.stream(lost.set)
        kinds = self._kinds() or frozenset((False,))
        try:
            await stream.open()
            for full in kinds:
                await (self._begin_full(stream) if full else stream.subscribe("eth_subscribe", _HASHES, self._hear))
            self._serve(kinds)
            while self._kinds() <= kinds and self._sources.is_best(source, self._clock()):
                if await until_set(lost, within_s=LOOK_S):
                    raise SourceFailed("the connection was lost")
        except (StreamLost, SubscriptionRefused) as exc:
            raise SourceFailed(str(exc)) from exc
        finally:
            await stream.close()

    async def _begin_full(self, stream: UpstreamStream) -> None:
        try:
            await stream.subscribe("eth_subscribe", _WHOLE, self._hear_full)
        except SubscriptionRefused:
            # Some refuse the flag, and tell hashes all the same.
            await stream.subscribe("eth_subscribe", _HASHES, self._hear_full)

    def _hear(self, notice: bytes) -> None:
        try:
            self._channels[False].tell(_text(notice), notice)
        except jsonrpc.NOT_JSON:
            pass

    def _hear_full(self, notice: bytes) -> None:
        try:
            self._channels[True].tell(_named(notice).hash, notice)
        except jsonrpc.NOT_JSON:
            # An upstream that does not know the flag tells hashes.
            self._tell_hashes([_text_or_nothing(notice)], whole_only=True)

    async def _poll(self, source: FeedSource) -> None:
        made = await Probe(source.upstream, "eth_newPendingTransactionFilter").ask()
        if made is None:
            raise SourceFailed("it makes no filter")
        self._serve(frozenset((False, True)))
        while self._sources.is_best(source, self._clock()):
            changes = await Probe(source.upstream, "eth_getFilterChanges", b"[%b]" % made).ask()
            try:
                self._tell_hashes(_hashes(changes or jsonrpc.NULL))
            except jsonrpc.NOT_JSON as exc:
                raise SourceFailed("it has forgotten the filter") from exc
            await asyncio.sleep(POLL_S)

    def _tell_hashes(self, hashes: Iterable[str], *, whole_only: bool = False) -> None:
        for name in filter(None, hashes):
            if not whole_only:
                self._channels[False].tell(name, msgspec.json.encode(name))
            if self._channels[True].listeners:
                self._asked.append(name)
                self._wake.set()

    async def _ask_for_whole_ones(self) -> None:
        while True:
            while not self._asked:
                self._wake.clear()
                await self._wake.wait()
            name = self._asked.popleft()
            try:
                found = await self._blocks.ask("eth_getTransactionByHash", msgspec.json.encode([name]))
            except BlockUnavailable:
                continue
            if found != jsonrpc.NULL:
                self._channels[True].tell(name, found)


def _text_or_nothing(notice: bytes) -> str:
    try:
        return _text(notice)
    except jsonrpc.NOT_JSON:
        return ""
