"""One worker with a database and one upstream. Each line on standard input makes it poll the chain's head."""

import asyncio
import math
import socket
import sys

import uvloop

from proxy import settings as settings_room
from proxy.compose.app import App
from proxy.core import access
from proxy.core.access import Account, Key
from proxy.core.limits import BucketRates
from proxy.services.rpc.tracker import Tracker
from proxy.store.shared_memory import rate_buckets
from proxy.store.shared_memory.rate_buckets import UnsharedBuckets

PEPPER = "a pepper that only the bench ever uses"


def _key(text: str) -> Key:
    return Key(
        id="key",
        lineage="key",
        digest=access.digest(PEPPER.encode(), text),
        live=True,
        scopes=access.scope_bits(()),
        account=Account(id="acct", plan="enterprise", day_limit=0),
        rate=BucketRates(1, 10**6, 10**8),
        disabled=False,
        expires_at=math.inf,
    )


async def main(url: str, upstream: str, network: str) -> None:
    over = {
        "database": {"url": url},
        "keys": {"pepper": PEPPER},
        "log": {"access": False},
        "upstreams": [{"network": network, "url": upstream}],
    }
    app = App(
        settings_room.load(environ={}, overrides=over),
        settings_room.load_tables(),
        UnsharedBuckets(rate_buckets.create()),
    )
    text = access.mint("live", bytes(32))
    app.keyring.add(_key(text))
    await app.pool.open()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    await app.listen(listener)
    tracker = Tracker(app.networks.routes[network].state)
    await tracker.look()
    print(listener.getsockname()[1], text, flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        await tracker.look()
        print("looked", flush=True)
    await app.stop()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
