"""Deliver all due events and print the rate, next to that of a bare aiohttp client that posts the same bodies.

Then write single events and measure the time from the start of the transaction to the POST and, if requested, the memory
taken by many waiting deliveries.
"""

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import asyncpg
import uvloop

from proxy.core.delivery_concurrency import Lanes
from proxy.core.egress import EgressPolicy
from proxy.services.delivery.deliverer import Deliverer
from proxy.settings import load_tables
from proxy.store.postgres import migrate
from proxy.store.postgres.deliveries import DeliveryStore
from proxy.store.postgres.notices import Notices
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.secrets import Vault
from proxy.store.postgres.webhooks import NewWebhook, WebhookStore
from proxy.tasks import Tasks
from proxy.wire.outbound_guard import OutboundGuard
from proxy.wire.receiver import DeliveryReply, Receiver

WEBHOOKS, AT_ONCE = 32, 64
VAULT = Vault("a key that only the bench ever uses")
BODY = json.dumps({
    "id": "evt_" + "0" * 32, "event_type": "token_transfer", "webhook_id": "wh_" + "0" * 16,
    "created_at": "2026-01-15T09:30:00Z",
    "data": {
        "chain": "ethereum", "block_number": 19_000_000, "tx_hash": "0x" + "a" * 64, "contract": "0x" + "b" * 40,
        "from": "0x" + "c" * 40, "to": "0x" + "d" * 40, "value": "1500000", "symbol": "USDC", "decimals": 6,
    },
}).encode()  # fmt: skip
FILL = """
with made as (
    insert into events (id, webhook_id, network, type, body)
    select $1 || n, ($2::text[])[1 + n % array_length($2, 1)], 'ethereum/mainnet', 'token_transfer', $3
    from generate_series(1, $4) as n returning id, webhook_id
)
insert into deliveries (event_id, webhook_id) select id, webhook_id from made"""


class TimedReceiver(Receiver):
    """Records when each event was posted."""

    at: dict[str, float]

    async def post(self, url: str, body: bytes, *, headers: Mapping[str, str]) -> DeliveryReply:
        self.at[headers["webhook-id"]] = time.perf_counter()
        return await super().post(url, body, headers=headers)


async def main(database: str, port: int, count: int, waiting: int) -> None:
    connection = await asyncpg.connect(database)
    await connection.execute("drop schema public cascade; create schema public")
    await migrate.migrate(connection)
    pool = Pool(database, size=10, acquire_timeout_s=5.0)
    await pool.open()
    hooks = await _webhooks(pool, connection, f"http://127.0.0.1:{port}/")
    receiver = TimedReceiver(OutboundGuard(EgressPolicy(allow=["127.0.0.0/8"]), http=True, ports=()), timeout_s=15.0)
    receiver.at = {}
    notices = Notices(pool)
    deliverer = Deliverer(
        DeliveryStore(pool), receiver, VAULT, lanes=Lanes(total=512, each=128), plans=load_tables().plans
    )
    deliverer.listen(notices)
    tasks = Tasks()
    found = {"bare": count / await _bare(port, count)}
    await connection.execute(FILL, "evt_", hooks, BODY, count, timeout=60)
    began = time.perf_counter()
    tasks.start("deliverer", deliverer.run)
    tasks.start("notices", notices.run)
    while await connection.fetchval("select exists (select from deliveries where state = 'due')"):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    found["penstock"] = count / (time.perf_counter() - began)
    found["lag_ms"] = await _lag(connection, hooks, receiver)
    if waiting:
        found["memory_mib"] = await _memory(connection, hooks, receiver, waiting)
    await tasks.close()
    await receiver.close()
    await pool.close()
    await connection.close()
    print(json.dumps(found))


async def _webhooks(pool: Pool, connection: Any, url: str) -> list[str]:
    await connection.execute("insert into accounts (id, name, email, plan) values ('a', 'a', 'a@b', 'enterprise')")
    store = WebhookStore(pool)
    made = []
    for _ in range(WEBHOOKS):
        name = store.new_id()
        new = NewWebhook(
            account="a", network="ethereum/mainnet", live=True, url=url, event_type="token_transfer", config={}
        )
        await store.create(name, new, addresses=None, secret=VAULT.seal(name, b"k" * 32), most=WEBHOOKS)
        made.append(name)
    return made


async def _bare(port: int, count: int) -> float:
    left = iter(range(count))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def post() -> None:
            for _ in left:
                async with session.post(
                    f"http://127.0.0.1:{port}/", data=BODY, headers={"Content-Type": "application/json"}
                ) as response:
                    await response.read()

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(post())
        return time.perf_counter() - began


async def _lag(connection: Any, hooks: list[str], receiver: TimedReceiver) -> float:
    """Median milliseconds of a hundred events."""
    took = []
    for number in range(100):
        name, began = f"evt_one_{number}_1", time.perf_counter()
        async with connection.transaction():
            await connection.execute(FILL, f"evt_one_{number}_", hooks, BODY, 1)
            await connection.execute("select pg_notify('penstock_deliveries', '')")
        while name not in receiver.at:  # noqa: ASYNC110
            await asyncio.sleep(0.0005)
        took.append(receiver.at[name] - began)
        await asyncio.sleep(0.01)
    return median(took) * 1000


async def _memory(connection: Any, hooks: list[str], receiver: TimedReceiver, waiting: int) -> float:
    """Return the growth in MiB after two seconds of delivering with `waiting` more deliveries in the queue."""
    before = _resident()
    await connection.execute(FILL, "evt_many_", hooks, BODY, waiting, timeout=300)
    await connection.execute("select pg_notify('penstock_deliveries', '')")
    await asyncio.sleep(2.0)
    receiver.at.clear()
    return _resident() - before


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


if __name__ == "__main__":
    database, port, count, waiting = sys.argv[1:]
    uvloop.run(main(database, int(port), int(count), int(waiting)))
