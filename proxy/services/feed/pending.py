"""Publish pending transactions as one upstream reports them, by hash or in full.

They come from a stream if an upstream has one, otherwise from polling a filter. Each upstream sees its own set of pending
transactions, so a change of sources has no gap to fill, but no transaction is published twice. If listeners want full
transactions and the upstream reports only hashes, the transactions are fetched: the accounts that listen take turns to pay for
one each. A transaction that no account has units for is left out.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from proxy.core import jsonrpc
from proxy.core.lru_cache import LruCache
from proxy.core.usage import Tally
from proxy.errors import Unavailable
from proxy.services.feed.blocks import BlockSource, BlockUnavailable
from proxy.services.feed.demand import Demand
from proxy.services.feed.listeners import Listeners
from proxy.services.feed.sources import FeedSource, FeedSources, SourceFailed
from proxy.services.feed.topics import FeedEvent, Listener
from proxy.services.rpc.networks import Route
from proxy.services.rpc.probe import Probe
from proxy.services.rpc.probing import result_of
from proxy.tasks import until_set
from proxy.wire.upstream_stream import StreamLost, SubscriptionRefused, UpstreamStream
from proxy.wire.websocket_upstream import WebSocketUpstream

POLL_S = 1.0
# How long a subscription waits for the first source.
READY_S = 10.0
# How often to check for a better source and for a change of demand.
CHECK_S = 0.25
# Hashes remembered so that no transaction is published twice.
REMEMBERED = 16_384
# Bounds memory: transactions that wait to be fetched. The oldest are dropped.
MAX_QUEUED = 2_048
CONCURRENT_FETCHES = 8

_HASHES, _FULL = b'["newPendingTransactions"]', b'["newPendingTransactions",true]'
_hashes = msgspec.json.Decoder(list[str]).decode


class _Transaction(msgspec.Struct, gc=False):
    hash: str


_transaction = msgspec.json.Decoder(_Transaction).decode
_text = msgspec.json.Decoder(str).decode


class PendingChannel:
    """The listeners of hashes or of full transactions, and the hashes published to them."""

    def __init__(self) -> None:
        self.listeners = Listeners()
        # Set while a source reports this kind.
        self.ready = asyncio.Event()
        self._sent: LruCache[str, None] = LruCache(REMEMBERED)

    def publish(self, tx_hash: str, result: bytes) -> None:
        if tx_hash in self._sent:
            return
        self._sent[tx_hash] = None
        event = FeedEvent(result)
        for listener in self.listeners:
            listener.on_events([event])


class PendingTransactions:
    def __init__(self, route: Route, blocks: BlockSource, clock: Callable[[], float] = time.monotonic) -> None:
        self._route = route
        self._clock = clock
        self._sources = FeedSources(
            route, subscribe_method="eth_subscribe", poll_method="eth_newPendingTransactionFilter"
        )
        # The channel of hashes (False) and that of full transactions (True).
        self._channels = {full: PendingChannel() for full in (False, True)}
        self._paid_blocks = blocks.paid_by(self)
        self._waiting = 0
        self._unfetched: deque[str] = deque(maxlen=MAX_QUEUED)
        self._wake = asyncio.Event()
        self._demand = Demand(lambda: bool(self._kinds() or self._waiting))

    def __repr__(self) -> str:
        listeners = sum(len(each.listeners) for each in self._channels.values())
        return f"<PendingTransactions {self._route.network.id}, {listeners} listeners>"

    async def subscribe(self, listener: Listener, *, full: bool) -> None:
        """Add a listener. Raises Unavailable if no upstream reports pending transactions."""
        self._waiting += 1
        self._channels[full].listeners.add(listener)
        self._demand.changed()
        try:
            async with asyncio.timeout(READY_S):
                await self._channels[full].ready.wait()
        except BaseException as exc:
            self._channels[full].listeners.remove(listener)
            if not isinstance(exc, TimeoutError):
                raise
            message = f"no upstream of {self._route.network.id} reports pending transactions: try again later"
            raise Unavailable(message) from None
        finally:
            self._waiting -= 1
            self._demand.changed()

    def remove(self, listener: Listener, *, full: bool) -> None:
        self._channels[full].listeners.remove(listener)
        self._demand.changed()

    async def pay(self, units: int, tally: Tally) -> str:
        """Charge a call for a full transaction to one of the accounts that listen to them."""
        account = self._channels[True].listeners.charge(units, tally)
        if account is None:
            raise BlockUnavailable("no account has the units")
        return account

    def _kinds(self) -> frozenset[bool]:
        return frozenset(full for full, channel in self._channels.items() if channel.listeners)

    # Sources

    async def run(self) -> None:
        """Supervised loop."""
        await self._demand.run(self._follow, lambda: self._set_ready(frozenset()))

    def _set_ready(self, kinds: frozenset[bool]) -> None:
        for full, channel in self._channels.items():
            (channel.ready.set if full in kinds else channel.ready.clear)()

    async def _follow(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENT_FETCHES):
                group.create_task(self._fetch_full())
            group.create_task(self._sources.follow(self._read, self._clock))

    async def _read(self, source: FeedSource) -> None:
        await (self._listen(source) if source.streams else self._poll(source))

    async def _listen(self, source: FeedSource) -> None:
        """Read the stream until it is lost, a better source is available, or another kind is in demand."""
        assert isinstance(source.upstream, WebSocketUpstream)
        lost = asyncio.Event()
        stream = source.upstream.stream(lost.set)
        kinds = self._kinds() or frozenset((False,))
        try:
            await stream.open()
            for full in kinds:
                await (
                    self._subscribe_full(stream) if full else stream.subscribe("eth_subscribe", _HASHES, self._on_hash)
                )
            self._set_ready(kinds)
            while self._kinds() <= kinds and not await self._sources.has_successor(source, self._clock):
                if await until_set(lost, within_s=CHECK_S):
                    raise SourceFailed("the connection was lost")
        except (StreamLost, SubscriptionRefused) as exc:
            raise SourceFailed(str(exc)) from exc
        finally:
            await stream.close()

    async def _subscribe_full(self, stream: UpstreamStream) -> None:
        try:
            await stream.subscribe("eth_subscribe", _FULL, self._on_full)
        except SubscriptionRefused:
            # Some upstreams refuse the flag but report hashes.
            await stream.subscribe("eth_subscribe", _HASHES, self._on_full)

    def _on_hash(self, notification: bytes) -> None:
        try:
            self._channels[False].publish(_text(notification), notification)
        except jsonrpc.NOT_JSON:
            pass

    def _on_full(self, notification: bytes) -> None:
        try:
            self._channels[True].publish(_transaction(notification).hash, notification)
        except jsonrpc.NOT_JSON:
            # Some upstreams ignore the flag and send hashes.
            self._fetch_later(_text_or_empty(notification))

    async def _poll(self, source: FeedSource) -> None:
        filter_id = await result_of(Probe(source.upstream, "eth_newPendingTransactionFilter"))
        if filter_id is None:
            raise SourceFailed("it did not create a filter")
        self._set_ready(frozenset((False, True)))
        while self._sources.is_best(source, self._clock()):
            changes = await result_of(Probe(source.upstream, "eth_getFilterChanges", b"[%b]" % filter_id))
            try:
                self._on_hashes(_hashes(changes or jsonrpc.NULL))
            except jsonrpc.NOT_JSON as exc:
                raise SourceFailed("its filter expired") from exc
            await asyncio.sleep(POLL_S)

    def _on_hashes(self, hashes: Iterable[str]) -> None:
        for tx_hash in filter(None, hashes):
            self._channels[False].publish(tx_hash, msgspec.json.encode(tx_hash))
            self._fetch_later(tx_hash)

    def _fetch_later(self, tx_hash: str) -> None:
        if tx_hash and self._channels[True].listeners:
            self._unfetched.append(tx_hash)
            self._wake.set()

    async def _fetch_full(self) -> None:
        while True:
            while not self._unfetched:
                self._wake.clear()
                await self._wake.wait()
            tx_hash = self._unfetched.popleft()
            try:
                transaction = await self._paid_blocks.call("eth_getTransactionByHash", msgspec.json.encode([tx_hash]))
            except BlockUnavailable:
                continue
            if transaction != jsonrpc.NULL:
                self._channels[True].publish(tx_hash, transaction)


def _text_or_empty(notification: bytes) -> str:
    try:
        return _text(notification)
    except jsonrpc.NOT_JSON:
        return ""
