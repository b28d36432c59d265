"""The holdings index: write rate, and read time when it is large. Uses a real Postgres and a stub chain."""

import asyncio
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import asyncpg

from bench import machine
from bench.processes import StartFailed
from proxy.dev.postgres import Postgres
from proxy.errors import StartError
from proxy.store.postgres import migrate, sql

BLOCKS, LOGS = 201, 300  # the first block is empty
EVENTS = (BLOCKS - 1) * LOGS
# How many of the blocks are read one by one: none in range mode, all in block mode.
MODES = {"ranges": 1, "blocks": BLOCKS}
# The candidates, and the names of their times.
TIMES = {"penstock": "took", "copy": "copied", "binary copy": "binary"}
ROOT = Path(__file__).parent.parent
TOOLS = Path(__file__).parent / "tools"
ROWS = 10_000_000
LOOKS = 200
TIME = re.compile(r"Execution Time: ([0-9.]+) ms")


def rates(
    workdir: Path, cpus: Sequence[int], rounds: int, *, kind: str = "holdings"
) -> dict[str, list[dict[str, float]]]:
    """Return events per second by mode and round: Penstock's, those of the driver's COPY of the same rows, and those of a COPY
    of rows that are encoded already; each also per CPU second. `kind`: see `tools/follow.py`.

    Follower and Postgres share the first core; the stub has another.
    """
    try:
        return asyncio.run(_rates(workdir, cpus, rounds, kind))
    except StartError as error:
        raise StartFailed(str(error)) from error


async def _rates(workdir: Path, cpus: Sequence[int], rounds: int, kind: str) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with chain_stub(BLOCKS, LOGS, cpus=cpus[-1:]) as chain:
        postgres = await postgres_in(workdir, "index")
        try:
            assert postgres.child.process is not None
            machine.pin(postgres.child.process.pid, [cpus[0]])
            for _ in range(rounds):
                for mode, keep in MODES.items():
                    arguments = (postgres.url, str(chain.port), str(BLOCKS), str(keep), kind)
                    result = await asyncio.to_thread(_follow, arguments, cpus[0])
                    found[mode].append(
                        {
                            f"{name}{unit}": EVENTS / result[f"{member}{unit}_s"]
                            for name, member in TIMES.items()
                            for unit in ("", "_cpu")
                        }
                    )
        finally:
            await postgres.child.stop()
    return found


async def postgres_in(workdir: Path, name: str) -> Postgres:
    """A new Postgres that runs."""
    sockets = workdir / f"{name}-sockets"
    sockets.mkdir(exist_ok=True)
    postgres = Postgres(workdir / f"{name}-postgres", sockets, workdir / f"{name}-postgres.log")
    await postgres.start()
    return postgres


@dataclass(frozen=True, slots=True)
class ChainStub:
    """A running `tools/chain.py`. `began`: when its first live block was due, less the time between two."""

    port: int
    began: float
    pid: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def chain_stub(blocks: int, logs: int, *live: float, cpus: Iterable[int]) -> Iterator[ChainStub]:
    """`live`: the rest of the tool's arguments."""
    words = [str(each) for each in (blocks, logs, *live)]
    argv = ["taskset", "-c", ",".join(map(str, cpus)), sys.executable, str(TOOLS / "chain.py"), *words]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as stub:
        try:
            assert stub.stdout is not None
            port, began = stub.stdout.readline().split()
            yield ChainStub(int(port), float(began), stub.pid)
        finally:
            stub.kill()


def _follow(arguments: Sequence[str], cpu: int) -> dict[str, float]:
    argv = ["taskset", "-c", str(cpu), sys.executable, str(TOOLS / "follow.py"), *arguments]
    done = subprocess.run(
        argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, timeout=300, check=False
    )
    if done.returncode:
        raise StartFailed(done.stderr.decode()[-2000:])
    return dict(json.loads(done.stdout))


# Reading

# Every holder has 100 tokens, in rows far apart.
_FILL = """
insert into token_holdings
select 1, substring(sha256(int4send(n % $1)), 1, 20), substring(sha256(int4send(-n)), 1, 20), n
from generate_series(1, $2) as n"""
_FILL_NFTS = """
insert into nft_holdings
select 1, 721, substring(sha256(int4send(n % $1)), 1, 20), substring(sha256(int4send(-(n % 1000))), 1, 20), n, 1
from generate_series(1, $2) as n"""
PAGES = {"balances": (sql.holdings.tokens_of, (1000,)), "owned": (sql.holdings.nfts_of, (100, 0, None))}


def page_times(workdir: Path, rows: int = ROWS) -> dict[str, dict[str, float]]:
    """Return the Postgres milliseconds (median and p99) for pages of balances and of owned NFTs of random holders."""
    try:
        return asyncio.run(_page_times(workdir, rows))
    except StartError as error:
        raise StartFailed(str(error)) from error


async def _page_times(workdir: Path, rows: int) -> dict[str, dict[str, float]]:
    postgres = await postgres_in(workdir, "pages")
    try:
        connection = await asyncpg.connect(postgres.url)
        await migrate.migrate(connection)
        await connection.execute(sql.blocks.add_network, "ethereum/mainnet")
        holders = rows // 2 // 100
        for query in (_FILL, _FILL_NFTS):
            await connection.execute(query, holders, rows // 2)
        await connection.execute("vacuum (analyze) token_holdings")
        await connection.execute("vacuum (analyze) nft_holdings")
        found = {name: await _times(connection, *page, holders) for name, page in PAGES.items()}
        await connection.close()
    finally:
        await postgres.child.stop()
    return found


async def _times(
    connection: "asyncpg.Connection[asyncpg.Record]", query: str, more: tuple[int | None, ...], holders: int
) -> dict[str, float]:
    chance = random.Random(2)
    taken = []
    for _ in range(LOOKS):
        holder = await connection.fetchval("select substring(sha256(int4send($1)), 1, 20)", chance.randrange(holders))
        plan = await connection.fetch(f"explain analyze {query}", "ethereum/mainnet", holder, *more)
        taken.append(float(TIME.search("\n".join(row[0] for row in plan))[1]))  # type: ignore[index]
    return {"median": median(taken), "p99": quantiles(taken, n=100)[98]}
