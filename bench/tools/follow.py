"""Follow a stub chain to its head and print the time taken, next to a bare COPY of the same rows into like tables.

`follow.py DATABASE PORT BLOCKS KEEP SINKS`, where SINKS is `holdings`, or `history` for holdings and the history of transfers.
"""

import io
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import uvloop

from proxy.compose.background import Background
from proxy.services.follower.network_follower import NetworkFollower
from proxy.settings import load, load_tables
from proxy.store.postgres import migrate

NETWORK = "ethereum/mainnet"
# The tables that each kind of index writes.
TABLES = {
    "holdings": ("token_holdings", "nft_holdings"),
    "history": ("token_holdings", "nft_holdings", "transfer_blocks", "transfers"),
}


async def main(database: str, port: int, blocks: int, keep: int, kind: str) -> None:
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
    sinks = [*running.sinks, running.transfers(route)] if kind == "history" else running.sinks
    following = NetworkFollower(running.reader(route, sinks), running.blocks, sinks, start=0, keep=keep)
    following.keep = keep
    async with running.blocks.lead(NETWORK) as term:
        ours, began = Spent(term._connection.get_server_pid()), time.perf_counter()
        await following.step(term)
        took_s, cpu_s = time.perf_counter() - began, ours.so_far()
    assert following.cursor.number == blocks - 1
    found = {"took_s": took_s, "took_cpu_s": cpu_s}
    for name, copy in {"copied": _copy_records, "binary": _copy_binary}.items():
        spent = [await _copy(connection, copy, table) for table in TABLES[kind]]
        found |= {f"{name}_s": sum(each[0] for each in spent), f"{name}_cpu_s": sum(each[1] for each in spent)}
    await running.close()
    print(json.dumps(found))
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


async def _copy(connection: Any, prepare: Any, table: str) -> tuple[float, float]:
    """Seconds, and seconds of CPU time, for a COPY into an empty table of the same shape."""
    await connection.execute(f"create table bare_{table} (like {table} including all)")
    copy = await prepare(connection, table)
    spent, began = Spent(connection.get_server_pid()), time.perf_counter()
    await copy()
    found = time.perf_counter() - began, spent.so_far()
    await connection.execute(f"drop table bare_{table}")
    return found


async def _copy_records(connection: Any, table: str) -> Any:
    """The driver encodes each row."""
    rows = [tuple(row) for row in await connection.fetch(f"table {table}")]
    return partial(connection.copy_records_to_table, f"bare_{table}", records=rows)


async def _copy_binary(connection: Any, table: str) -> Any:
    """The rows are encoded already: only Postgres works."""
    rows = io.BytesIO()
    await connection.copy_from_query(f"table {table}", output=rows, format="binary")
    rows.seek(0)
    return partial(connection.copy_to_table, f"bare_{table}", source=rows, format="binary")


if __name__ == "__main__":
    database, port, blocks, keep, kind = sys.argv[1:]
    uvloop.run(main(database, int(port), int(blocks), int(keep), kind))
