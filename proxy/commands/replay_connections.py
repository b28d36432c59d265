"""The connections of `replay`. A request must leave within a millisecond after it is due.

So a request is one write of bytes that were prepared before, to a connection that is open already. Reading replies takes the
same event loop's time, so there is no more to it than the framing and a look at the members of the reply.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import msgspec

from proxy.core.latency_histogram import bucket_of
from proxy.core.usage import BUCKETS
from proxy.errors import StartError
from proxy.wire.http1 import CHUNKED, BadReply, Chunks, ReplyHeaders, read_headers, read_known_headers

# Connections that may be open. Further calls wait, and are late.
MOST_OPEN: Final = 2000
# Connections that are kept ready for the next calls.
SPARE: Final = 8
# How long a reply may take, how long a connection may take to open, and how often that is checked.
REPLY_S: Final = 30.0
OPEN_S: Final = 10.0
SWEEP_S: Final = 1.0
MOST_HEADERS: Final = 1 << 16
MOST_BODY: Final = 64 << 20
NO_CONNECTION: Final = "no connection"
NO_REPLY: Final = f"no reply within {REPLY_S:.0f} s"


@dataclass(slots=True, eq=False)
class DueCall:
    """A call that is to be sent, or that waits for its reply."""

    request: bytes
    due: float
    sent_at: float = 0.0
    tries: int = 0


class ReplayTarget:
    """The service that calls are sent to. `url` has `{network}` in its path, unless it is for one network."""

    def __init__(self, url: str, key: str, placeholder: str) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if not parts.hostname or port == -1 or not (url + key).isascii() or not (url + key).isprintable():
            raise StartError(["--to: must be an http or https URL of ASCII characters, and --key of such characters"])
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.host = parts.hostname
        self.port = port or (443 if self.tls else 80)
        self._path = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
        self._placeholder = placeholder
        lines = [f"Host: {parts.netloc.rpartition('@')[2]}", "Content-Type: application/json"]
        if key:
            lines.append(f"X-API-Key: {key}")
        if parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            lines.append(f"Authorization: Basic {base64.b64encode(user.encode()).decode()}")
        self._headers = "".join(f"{line}\r\n" for line in lines)
        self._heads: dict[str, bytes] = {}

    def __repr__(self) -> str:
        return f"<ReplayTarget {self.host}:{self.port}>"

    def request(self, network: str, body: bytes) -> bytes:
        head = self._heads.get(network)
        if head is None:
            path = self._path.replace(self._placeholder, network)
            if not path.isascii() or not path.isprintable() or " " in path:
                raise StartError([f"{network!r}: is not the name of a network"])
            head = self._heads[network] = f"POST {path} HTTP/1.1\r\n{self._headers}Content-Length: ".encode()
        return b"%b%d\r\n\r\n%b" % (head, len(body), body)


class ReplayConnection(asyncio.Protocol):
    """Carries one call at a time."""

    def __init__(self, pool: ReplayPool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._headers: ReplyHeaders | None = None
        self._chunks: Chunks | None = None
        self._body: list[bytes] = []
        self._size = 0
        # The call under way, and how many had their replies.
        self.call: DueCall | None = None
        self._answered = 0

    def __repr__(self) -> str:
        return f"<ReplayConnection {'busy' if self.call else 'idle'}, {self._answered} answered>"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def send(self, call: DueCall) -> None:
        assert self._transport is not None
        self.call = call
        call.tries += 1
        self._transport.write(call.request)
        call.sent_at = time.monotonic()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def give_up(self, outcome: str) -> None:
        self._end(outcome, keep=False)

    def data_received(self, data: bytes) -> None:
        try:
            self._read(data)
        except BadReply:
            self._end("not HTTP", keep=False)

    def _read(self, data: bytes) -> None:
        if self._headers is None:
            self._buffer += data
            head, end, data = self._buffer.partition(b"\r\n\r\n")
            if not end:
                if len(self._buffer) > MOST_HEADERS:
                    raise BadReply("headers")
                return
            raw = head + end
            self._headers = read_known_headers(raw) if len(raw) < 1024 else read_headers(raw)
            self._buffer = b""
            if self._headers.length == CHUNKED:
                self._chunks = Chunks()
        if self._chunks is not None:
            data = self._chunks.feed(data)
        self._body.append(data)
        self._size += len(data)
        if self._size > MOST_BODY:
            self._end(f"a reply above {MOST_BODY >> 20} MiB", keep=False)
        elif self._chunks is not None:
            if self._chunks.done:
                self._complete(keep=not self._chunks.rest)
        elif 0 <= self._headers.length <= self._size:
            self._complete(keep=self._headers.length == self._size)

    def _complete(self, *, keep: bool) -> None:
        assert self._headers is not None
        outcome = outcome_of(self._headers.status, b"".join(self._body))
        self._end(outcome, keep=keep and not self._headers.close)

    def _end(self, outcome: str, *, keep: bool) -> None:
        call, self.call = self.call, None
        self._headers = self._chunks = None
        self._body, self._size = [], 0
        self._answered += 1
        if call is not None:
            self._pool.ended(call, outcome)
        if keep and call is not None:
            self._pool.ready(self)
        else:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._headers is not None and self._headers.length < 0 and self._chunks is None:
            self._complete(keep=False)  # The end of the connection is the end of the reply.
        call, self.call = self.call, None
        self._pool.lost(self)
        if call is None:
            return
        if self._answered and call.tries == 1 and self._headers is None and not self._buffer:
            self._pool.send(call)  # The server closed an idle connection in the moment in which it was used.
        else:
            self._pool.ended(call, NO_CONNECTION)


class ReplayPool:
    """The open connections, and the calls that wait for one."""

    def __init__(self, target: ReplayTarget) -> None:
        self._target = target
        self._all: set[ReplayConnection] = set()
        self._ready: list[ReplayConnection] = []
        self._waiting: deque[DueCall] = deque()
        self._opening: set[asyncio.Task[None]] = set()
        # How calls ended: "answered", or the reason why not; their latencies by bucket; and how late each was sent.
        self.outcomes: Counter[str] = Counter()
        self.latencies = [0] * BUCKETS
        self.delays: list[float] = []

    def __repr__(self) -> str:
        return f"<ReplayPool {len(self._ready)} of {len(self._all)} ready, {len(self._waiting)} waiting>"

    async def open(self, count: int) -> None:
        """Open connections before the first call."""
        for _ in range(min(count, MOST_OPEN)):
            self._open_another()
        await asyncio.gather(*self._opening)

    def send(self, call: DueCall) -> None:
        if self._ready:
            self._ready.pop().send(call)
            if call.tries == 1:
                self.delays.append(call.sent_at - call.due)
        else:
            self._waiting.append(call)
        if len(self._ready) + len(self._opening) < SPARE + len(self._waiting):
            self._open_another()

    def _open_another(self) -> None:
        if len(self._all) + len(self._opening) < MOST_OPEN:
            task = asyncio.get_running_loop().create_task(self._open())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self) -> None:
        target, loop = self._target, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(OPEN_S):
                _, connection = await loop.create_connection(
                    lambda: ReplayConnection(self), target.host, target.port, ssl=target.tls
                )
        except OSError:  # Also TimeoutError, and errors of TLS.
            if not self._all:
                while self._waiting:
                    self.ended(self._waiting.popleft(), NO_CONNECTION)
            return
        self._all.add(connection)
        self.ready(connection)

    # Events

    def ready(self, connection: ReplayConnection) -> None:
        if not self._waiting:
            self._ready.append(connection)
            return
        call = self._waiting.popleft()
        connection.send(call)
        if call.tries == 1:
            self.delays.append(call.sent_at - call.due)

    def lost(self, connection: ReplayConnection) -> None:
        self._all.discard(connection)
        if connection in self._ready:
            self._ready.remove(connection)
        if self._waiting:
            self._open_another()

    def ended(self, call: DueCall, outcome: str) -> None:
        self.outcomes[outcome] += 1
        if call.sent_at:
            self.latencies[bucket_of(time.monotonic() - call.sent_at)] += 1

    async def sweep(self) -> None:
        """A loop: give up calls without a reply."""
        while True:
            await asyncio.sleep(SWEEP_S)
            latest = time.monotonic() - REPLY_S
            for connection in [*self._all]:
                if connection.call is not None and connection.call.sent_at < latest:
                    connection.give_up(NO_REPLY)
            while self._waiting and self._waiting[0].due < latest:
                self.ended(self._waiting.popleft(), NO_CONNECTION)

    def close(self) -> None:
        for task in self._opening:
            task.cancel()
        for connection in [*self._all]:
            connection.abort()


class _ReplyMembers(msgspec.Struct):
    result: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()


_reply: Callable[[bytes], Any] = msgspec.json.Decoder(_ReplyMembers).decode


def outcome_of(status: int, body: bytes) -> str:
    """A JSON-RPC error is an answer: the one that was captured may have been one too."""
    if status != 200:
        return f"status {status}"
    try:
        reply = _reply(body)
    except msgspec.ValidationError:
        return "not a reply"
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return "not JSON"
    if not reply.result and not reply.error:
        return "not a reply"
    return "answered with an error" if reply.error and reply.error != b"null" else "answered"
