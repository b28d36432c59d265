"""A hostile client of a running service, until standard input ends: `attack.py NAME HOST PORT PATH KEY [KEY...]`.

It prints a line of JSON when it has begun, and its replies so far by status for each line on standard input. A connection that
the service closes is opened again after a moment. Attacks on the costs of operations keep to the rate of a Free account, with
each of the keys.
"""

import asyncio
import contextlib
import itertools
import json
import os
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache

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

# Attacks on the costs of operations, on a network with a deep history whose upstream answers only short ranges, and on one that
# is polled (`tools/deep_stub.py`).
DEEP, POLLED = "base/mainnet", "solana/mainnet"
DEEP_HEAD = 19_100_000
PER_S = 10
# Connections of each account of a crowd: its other requests go on while one waits.
CROWD_CONNECTIONS = 5
MIB = 1 << 20


def address(number: int) -> str:
    return f"0x{number + (1 << 152):040x}"


def filled(item: bytes, size: int) -> bytes:
    return b"[" + b",".join([item] * (size // (len(item) + 1))) + b"]"


def call_of(method: str, params: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","id":1,"method":"%s","params":%s}' % (method.encode(), params)


def json_call(method: str, *params: object) -> bytes:
    return call_of(method, json.dumps(params).encode())


def largest_filter() -> dict[str, object]:
    topics = [[f"0x{number:064x}" for number in range(index * 1000, index * 1000 + 1000)] for index in range(4)]
    return {"address": [address(number) for number in range(1000)], "topics": topics}


def blocks_back(count: int) -> dict[str, str]:
    return {"fromBlock": hex(DEEP_HEAD - count), "toBlock": hex(DEEP_HEAD - 1)}


def webhook(event_type: str, config: dict[str, object], *, chain: str = "dev", **more: object) -> bytes:
    """For a chain that is followed, or a back-test of any other."""
    return json.dumps({"chain": chain, "event_type": event_type, "config": config, **more}).encode()


def back_test(event_type: str, config: dict[str, object], blocks: int) -> bytes:
    chain = DEEP.split("/")[0]
    return webhook(event_type, config, chain=chain, from_block=DEEP_HEAD - blocks, to_block=DEEP_HEAD - 1)


# Requests of an operation: path and body.
Input = tuple[str, bytes]
WATCHED = {"addresses": [address(number) for number in range(1000)]}
RECEIVER = "http://127.0.0.1:9/"


@cache
def dear_inputs() -> dict[str, Input]:
    """By the name of the attack. Made once, and only if they are needed: together they are 20 MB."""
    deep = f"/v1/rpc/{DEEP}"
    many = {"addresses": [address(number) for number in range(99_999)]}
    return {
        "containers": ("/v1/webhooks", b'{"config":{"a":%s}}' % filled(b"[]", 8 * MIB - 100)),
        "wallets": ("/v1/wallets/create", b'{"owner":"x","unknown":%s}' % filled(b"[]", MIB - 100)),
        "nul": (deep, call_of("eth_call", b'[{"\\u0000":"\\u0000"},"latest"]')),
        "junk-filters": (
            deep,
            call_of("eth_newFilter", b"[%s]" % json.dumps(os.urandom(MIB // 2 - 100).hex()).encode()),
        ),
        "ranges": (deep, json_call("eth_getLogs", blocks_back(10_000))),
        "back-tests": ("/v1/webhooks/backtest", back_test("address_activity", dict(WATCHED), 20)),
        "traces": ("/v1/webhooks/backtest", back_test("INTERNAL_TRANSFER", dict(WATCHED), 50)),
        "addresses": ("/v1/webhooks", webhook("address_activity", dict(many), url=RECEIVER)),
        "numbers": (deep, call_of("eth_call", filled(b"0", MIB - 100))),
        "filters": (deep, json_call("eth_newFilter", largest_filter())),
    }


def paced(name: str) -> Client:
    """One dear input at the rate of the plan. Webhooks that it creates are deleted: a plan allows only a few."""

    async def run(place: Place) -> None:
        await repeat_inputs(place, [dear_inputs()[name]])

    return run


async def crowd(place: Place) -> None:
    """All dear inputs in turn, each account beginning with another one."""
    inputs = [*dear_inputs().values()]
    first = sum(place.key.encode()) % len(inputs)
    await repeat_inputs(place, inputs[first:] + inputs[:first], per_s=PER_S / CROWD_CONNECTIONS)


async def repeat_inputs(place: Place, inputs: Sequence[Input], *, per_s: float = PER_S) -> None:
    async with connection(place) as (reader, writer):
        for path, body in itertools.cycle(inputs):
            writer.write(replace(place, path=path).post(body))
            await writer.drain()
            reply = await read_body(reader)
            if path == "/v1/webhooks" and b'"wh_' in reply:
                writer.write(place.head("DELETE", f"{path}/{webhooks_in(reply)[0]}"))
                await read_body(reader)
            await asyncio.sleep(1 / per_s)


def webhooks_in(reply: bytes) -> list[str]:
    """Their ids."""
    return ["wh_" + part.split(b'"')[0].decode() for part in reply.split(b'"wh_')[1:]]


replies: Counter[str] = Counter()


async def read_body(reader: asyncio.StreamReader) -> bytes:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    replies[head[9:12].decode()] += 1
    if b"content-length:" not in head:
        return b""
    return await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))


def subscribing(network: str, count: int, call: Callable[[int], bytes]) -> Client:
    """A socket with so many subscriptions, opened at the rate of the plan and then held."""

    async def run(place: Place) -> None:
        upgrade = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13")
        async with connection(place) as (reader, writer):
            writer.write(
                place.head("GET", f"/v1/ws/{network}", *upgrade, "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
            )
            await asyncio.sleep(HANDSHAKE_S)
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(read_all(reader))
                for number in range(count):
                    writer.write(text_frame(call(number)))
                    await writer.drain()
                    await asyncio.sleep(1 / PER_S)
                await reading

    return run


async def read_all(reader: asyncio.StreamReader) -> None:
    while await reader.read(READ_BYTES):
        pass
    raise ConnectionError


def text_frame(payload: bytes) -> bytes:
    """Masked with zeros, which leave it as it is."""
    size = len(payload)
    length = (
        bytes([0x80 | 126]) + size.to_bytes(2, "big")
        if size < 1 << 16
        else bytes([0x80 | 127]) + size.to_bytes(8, "big")
    )
    return b"\x81" + (bytes([0x80 | size]) if size < 126 else length) + bytes(4) + payload


def program(number: int) -> str:
    """An address of Solana."""
    alphabet = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
    left, digits = number + (1 << 250), ""
    while left:
        left, rest = divmod(left, 58)
        digits = alphabet[rest] + digits
    return digits


def old_subscription(number: int) -> bytes:
    return json_call("eth_subscribe", "newHeads", {"fromBlock": hex(DEEP_HEAD - 9_990)})


def large_subscription(number: int) -> bytes:
    return json_call("eth_subscribe", "logs", {**largest_filter(), "address": address(number)})


def program_subscription(number: int) -> bytes:
    return json_call("programSubscribe", program(number), {"encoding": "base64"})


async def hanging_receivers(place: Place) -> None:
    """Five webhooks at a receiver that never answers, with an event for each of them again and again."""
    held = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await held.wait()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    body = webhook("address_activity", {"addresses": [address(1)]}, url=f"http://127.0.0.1:{port}/")
    created: list[str] = []
    async with server, connection(place) as (reader, writer):
        for _ in range(5):
            writer.write(replace(place, path="/v1/webhooks").post(body))
            reply = await read_body(reader)
            created += webhooks_in(reply)[:1]
        for name in itertools.cycle(created or [""]):
            writer.write(replace(place, path=f"/v1/webhooks/{name}/test").post(b"{}"))
            await read_body(reader)
            await asyncio.sleep(1 / PER_S)


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
    replies[head[9:12].decode()] += 1
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
    **{name: (paced(name), 1) for name in ("containers", "wallets", "nul", "junk-filters", "ranges", "back-tests")},
    **{name: (paced(name), 1) for name in ("traces", "addresses")},
    "replays": (subscribing(DEEP, 16, old_subscription), 1),
    "subscriptions": (subscribing(DEEP, 100, large_subscription), 4),
    "programs": (subscribing(POLLED, 100, program_subscription), 3),
    "receivers": (hanging_receivers, 1),
    "crowd": (crowd, CROWD_CONNECTIONS),
}


async def repeat(client: Client, place: Place) -> None:
    while True:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await client(place)
        await asyncio.sleep(AGAIN_S)


async def main(name: str, places: Sequence[Place]) -> None:
    client, connections = ATTACKS[name]
    async with asyncio.TaskGroup() as group:
        for place in [*places] * connections:
            group.create_task(repeat(client, place))
        print(json.dumps({"attack": name}), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(replies), flush=True)
        raise SystemExit


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], [Place(sys.argv[2], int(sys.argv[3]), sys.argv[4], key) for key in sys.argv[5:]]))
