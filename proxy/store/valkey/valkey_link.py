"""One connection to Valkey or Redis, for which no call waits long.

Commands are pipelined: those of one turn of the event loop go out in one write, and replies arrive in their order. A reply that
is late means that the server hangs or cannot be reached: the connection is dropped, every command under way fails, and the link
is *away* until a new connection has answered. While it is away, commands fail at once.

The connection speaks RESP3, so messages of channels arrive on it too. Functions, if any, are loaded when it opens.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import hiredis

from proxy.store.valkey.valkey_address import TAG, HostPort, ValkeyAddress, is_misplaced, moved_to

log = logging.getLogger("penstock.valkey")

# A caller that waits for a reply waits this long at most.
LATE_S = 0.08
# A new connection may take longer: nothing waits for it.
OPEN_S = 1.0
# The pause before a new connection. It doubles while the server refuses our commands, for example because its memory is full.
AGAIN_S = 0.1
LONGEST_AGAIN_S = 2.0
# A connection that worked for this long counts as accepted: the next pause is AGAIN_S again.
WORKED_S = 1.0
# How fast the average of the round trips follows.
FOLLOW = 0.3
CLIENT_NAME = "penstock"

# A reply: None if the link went away first.
OnReply = Callable[[Any], None]
OnMessage = Callable[[bytes], None]


class LinkConnection(asyncio.Protocol):
    """One connection of a link. A link outlives its connections."""

    def __init__(self, link: ValkeyLink) -> None:
        self._link = link
        self._replies = hiredis.Reader()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._link.connected(self)

    def data_received(self, data: bytes) -> None:
        self._replies.feed(data)
        now = time.monotonic()
        while (reply := self._replies.gets()) is not False:
            self._link.received(self, reply, now)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._link.disconnected(self)


class ValkeyLink:
    def __init__(self, address: ValkeyAddress, functions: str = "", *, late_s: float = 0.0) -> None:
        """`functions`: the source of the library to load. `late_s`: when a reply is late, if not after LATE_S."""
        self._address = address
        self._own_late_s = late_s
        self._functions = functions
        # Made once: it reads all root certificates, which takes tens of milliseconds.
        self._tls = ssl.create_default_context() if address.tls else None
        self._servers = deque(address.servers)
        self._connection: LinkConnection | None = None
        # Commands under way: when each was sent, and what gets its reply.
        self._under_way: deque[tuple[float, OnReply]] = deque()
        self._out: list[bytes] = []
        self._watch: asyncio.TimerHandle | None = None
        self._closed: asyncio.Future[None] | None = None
        self._is_refused = False
        self._channels: dict[bytes, OnMessage] = {}
        self._loop = asyncio.get_running_loop()
        self.is_up = False
        self.round_trip_s = 0.001
        # Called when the link comes up and when it goes away.
        self.on_change: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        state = "up" if self.is_up else "away"
        return f"<ValkeyLink {state}, {len(self._under_way)} under way, {self.round_trip_s * 1000:.1f} ms>"

    @property
    def _late_s(self) -> float:
        return self._own_late_s or LATE_S

    # Commands

    def send(self, words: Sequence[str | bytes], on_reply: OnReply) -> bool:
        """Send a command in this turn of the loop. Returns False if the link is away."""
        if not self.is_up:
            return False
        self._write(words, on_reply)
        return True

    async def ask(self, *words: str | bytes) -> Any:
        """Send a command and return its reply; None if the link is or goes away."""
        future: asyncio.Future[Any] = self._loop.create_future()
        if not self.send(words, partial(_settle, future)):
            return None
        return await future

    def listen(self, channel: str, on_message: OnMessage) -> None:
        """Have messages of a channel delivered, now or when the link is up."""
        self._channels[channel.encode()] = on_message
        self.send(("SUBSCRIBE", channel), _ignore)

    def _write(self, words: Sequence[str | bytes], on_reply: OnReply) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(_packed(words))
        # The reply to SUBSCRIBE is a push message, which is no reply to a command.
        if words[0] != "SUBSCRIBE":
            self._under_way.append((time.monotonic(), on_reply))
            if self._watch is None:
                self._watch = self._loop.call_later(self._late_s, self._check)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if out and self._connection is not None and self._connection.transport is not None:
            self._connection.transport.write(b"".join(out))

    def _check(self) -> None:
        """Check the age of the oldest command. Replies that have arrived are read first: this process may have been stopped
        meanwhile."""
        self._watch = self._loop.call_later(0.002, self._check_again) if self._under_way else None

    def _check_again(self) -> None:
        self._watch = None
        if not self._under_way:
            return
        age_s = time.monotonic() - self._under_way[0][0]
        if age_s >= (self._late_s if self.is_up else OPEN_S):
            self._drop("a reply is late")
        else:
            self._watch = self._loop.call_later(max(0.001, self._late_s - age_s), self._check)

    # The connection

    async def run(self) -> None:
        """Keep a connection open: a supervised loop."""
        pause_s = AGAIN_S
        try:
            while True:
                self._is_refused = False
                worked_s = await self._connect_once()
                pause_s = min(2 * pause_s, LONGEST_AGAIN_S) if self._is_refused and worked_s < WORKED_S else AGAIN_S
                await asyncio.sleep(pause_s)
        finally:
            self._drop("the link is closed")

    async def until_up(self, within_s: float) -> bool:
        """Wait for the first connection. A process can start without."""
        end = time.monotonic() + within_s
        while not self.is_up and time.monotonic() < end:  # noqa: ASYNC110 - at the start only
            await asyncio.sleep(0.01)
        return self.is_up

    async def _connect_once(self) -> float:
        """Returns how long the connection worked, in seconds."""
        closed = self._closed = self._loop.create_future()
        try:
            async with asyncio.timeout(OPEN_S):
                host, port = await self._server()
                await self._loop.create_connection(lambda: LinkConnection(self), host, port, ssl=self._tls)
                await self._log_in()
        except (OSError, TimeoutError, hiredis.HiredisError) as exc:
            self._servers.rotate(-1)
            self._drop(type(exc).__name__)
            return 0.0
        self.is_up, began = True, time.monotonic()
        log.info("valkey is up", extra={"server": f"{host}:{port}"})
        self._notify()
        await closed
        return time.monotonic() - began

    async def _server(self) -> HostPort:
        if not self._address.sentinel:
            return self._servers[0]
        host, port = self._servers[0]
        reader, writer = await asyncio.open_connection(host, port, ssl=self._tls)
        asks = ("SENTINEL", "get-master-addr-by-name", self._address.sentinel)
        # A Sentinel without a password refuses the login, which does not matter.
        commands = [asks] if not self._address.password else [self._address.auth(), asks]
        try:
            writer.write(b"".join(map(_packed, commands)))
            reply = (await _replies(reader, len(commands)))[-1]
        finally:
            writer.close()
        if not isinstance(reply, list):
            raise OSError("the Sentinel does not know the primary")
        return reply[0].decode(), int(reply[1])

    async def _log_in(self) -> None:
        words = [*self._address.login(), ("CLIENT", "SETNAME", CLIENT_NAME)]
        if self._functions:
            # A node of a Cluster that does not have our keys says so at once.
            words += [("FUNCTION", "LOAD", "REPLACE", self._functions), ("EXISTS", TAG)]
        futures = [self._loop.create_future() for _ in words]
        for each, future in zip(words, futures, strict=True):
            self._write(each, partial(_settle, future))
        for channel in self._channels:
            self._write(("SUBSCRIBE", channel), _ignore)
        for reply in await asyncio.gather(*futures):
            if reply is None:
                raise OSError("the connection was lost")
            if isinstance(reply, hiredis.ReplyError):
                raise self._refused(str(reply))

    def _refused(self, error: str) -> OSError:
        """The error of a Cluster node or a replica: ask another server, first the one that the error names."""
        if (other := moved_to(error)) is not None:
            if other in self._servers:
                self._servers.remove(other)
            self._servers.insert(1, other)
        self._is_refused = not is_misplaced(error)
        log.warning("valkey refused a connection", extra={"reason": error.split(" ")[0]})
        return OSError(error)

    def reload(self, error: str) -> None:
        """A command was refused: connect again, to the server that the error names, or load the functions again."""
        if (other := moved_to(error)) is not None:
            if other in self._servers:
                self._servers.remove(other)
            self._servers.appendleft(other)
        elif error.startswith("READONLY"):
            self._servers.rotate(-1)
        self._is_refused = not is_misplaced(error)
        self._drop(error.split(" ")[0])

    def _drop(self, reason: str) -> None:
        if self.is_up:
            log.warning("valkey is away", extra={"reason": reason, "server": repr(self._address)})
        connection, self._connection = self._connection, None
        if connection is not None and connection.transport is not None:
            connection.transport.abort()
        was_up, self.is_up = self.is_up, False
        self._out.clear()
        under_way, self._under_way = self._under_way, deque()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._closed is not None and not self._closed.done():
            self._closed.set_result(None)
        if was_up:
            self._notify()
        for _, on_reply in under_way:
            on_reply(None)

    def _notify(self) -> None:
        for each in self.on_change:
            each()

    # Called by the connection

    def connected(self, connection: LinkConnection) -> None:
        self._connection = connection

    def received(self, connection: LinkConnection, reply: Any, now: float) -> None:
        if connection is not self._connection:
            return
        if isinstance(reply, hiredis.PushNotification):
            self._on_push(reply)
        elif self._under_way:
            sent_at, on_reply = self._under_way.popleft()
            self.round_trip_s += FOLLOW * (now - sent_at - self.round_trip_s)
            on_reply(reply)
            if isinstance(reply, hiredis.ReplyError) and self.is_up and is_misplaced(str(reply)):
                self.reload(str(reply))

    def _on_push(self, parts: list[Any]) -> None:
        if parts[0] == b"message" and (listener := self._channels.get(parts[1])) is not None:
            listener(parts[2])

    def disconnected(self, connection: LinkConnection) -> None:
        if connection is self._connection:
            self._drop("the connection was closed")


async def _replies(reader: asyncio.StreamReader, count: int) -> list[Any]:
    parser = hiredis.Reader()
    replies: list[Any] = []
    while len(replies) < count:
        data = await reader.read(4096)
        if not data:
            raise OSError("the Sentinel closed the connection")
        parser.feed(data)
        while (reply := parser.gets()) is not False:
            replies.append(reply)
    return replies


def _packed(words: Sequence[str | bytes]) -> bytes:
    return bytes(hiredis.pack_command(tuple(words)))  # type: ignore[arg-type]


def _settle(future: asyncio.Future[Any], reply: Any) -> None:
    if not future.done():
        future.set_result(reply)


def _ignore(_: Any) -> None: ...
