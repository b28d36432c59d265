"""Send heads to many sockets from one process: with Penstock's sockets, with aiohttp's, or with bare write calls.

Usage: fan.py penstock|aiohttp|write. Prints its port and path. Each line on standard input is a JSON object with `rounds`,
`together` and `size`: it sends `rounds` heads of that size to every client, `together` of them per event-loop iteration, and
prints a line when done.
"""

import asyncio
import json
import math
import os
import socket
import sys

import uvloop
from aiohttp import web

from proxy.compose.app import App
from proxy.core import access
from proxy.core.access import Account, Key
from proxy.core.limits import BucketRates
from proxy.services.feed.topics import FeedEvent, Listener, Topic
from proxy.settings import load, load_tables
from proxy.store.shared_memory import rate_buckets
from proxy.store.shared_memory.rate_buckets import UnsharedBuckets

NETWORK = "ethereum/mainnet"
PEPPER = "a pepper that only the bench ever uses"
SETTLE_S = 0.02  # pause between rounds, for buffers to drain and clients to read
_AROUND = len('{"jsonrpc":"2.0","method":"eth_subscription","params":{"subscription":"0x","result":""}}') + 32


def head(size: int) -> bytes:
    """Return a result that makes the whole notification `size` bytes long."""
    return b'"%b"' % (b"x" * (size - _AROUND))


class Announcer:
    """A network feed whose only events are those passed to `send`."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def __len__(self) -> int:
        return len(self._listeners)

    async def subscribe(self, topic: Topic, listener: Listener) -> None:
        self._listeners.append(listener)

    async def subscribe_from(self, topic: Topic, listener: Listener, from_block: int) -> None:
        self._listeners.append(listener)

    def check_from(self, topic: Topic, from_block: int) -> None: ...

    def unsubscribe(self, topic: Topic, listener: Listener) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    async def run(self) -> None: ...

    async def send(self, size: int, together: int) -> None:
        """Pass all events in one call, as a feed does with a block's matching logs."""
        events = [FeedEvent(head(size), 1) for _ in range(together)]
        for listener in self._listeners:
            listener.on_events(events)


class Plain:
    """aiohttp's sockets and a plain loop over them."""

    def __init__(self) -> None:
        self._sockets: list[web.WebSocketResponse] = []

    def __len__(self) -> int:
        return len(self._sockets)

    async def answer(self, request: web.Request) -> web.WebSocketResponse:
        made = web.WebSocketResponse(compress=False)
        await made.prepare(request)
        async for _ in made:
            await made.send_str('{"jsonrpc":"2.0","id":1,"result":"0x1"}')
            self._sockets.append(made)
        return made

    async def send(self, size: int, together: int) -> None:
        data = b"x" * size
        for made in self._sockets:
            for _ in range(together):
                await made.send_bytes(data)


class Writes(Plain):
    """The limit: one prepared frame and one system call per client. A partial write is an error."""

    async def send(self, size: int, together: int) -> None:
        data = bytes((0x81, 126, *size.to_bytes(2, "big"))) + b"x" * size
        descriptors = [made.get_extra_info("socket").fileno() for made in self._sockets]
        for descriptor in descriptors:
            if os.write(descriptor, data * together) < len(data) * together:
                raise BlockingIOError


async def main(kind: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    listener.setblocking(False)
    port = listener.getsockname()[1]
    if kind == "penstock":
        app, path = await penstock(listener)
        feed = Announcer()
        app.feeds.by_network[NETWORK] = feed
        report(port=port, path=path)
        await serve(feed)
    else:
        plain = Plain() if kind == "aiohttp" else Writes()
        application = web.Application()
        application.router.add_get("/", plain.answer)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.SockSite(runner, listener).start()
        report(port=port, path="/")
        await serve(plain)


async def penstock(listener: socket.socket) -> tuple[App, str]:
    """Start a worker as in production but without a database: its one key is added to the keyring directly."""
    over = {
        "database": {"url": "postgresql://unused@127.0.0.1:1/unused"},
        "keys": {"pepper": PEPPER},
        "log": {"access": False},
        "server": {"connections_per_address": 65536, "max_connections": 65536},
        "upstreams": [{"network": NETWORK, "url": "http://127.0.0.1:1"}],
    }
    app = App(load(environ={}, overrides=over), load_tables(), UnsharedBuckets(rate_buckets.create()))
    text = access.mint("live", os.urandom(32))
    app.keyring.add(
        Key(
            id="key_bench",
            lineage="key_bench",
            digest=access.digest(PEPPER.encode(), text),
            live=True,
            scopes=access.ALL_SCOPES,
            account=Account(id="acct_bench", plan="enterprise", day_limit=0),
            rate=BucketRates(1, 1_000_000, 1_000_000_000),
            disabled=False,
            expires_at=math.inf,
        )
    )
    await app.listen(listener)
    return app, f"/v1/ws/{NETWORK}?apiKey={text}"


async def serve(feed: Announcer | Plain) -> None:
    """Serve the requests on standard input, one at a time."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        await send_all(feed, **json.loads(line))
        report(sockets=len(feed))


async def send_all(feed: Announcer | Plain, *, rounds: int, together: int, size: int) -> None:
    for start in range(0, rounds, together):
        await feed.send(size, min(together, rounds - start))
        await asyncio.sleep(SETTLE_S)


def report(**values: object) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
