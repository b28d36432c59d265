"""Follow a stub chain to its head and print the time taken, next to a bare COPY of the same rows into like tables."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import asyncpg
import uvloop

from proxy.compose.background import Background
from proxy.services.follower.network_follower import NetworkFollower
from proxy.settings import load, load_tables
from proxy.store.postgres import migrate

NETWORK = "ethereum/mainnet"
# For each table that the follower writes: how to read it, and how to create one like it.
KEPT = {
    "bare_tokens": ("select * from token_holdings", "create table bare_tokens (like token_holdings including all)"),
    "bare_nfts": ("select * from nft_holdings", "create table bare_nfts (like nft_holdings including all)"),
}


async def main(database: str, port: int, blocks: int, keep: int) -> None:
    """`keep`: the number of blocks below the head that are read one by one and can be undone."""
    connection = await asyncpg.connect(database)
    await connection.execute("drop schema public cascade; create schema public")
    await migrate.migrate(connection)
    over = {
        "database": {"url": database},
        "keys": {"pepper": "a pepper that only the bench ever uses"},
        "upstreams": [{"network": NETWORK, "url": f"http://127.0.0.1:{port}"}],
    }
    running = Background(load(environ={}, overrides=over), load_tables())
    await running.open()
    route = running.networks.routes[NETWORK]
    following = NetworkFollower(running.reader(route), running.blocks, running.sinks, start=0, keep=keep)
    following.keep = keep
    async with running.blocks.lead(NETWORK) as term:
        ours, began = Spent(term._connection.get_server_pid()), time.perf_counter()
        await following.step(term)
        took_s, cpu_s = time.perf_counter() - began, ours.so_far()
    assert following.cursor.number == blocks - 1
    copied_s, copied_cpu_s = await _copy(connection)
    await running.close()
    print(json.dumps({"took_s": took_s, "cpu_s": cpu_s, "copied_s": copied_s, "copied_cpu_s": copied_cpu_s}))
    await connection.close()


class Spent:
    """CPU seconds of this process and its Postgres server process; meaningful even on a busy machine."""

    def __init__(self, server: int) -> None:
        self._server = server
        self._before = self._now()

    def _now(self) -> float:
        fields = Path(f"/proc/{self._server}/stat").read_text().rsplit(")", 1)[1].split()
        return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def so_far(self) -> float:
        return self._now() - self._before


async def _copy(connection: Any) -> tuple[float, float]:
    took_s = cpu_s = 0.0
    for table, (read, create) in KEPT.items():
        rows = [tuple(row) for row in await connection.fetch(read)]
        await connection.execute(create)
        spent, began = Spent(connection.get_server_pid()), time.perf_counter()
        await connection.copy_records_to_table(table, records=rows)
        took_s += time.perf_counter() - began
        cpu_s += spent.so_far()
    return took_s, cpu_s


if __name__ == "__main__":
    database, port, blocks, keep = sys.argv[1:]
    uvloop.run(main(database, int(port), int(blocks), int(keep)))
