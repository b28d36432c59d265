"""Scripted upstreams: real servers, each on its own port, that reply as no good upstream would.

A script is a coroutine that gets one `Exchange`, after the head of its request and before its body, and handles it freely.
The server calls it for one request after the other on each connection, so pipelined calls wait their turn.
`go_decode` reads an envelope as an upstream written in Go would, which is not how it was checked.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import orjson

_LENGTH = re.compile(rb"content-length: ([0-9]+)", re.IGNORECASE)
# The size of one write of a generated reply.
PIECE = 65_536


class Exchange:
    """One request and the connection that it came on."""

    def __init__(
        self, server: Scripted, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.server = server
        self.head = head
        self._reader = reader
        self.writer = writer
        self._body: bytes | None = None

    async def body(self) -> bytes:
        if self._body is None:
            found = _LENGTH.search(self.head)
            assert found, f"the service sends bodies of known length: {self.head!r}"
            self._body = await self._reader.readexactly(int(found[1]))
            self.server.bodies.append(self._body)
        return self._body

    async def call(self) -> Any:
        """The call, or a list of them."""
        return orjson.loads(await self.body())

    async def send(self, *parts: bytes) -> None:
        self.writer.write(b"".join(parts))
        await self.writer.drain()

    async def send_each(self, parts: Iterable[bytes]) -> None:
        """In as many segments: the other side reads each by itself."""
        for part in parts:
            await self.send(part)
            await asyncio.sleep(0.001)

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        """RST instead of FIN: what is not read by now is lost."""
        connection: socket.socket = self.writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Script = Callable[[Exchange], Awaitable[None]]


class Scripted:
    """A server that follows its script, and records the requests it gets."""

    def __init__(self, script: Script | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.script = script or stub()
        self._tls = tls
        self.bodies: list[bytes] = []
        self.connections = 0
        self.sent = 0
        self.port = 0
        # Called with each new connection before its first byte is read.
        self.on_connect: Callable[[asyncio.StreamWriter], None] = lambda _: None
        self.writers: set[asyncio.StreamWriter] = set()
        self._readers: set[asyncio.StreamReader] = set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}/" if self._tls else f"http://127.0.0.1:{self.port}/"

    @property
    def calls(self) -> list[Any]:
        """The calls received so far, with batches split into their items."""
        return [call for body in self.bodies for call in _each(orjson.loads(body))]

    @property
    def methods(self) -> list[str]:
        return [call["method"] for call in self.calls]

    @property
    def alive(self) -> int:
        """Connections that the other side has not ended, whatever the script is doing with them."""
        return sum(1 for reader in self._readers if not reader.at_eof() and reader.exception() is None)

    async def open(self) -> Scripted:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 22, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aenter__(self) -> Scripted:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def stop_accepting(self) -> None:
        """Refuse new connections; those that are open stay."""
        assert self._server is not None
        self._server.close()

    async def close(self) -> None:
        self.stop_accepting()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.drop_all()

    def drop_all(self) -> None:
        """End every connection, as a restarted upstream does."""
        for writer in tuple(self.writers):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        self.writers.add(writer)
        self._readers.add(reader)
        self.on_connect(writer)
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                exchange = Exchange(self, head, reader, writer)
                await self.script(exchange)
                if not writer.is_closing():
                    await exchange.body()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self.writers.discard(writer)
            self._readers.discard(reader)
            with suppress(RuntimeError):
                writer.close()


def _each(calls: Any) -> list[Any]:
    return calls if isinstance(calls, list) else [calls]


# Replies


def http(body: bytes = b"", *, status: int = 200, length: int | None = None, **headers: str) -> bytes:
    """A whole reply; `length` other than the body's is a lie."""
    lines = {"Content-Type": "application/json", "Content-Length": str(len(body) if length is None else length)}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    return head_of(status, lines) + body


def head_of(status: int, lines: Mapping[str, str]) -> bytes:
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status} Words\r\n{text}\r\n".encode()


def answer(call: Any, **members: Any) -> bytes:
    """A JSON-RPC reply to one call."""
    return orjson.dumps({"jsonrpc": "2.0", "id": call["id"], **members})


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


CHUNKED = head_of(200, {"Content-Type": "application/json", "Transfer-Encoding": "chunked"})


# Good scripts


def stub(results: Mapping[str, Any] | None = None, *, errors: Mapping[str, Any] | None = None) -> Script:
    """A good upstream: results and errors by method; a method that is in neither is echoed with its params."""

    def reply(call: Any) -> bytes:
        method = call["method"]
        if errors and method in errors:
            return answer(call, error=errors[method])
        if results and method in results:
            return answer(call, result=results[method])
        return answer(call, result={"method": method, "params": call["params"]})

    async def act(exchange: Exchange) -> None:
        calls = await exchange.call()
        if isinstance(calls, list):
            await exchange.send(http(b"[" + b",".join(map(reply, calls)) + b"]"))
        else:
            await exchange.send(http(reply(calls)))

    return act


def replies(make: Callable[[Any], bytes]) -> Script:
    """The bytes that `make` returns for the call, in one write."""

    async def act(exchange: Exchange) -> None:
        await exchange.send(make(await exchange.call()))

    return act


def slow(seconds: float, then: Script) -> Script:
    async def act(exchange: Exchange) -> None:
        await exchange.body()
        await asyncio.sleep(seconds)
        await then(exchange)

    return act


def held(gate: asyncio.Event, then: Script) -> Script:
    """Nothing is answered before the gate opens."""

    async def act(exchange: Exchange) -> None:
        await exchange.body()
        await gate.wait()
        await then(exchange)

    return act


def in_chunks(size: int, result: Any = "0x1", *, trailer: bytes = b"") -> Script:
    def make(call: Any) -> bytes:
        return CHUNKED + chunked(answer(call, result=result), size)[:-2] + trailer + b"\r\n"

    return replies(make)


def huge(size: int, *, has_length: bool = True, closes_early: bool = False) -> Script:
    """A reply of so many bytes that is never whole anywhere; `server.sent` counts what the other side has taken."""

    async def act(exchange: Exchange) -> None:
        start = answer(await exchange.call(), result="")[:-2]
        head = http(length=size) if has_length else CHUNKED
        await exchange.send(head, b"" if has_length else b"%x\r\n" % size, start)
        left = size - len(start) - 2
        while left and not (closes_early and left < size // 2):
            piece = b"a" * min(left, PIECE)
            await exchange.send(piece)
            exchange.server.sent += len(piece)
            left -= len(piece)
        if left:
            exchange.close()
            return
        await exchange.send(b'"}', b"" if has_length else b"\r\n0\r\n\r\n")

    return act


# Bad scripts


def until_close(make: Callable[[Any], bytes]) -> Script:
    """A reply without a length: it ends with the connection."""

    async def act(exchange: Exchange) -> None:
        await exchange.send(head_of(200, {"Content-Type": "application/json"}), make(await exchange.call()))
        exchange.close()

    return act


async def early(exchange: Exchange) -> None:
    """A whole reply before the request's body is read; its id is a guess."""
    await exchange.send(http(b'{"jsonrpc":"2.0","id":1,"result":"early"}'))
    await exchange.body()


async def close_unread(exchange: Exchange) -> None:
    """Read the request, and close the connection without a reply."""
    await exchange.body()
    exchange.close()


async def reset(exchange: Exchange) -> None:
    await exchange.body()
    exchange.reset()


def half(share: float = 0.5) -> Script:
    """A part of a reply, then the end."""

    async def act(exchange: Exchange) -> None:
        whole = http(answer(await exchange.call(), result="0x1"))
        await exchange.send(whole[: int(len(whole) * share)])
        exchange.close()

    return act


def first(script: Script, then: Script, *, count: int = 1) -> Script:
    """One script for the first requests, another for all that come after."""
    seen = 0

    async def act(exchange: Exchange) -> None:
        nonlocal seen
        seen += 1
        await (script if seen <= count else then)(exchange)

    return act


# Envelopes as an upstream written in Go decodes them


class _Members(list[tuple[str, Any]]):
    """An object's members in order, doubled ones included."""


def go_decode(body: bytes) -> Any:
    """One envelope, or a list of them, as encoding/json decodes it into a struct with the four members.

    A member is matched without case under Unicode's simple folding: U+017F is an s, U+212A a k. The last one wins, an unknown
    one is ignored, null leaves a text as it was, and bytes that are no UTF-8 become U+FFFD.
    """
    found = json.loads(body.decode("utf-8", "replace"), object_pairs_hook=_Members)
    return _go_struct(found) if isinstance(found, _Members) else [_go_struct(item) for item in found]


def _go_struct(members: Any) -> dict[str, Any]:
    struct_: dict[str, Any] = {"jsonrpc": "", "method": "", "id": None, "params": None}
    for name, value in members:
        folded = name.replace("\u017f", "s").replace("\u212a", "k").lower()
        if folded in struct_ and not (value is None and struct_[folded] is not None):
            struct_[folded] = value
    return struct_
