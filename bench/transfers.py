"""The history of transfers: back-fills of a stub chain, the follower and calls beside them, and pages of a large table.

A back-fill is `penstock index` as operators run it, with a Postgres of its own. Everything has both cores, unless a figure says
otherwise. The long runs are started apart from the other cases, with a chain or a table of any size:

    python -m bench.transfers backfill --blocks 200000 [--peers]
    python -m bench.transfers pages --rows 100000000
    python -m bench.transfers live --seconds 300
"""

import argparse
import asyncio
import contextlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

import asyncpg

from bench import indexers, machine
from bench.holdings import ROOT, ChainStub, chain_stub, postgres_in
from bench.processes import StartFailed
from proxy.core.transfer_history import CATEGORIES, LAST, place_of
from proxy.dev.postgres import Postgres
from proxy.errors import StartError
from proxy.store.postgres import migrate, sql

# The stub chain of a back-fill: 300 logs in each block.
BLOCKS, LOGS = 2_000, 300
PEPPER = "a pepper that only the bench ever uses"
COMMAND_S = 7200.0
NOT_FINAL = 100
# Live blocks: of Base, whose head is polled three times in two seconds.
LIVE_NETWORK, LIVE_CHAIN_ID, LIVE_EVERY_S, LIVE_LOGS = "base/mainnet", 8453, 2.0, 1_000
LIVE_S = 30.0
# More than a back-fill writes while the figures beside it are measured.
ENDLESS = 1_000_000
WATCH_S = 0.02
START_S = 60.0
# Pages: as many tables as the whole history of Ethereum has, of blocks with 300 transfers each.
ROWS, TABLES, LOOKS, PAGE = 10_000_000, 30, 200, 100
T = TypeVar("T")
TIME = re.compile(r"Execution Time: ([0-9.]+) ms")


@dataclass(frozen=True, slots=True)
class Finished:
    """A back-fill that has ended: its time, the CPU time of all that took part, and the bytes of a transfer with indexes."""

    logs: int
    took_s: float
    cpu_s: float
    bytes_each: float = 0.0

    @property
    def rate(self) -> float:
        return self.logs / self.took_s

    def __str__(self) -> str:
        each = f", {self.bytes_each:.0f} bytes each" if self.bytes_each else ""
        return f"{self.rate:,.0f} logs/s: {self.logs:,} in {self.took_s:,.1f} s, {self.cpu_s:,.1f} s of CPU{each}"


def backfill(workdir: Path, blocks: int = BLOCKS) -> Finished:
    """Add a chain to an empty index."""
    return _run(_backfill(workdir, blocks))


async def _backfill(workdir: Path, blocks: int) -> Finished:
    async with _database(workdir, "backfill") as postgres:
        with chain_stub(blocks, LOGS, cpus=_cores()) as chain:
            config = _settings(workdir, postgres, chain, "ethereum/mainnet", start=blocks - 1)
            began, spent = time.monotonic(), _spent(postgres, chain)
            used = await asyncio.to_thread(_index, config, "ethereum")
            took_s, used = time.monotonic() - began, used + _spent(postgres, chain) - spent
        connection = await asyncpg.connect(postgres.url)
        rows = await connection.fetchval("select count(*) from transfers")
        size = await connection.fetchval(_SIZE)
        await connection.close()
    if rows != (blocks - 2) * LOGS:
        raise StartFailed(f"the back-fill wrote {rows} transfers instead of {(blocks - 2) * LOGS}")
    return Finished(rows, took_s, used, size / rows)


_SIZE = """
select sum(pg_total_relation_size(relid)) from (
    select relid from pg_partition_tree('transfers') union all select relid from pg_partition_tree('transfer_blocks')
) as parts"""


def others(workdir: Path, blocks: int = BLOCKS) -> Iterator[tuple[str, Finished | str]]:
    """The same chain with other indexers, or why they do not run, each as soon as it has ended."""
    for name, run in indexers.INDEXERS.items():
        try:
            yield name, _run(_other(workdir, blocks, name, run))
        except (StartFailed, OSError, subprocess.SubprocessError) as error:
            yield name, str(error)


async def _other(workdir: Path, blocks: int, name: str, run: indexers.Run) -> Finished:
    async with _database(workdir, name, is_migrated=False) as postgres:
        # Ponder takes the newest 65 blocks for not final, and reads past blocks only.
        with chain_stub(blocks + NOT_FINAL, LOGS, cpus=_cores()) as chain:
            began, spent = time.monotonic(), _spent(postgres, chain)
            used = await asyncio.to_thread(run, workdir, chain.url, postgres.url, blocks)
            took_s, used = time.monotonic() - began, used + _spent(postgres, chain) - spent
    return Finished((blocks - 2) * LOGS, took_s, used)


def _index(config: Path, chain: str) -> float:
    """Run the command and return its CPU time."""
    return indexers.timed(
        [sys.executable, "-m", "proxy", "index", "--config", str(config), "--chain", chain, "--from", "0"],
        environment={"PYTHONPATH": str(ROOT)},
    )


# Beside a back-fill


def lateness(workdir: Path, seconds: float = LIVE_S) -> dict[str, list[float]]:
    """How many seconds after each live block the follower has committed it, without and with a back-fill beside it."""
    return _run(_lateness(workdir, seconds))


async def _lateness(workdir: Path, seconds: float) -> dict[str, list[float]]:
    live = (LIVE_CHAIN_ID, LIVE_EVERY_S, LIVE_LOGS)
    async with _database(workdir, "live") as postgres:
        with chain_stub(ENDLESS, LOGS, *live, cpus=_cores()) as chain:
            config = _settings(workdir, postgres, chain, LIVE_NETWORK, start=ENDLESS - 1)
            with _program("serve", "--role", "follower", config=config):
                connection = await asyncpg.connect(postgres.url)
                await _watch(connection, chain, least=ENDLESS, seconds=START_S, count=2)
                found = {"alone": await _watch(connection, chain, seconds=seconds)}
                with _program("index", "--chain", "base", "--from", "0", config=config):
                    await _until_filled(connection)
                    found["beside"] = await _watch(connection, chain, seconds=seconds)
                await connection.close()
    return found


async def _watch(connection: Any, chain: ChainStub, *, seconds: float, least: int = 0, count: int = 0) -> list[float]:
    """The delays of all blocks that the index reaches within the time, or of the first `count` from `least` on."""
    delays: list[float] = []
    last, end = max(least, await _reached(connection) + 1), time.monotonic() + seconds
    while time.monotonic() < end and (not count or len(delays) < count):
        reached, now = await _reached(connection), time.monotonic()
        delays += [now - chain.began - (number - ENDLESS + 1) * LIVE_EVERY_S for number in range(last, reached + 1)]
        last = max(last, reached + 1)
        await asyncio.sleep(WATCH_S)
    if not delays or len(delays) < count:
        raise StartFailed("the follower wrote no blocks")
    return delays


async def _reached(connection: Any) -> int:
    return int(await connection.fetchval("select coalesce(max(block), -1) from followed_networks"))


async def _until_filled(connection: Any) -> None:
    """Wait until a back-fill has written blocks."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if await connection.fetchval("select exists (select from transfer_coverage where covered <> '{}')"):
            return
        await asyncio.sleep(WATCH_S)
    raise StartFailed(f"the back-fill wrote nothing within {START_S:.0f} s")


@contextlib.contextmanager
def under_way(workdir: Path, service: Sequence[int], other: int) -> Iterator[None]:
    """A back-fill on the cores of the service. Its Postgres and its upstream have the time that is left of the other core."""
    with asyncio.Runner() as runner, chain_stub(ENDLESS, LOGS, cpus=[other]) as chain:
        context = _database(workdir, "beside")
        postgres = runner.run(context.__aenter__())
        try:
            for pid in (chain.pid, *machine.descendants(_pid(postgres))):
                machine.pin(pid, [other])
                machine.be_idle(pid)
            config = _settings(workdir, postgres, chain, "ethereum/mainnet", start=ENDLESS - 1)
            with _program("index", "--chain", "ethereum", "--from", "0", config=config, cpus=service):
                runner.run(_wait_for_rows(postgres.url))
                yield
        finally:
            runner.run(context.__aexit__(None, None, None))


async def _wait_for_rows(url: str) -> None:
    connection = await asyncpg.connect(url)
    await _until_filled(connection)
    await connection.close()


# Pages of a large table

ADDRESSES = {"10": b"\1" * 20, "10,000": b"\2" * 20, "a tenth": b"\3" * 20}
# One transfer in ten is sent by one address, 10,000 are received by another, and ten by a third.
_FILL = """
insert into transfers
select n / 300, $1::bigint + (n % 300) * (1::bigint << 30), n % 300 / 2, 1, 20,
    case when n % 10 = 0 then $4::bytea else substring(sha256(int8send(n % 1000003)), 1, 20) end,
    case when n % ($2::bigint / 10) = 7 then $6::bytea when n % ($2::bigint / 10000) = 3 then $5::bytea
        else substring(sha256(int8send(n % 999983)), 1, 20) end,
    substring(sha256(int8send(n % 2003)), 1, 20), '\\x01'::bytea || int8send(n), ''
from generate_series($3::bigint, $7::bigint) as n"""
_FILL_BLOCKS = """
insert into transfer_blocks select n, n + 1, 1, sha256(int8send(n)), decode(repeat(md5(n::text), 300), 'hex')
from generate_series(0, $1::bigint) as n"""
BATCH = 1_000_000


def page_times(workdir: Path, rows: int = ROWS, *, keep: Path | None = None) -> dict[str, dict[str, float]]:
    """The milliseconds in Postgres (median and p99) for a page of each address, from random positions. `keep`: a directory in
    which the table stays, or was left by an earlier call."""
    return _run(_page_times(workdir, rows, keep))


async def _page_times(workdir: Path, rows: int, keep: Path | None) -> dict[str, dict[str, float]]:
    async with _database(workdir, "history") if keep is None else _server(keep, "history") as postgres:
        connection = await asyncpg.connect(postgres.url)
        await migrate.migrate(connection)
        if not await connection.fetchval("select exists (select from transfer_blocks where number = $1)", rows // LOGS):
            await _fill(connection, rows)
        found = {name: await _times(connection, each, rows // LOGS) for name, each in ADDRESSES.items()}
        await connection.close()
    return found


async def _fill(connection: Any, rows: int) -> None:
    # Nothing of it has to outlive a crash.
    for setting in ("full_page_writes = off", "fsync = off", "max_wal_size = '8GB'", "maintenance_work_mem = '256MB'"):
        await connection.execute(f"alter system set {setting}")
    await connection.execute("select pg_reload_conf()")
    await connection.execute(sql.blocks.add_network, "ethereum/mainnet")
    # Left by an attempt that did not end.
    await connection.execute("truncate transfers, transfer_blocks")
    await connection.execute(sql.transfers.open, 1, 0, rows // LOGS, rows // LOGS // TABLES + 1)
    first_place, addresses = place_of(CATEGORIES["erc20"], 0), list(ADDRESSES.values())
    # Indexes take most of the time if each row is added to them on its own.
    indexes = await connection.fetch("select indexname, indexdef from pg_indexes where tablename = 'transfers'")
    for index in indexes:
        await connection.execute(f"drop index {index['indexname']}")
    for first in range(0, rows, BATCH):
        last = min(first + BATCH, rows) - 1
        await connection.execute(_FILL, first_place, rows, first, *reversed(addresses), last, timeout=COMMAND_S)
    for index in indexes:
        await connection.execute(index["indexdef"].replace(" ON ONLY ", " ON "), timeout=COMMAND_S)
    await connection.execute("vacuum (analyze) transfers", timeout=COMMAND_S)
    await connection.execute(_FILL_BLOCKS, rows // LOGS, timeout=COMMAND_S)
    await connection.execute("vacuum (analyze) transfer_blocks", timeout=COMMAND_S)


async def _times(connection: Any, address: bytes, blocks: int) -> dict[str, float]:
    chance = random.Random(2)
    taken = []
    for _ in range(LOOKS):
        edge = (chance.randrange(blocks // 2, blocks), LAST.place)
        page = (1, address, True, True, *edge, 0, PAGE + 1, PAGE + 1, [*CATEGORIES.values()], None, None, None)
        rows = [row for row in await connection.fetch(sql.transfers.newest_first, *page) if row["block"] is not None]
        places = (1, [row["block"] for row in rows], [row["tx"] for row in rows])
        taken.append(
            await _time(connection, sql.transfers.newest_first, page)
            + await _time(connection, sql.transfers.places, places)
        )
    return {"median": median(taken), "p99": quantiles(taken, n=100)[98]}


async def _time(connection: Any, query: str, arguments: tuple[Any, ...]) -> float:
    plan = await connection.fetch(f"explain (analyze, timing off) {query}", *arguments)
    return float(TIME.search("\n".join(row[0] for row in plan))[1])  # type: ignore[index]


# What all of them need


def _run(work: Coroutine[None, None, T]) -> T:
    try:
        return asyncio.run(work)
    except StartError as error:
        raise StartFailed(str(error)) from error


@contextlib.asynccontextmanager
async def _database(workdir: Path, name: str, *, is_migrated: bool = True) -> AsyncIterator[Postgres]:
    """A new Postgres."""
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=workdir, ignore_cleanup_errors=True) as made:
        async with _server(Path(made), name) as postgres:
            if is_migrated:
                connection = await asyncpg.connect(postgres.url)
                await migrate.migrate(connection)
                await connection.close()
            yield postgres


@contextlib.asynccontextmanager
async def _server(directory: Path, name: str) -> AsyncIterator[Postgres]:
    """The Postgres of a directory."""
    directory.mkdir(exist_ok=True)
    directory.chmod(0o755)
    postgres = await postgres_in(directory, name)
    try:
        yield postgres
    finally:
        await postgres.child.stop()


def _settings(workdir: Path, postgres: Postgres, chain: ChainStub, network: str, *, start: int) -> Path:
    path = workdir / "penstock.toml"
    path.write_text(f"""
[database]
url = "{postgres.url}"
[keys]
pepper = "{PEPPER}"
[metrics]
port = 0
[follower]
networks = ["{network}"]
[follower.start]
"{network}" = {start}
[[upstreams]]
network = "{network}"
url = "{chain.url}"
""")
    return path


@contextlib.contextmanager
def _program(command: str, *words: str, config: Path, cpus: Sequence[int] = ()) -> Iterator[None]:
    """A command that runs until the end of the block, and must not end before."""
    pin = ("taskset", "-c", ",".join(map(str, cpus or _cores())))
    argv = [*pin, sys.executable, "-m", "proxy", command, "--config", str(config), *words]
    log = config.with_name(f"{command}.log")
    with (
        log.open("wb") as output,
        subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=output, stderr=output) as process,
    ):
        try:
            yield
            if process.poll() is not None:
                raise StartFailed(f"penstock {command} ended: {log.read_text()[-1000:]}")
        finally:
            process.terminate()


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))[:2]


def _pid(postgres: Postgres) -> int:
    assert postgres.child.process is not None
    return postgres.child.process.pid


def _spent(postgres: Postgres, chain: ChainStub) -> float:
    """CPU seconds of Postgres with all its processes, also those that have ended, and of the stub."""
    return sum(indexers.cpu_seconds(pid) for pid in (chain.pid, *machine.descendants(_pid(postgres))))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.transfers", description=__doc__)
    parser.add_argument("figure", choices=("backfill", "pages", "live"))
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="of the chain")
    parser.add_argument("--rows", type=int, default=ROWS, help="of the table")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="where the table stays, for the next run with as many rows"
    )
    parser.add_argument("--seconds", type=float, default=LIVE_S, help="of live blocks")
    parser.add_argument("--peers", action="store_true", help="also run ponder and cryo")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", ignore_cleanup_errors=True) as made:
        os.chmod(made, 0o755)
        for line in _lines(options, Path(made)):
            print(line, flush=True)
    return 0


def _lines(options: argparse.Namespace, workdir: Path) -> Iterator[str]:
    yield f"load average before: {os.getloadavg()[0]:.1f}"
    if options.figure == "backfill":
        yield f"penstock {backfill(workdir, options.blocks)}"
        if options.peers:
            yield from (f"{name} {found}" for name, found in others(workdir, options.blocks))
    elif options.figure == "pages":
        for name, times in page_times(workdir, options.rows, keep=options.keep).items():
            yield f"{name} transfers: median {times['median']:.2f} ms, p99 {times['p99']:.2f} ms"
    else:
        for name, delays in lateness(workdir, options.seconds).items():
            yield f"{name}: {len(delays)} blocks, median {median(delays):.2f} s late, at most {max(delays):.2f} s"
    yield f"load average after: {os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    sys.exit(main())
