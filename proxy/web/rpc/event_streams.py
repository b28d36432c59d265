"""Streams of server-sent events to clients, for routes that stream them.

A stream counts as a socket of its account: it is limited, pinged, drained and closed with its key like a WebSocket. Its events
wait in a queue that is bounded and counted. A client that does not read is cut off, and a key without units misses events.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial

from aiohttp import web

from proxy.chains.registry import Network
from proxy.core.access import Key
from proxy.core.event_stream import EVENT_STREAM, comment
from proxy.core.jsonrpc import RawCall
from proxy.core.rest_routes import read_error
from proxy.core.usage import Tally
from proxy.errors import Fault, InvalidRequest, Unavailable
from proxy.services.feed.topics import FeedEvent, NetworkFeed, Topic
from proxy.services.rpc.calls import PendingReply, RpcError
from proxy.services.rpc.flights import Caller
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.networks import Route
from proxy.web.api_middleware import ApiMiddleware
from proxy.web.front.handler_connection import HandlerConnection
from proxy.web.rpc.single_call import SingleCalls
from proxy.web.websocket.client_sockets import ClientSockets
from proxy.web.websocket.unit_allowance import UnitAllowance

KIND = "streamed"
_HEADERS = {"Content-Type": EVENT_STREAM, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_PING = comment("")


class EventStreams:
    def __init__(self, api: ApiMiddleware, calls: SingleCalls, sockets: ClientSockets) -> None:
        self._api = api
        self._calls = calls
        self._sockets = sockets

    def __repr__(self) -> str:
        return f"<EventStreams of {self._sockets!r}>"

    async def serve(
        self, request: web.Request, route: Route, key: Key, call: RawCall, topic: Topic
    ) -> web.StreamResponse:
        """Stream the events of a topic until the client leaves."""
        sockets = self._sockets
        await sockets.admit(key)
        client = EventClient(sockets, route.network, key, topic)
        sockets.add(client)
        try:
            finish = partial(self._finish, request, client)
            return await self._calls.serve(request, (route, key, call), PendingReply(), finish, client)
        finally:
            client.end()
            sockets.remove(client)

    async def _finish(self, request: web.Request, client: EventClient, result: bytes | RpcError) -> web.StreamResponse:
        if isinstance(result, RpcError):
            return self._api.refuse(InvalidRequest(read_error(result.error).message))
        reply = web.StreamResponse(headers=_HEADERS)
        self._api.add_common_headers(request, reply)
        reply.force_close()  # The end of the stream is the end of the connection: clients connect again.
        connection = request.protocol
        if isinstance(connection, HandlerConnection):
            connection.on_lost = client.end
        if request.transport is not None:
            client.begin(request.transport)
        try:
            await reply.prepare(request)
            while data := await client.next_bytes():
                await reply.write(data)
            await reply.write_eof()
        except ConnectionError:
            pass  # The client has left.
        finally:
            if isinstance(connection, HandlerConnection):
                connection.on_lost = None
        return reply


class EventClient:
    """One stream of a client: a listener of the feed."""

    def __init__(self, sockets: ClientSockets, network: Network, key: Key, topic: Topic) -> None:
        context = sockets.context
        self.key = key
        self.network = network
        self.is_open = True
        self._topic = topic
        # Set once the stream has begun.
        self._transport: asyncio.Transport | None = None
        self._context = context
        self._allowance: UnitAllowance = sockets.allowance_of(key)
        self._kind = context.kinds[KIND]
        self._tally: Tally = self._kind.tally_of(network.id)
        self._queue: deque[bytes] = deque()
        # The bytes of the queue, and of what was taken from it and is not written yet.
        self._bytes = 0
        self._being_written = 0
        # Events that were not sent because the key has no units.
        self._missed = 0
        self._woken = asyncio.Event()
        self._kind.open += 1

    def __repr__(self) -> str:
        return f"<EventClient {self.network.id}, {self._bytes} bytes{'' if self.is_open else ', closed'}>"

    # Called by the RPC service

    def subscribe(self, caller: Caller, policy: MethodPolicy, params: bytes) -> None:
        feed = self._context.feeds.find(self.network.id)
        if feed is None:
            caller.on_fault(Unavailable(f"{self.network.id} has no feed"))
        else:
            self._context.start(lambda: self._listen(caller, feed))

    async def _listen(self, caller: Caller, feed: NetworkFeed) -> None:
        try:
            await feed.subscribe(self._topic, self)
            caller.on_result(b"true")
        except RpcError as exc:
            caller.on_error(exc.error)
        except Fault as fault:
            caller.on_fault(fault)
        finally:
            if not self.is_open:
                feed.unsubscribe(self._topic, self)

    # Called by the feed

    @property
    def account(self) -> str:
        return self.key.account.id

    def on_events(self, events: Sequence[FeedEvent]) -> None:
        for event in events:
            if not self.is_open:
                return
            if self._allowance.spend(self._kind.units):
                self._allowance.key.tallies[self._tally].add_units(self._kind.units)
                self._report_missed()
                self._add(event.result)
                self._kind.sent += 1
            else:
                self._missed += 1
                self._kind.dropped += 1

    def on_end(self, why: Fault) -> None:
        self._finish_with(why.message)

    async def room(self) -> None:
        """There are no replays, which would wait here."""

    def charge(self, units: int, tally: Tally) -> bool:
        return self._allowance.spend(units)

    async def wait_for_units(self) -> None:
        await self._allowance.until_retry()

    def _report_missed(self) -> None:
        if self._missed:
            missed, self._missed = self._missed, 0
            self._add(comment(f"{missed} events were dropped for lack of compute units"))

    def _add(self, data: bytes) -> None:
        limit = self._context.limits.max_queue_bytes
        if self._bytes + len(data) > limit or not self._context.memory.take(self.account, len(data)):
            self._kind.dropped += 1
            self._cut_off()
            return
        self._queue.append(data)
        self._bytes += len(data)
        self._woken.set()

    def _cut_off(self) -> None:
        """The client does not read. The handler may be waiting for it."""
        self.end()
        if self._transport is not None:
            self._transport.abort()

    # Called by the handler

    def begin(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    async def next_bytes(self) -> bytes:
        """The next bytes to write; empty at the end. Those that were returned before have been written."""
        self._give_back(self._being_written)
        self._being_written = 0
        while not self._queue and self.is_open:
            self._woken.clear()
            await self._woken.wait()
        data = b"".join(self._queue)
        self._queue.clear()
        self._being_written = len(data)
        return data

    def _give_back(self, size: int) -> None:
        if size:
            self._bytes -= size
            self._context.memory.give_back(self.account, size)

    def end(self) -> None:
        """The client has left, or must leave."""
        if self.is_open:
            self._stop()
        self._queue.clear()
        self._being_written = 0
        self._give_back(self._bytes)

    def _stop(self) -> None:
        """No event follows. Queued ones may still be written."""
        self.is_open = False
        self._kind.open -= 1
        self._woken.set()
        if (feed := self._context.feeds.find(self.network.id)) is not None:
            feed.unsubscribe(self._topic, self)

    # Called for all sockets

    def use_key(self, successor: Key) -> None:
        self.key = successor

    def ping(self) -> None:
        """Send a comment, so that the connection of a client that has left is noticed."""
        if not self._queue:
            self._add(_PING)

    def close(self, code: int, reason: str) -> None:
        self._finish_with(reason)

    def close_after_replies(self, code: int, reason: str) -> None:
        self._finish_with("service restart: connect again")

    def _finish_with(self, reason: str) -> None:
        if self.is_open:
            self._add(comment(reason))
        if self.is_open:
            self._stop()
