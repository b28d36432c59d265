"""The cost of reading the balances of a holder of 500 tokens: the worker's CPU time and upstream calls, with a real Postgres.

The same holders are read three times: with nothing cached (`cold`), with names cached and a new block (`block`), and with
everything cached (`kept`). The time is the kernel's count for the worker process, so it excludes upstream and database.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import asyncpg

from bench.processes import StartFailed
from proxy.dev.postgres import Postgres
from proxy.errors import StartError
from proxy.store.postgres import migrate

TOOLS = Path(__file__).parent / "tools"
ROOT = Path(__file__).parent.parent
NETWORK = "ethereum/mainnet"
TOKENS = 500
HOLDERS = 20
FIRST = 1_000_000


def figures(workdir: Path, cpus: tuple[int, int]) -> dict[str, float]:
    """Return the worker's CPU milliseconds per request for each cache state, and the upstream calls of a cold read."""
    try:
        return asyncio.run(_figures(workdir, cpus))
    except StartError as error:
        raise StartFailed(str(error)) from error


async def _figures(workdir: Path, cpus: tuple[int, int]) -> dict[str, float]:
    (sockets := workdir / "balances-sockets").mkdir(exist_ok=True)
    postgres = Postgres(workdir / "balances-postgres", sockets, workdir / "balances-postgres.log")
    await postgres.start()
    try:
        connection = await asyncpg.connect(postgres.url)
        await _fill(connection)
        with _tool("contracts.py", cpu=cpus[1]) as upstream:
            port = _line(upstream)
            with _tool("balances.py", postgres.url, f"http://127.0.0.1:{port}", NETWORK, cpu=cpus[0]) as worker:
                found = await _read_all(connection, f"http://127.0.0.1:{port}", worker)
        await connection.close()
        return found
    finally:
        await postgres.child.stop()


async def _fill(connection: "asyncpg.Connection[Any]") -> None:
    """Give every holder different tokens, so that reading one caches nothing for the next."""
    await migrate.migrate(connection)
    await connection.execute(
        "insert into followed_networks (network, first_block, block, block_hash) values ($1, 0, $2, '')", NETWORK, FIRST
    )
    rows = [(1, _address(1, h), _address(2, h * TOKENS + t), 1) for h in range(HOLDERS) for t in range(TOKENS)]
    await connection.copy_records_to_table("token_holdings", records=rows)


def _address(kind: int, number: int) -> bytes:
    return bytes([kind]) * 12 + number.to_bytes(8, "big")


async def _read_all(
    connection: "asyncpg.Connection[Any]", upstream: str, worker: "subprocess.Popen[bytes]"
) -> dict[str, float]:
    port, key = _line(worker).split()
    base = f"http://127.0.0.1:{port}/v1/tokens/{NETWORK.split('/')[0]}/balances"
    async with aiohttp.ClientSession(headers={"X-API-Key": key}) as session:

        async def read(expected: int) -> list[float]:
            return [
                await _one(session, f"{base}/0x{_address(1, h).hex()}?limit=100", worker.pid, expected)
                for h in range(HOLDERS)
            ]

        await _one(session, f"{base}/0x{'11' * 20}?limit=100", worker.pid, FIRST)  # warm-up: imports and caches
        before = await _call(session, upstream, "bench_calls")
        cold = await read(FIRST)
        calls = (await _call(session, upstream, "bench_calls") - before) / HOLDERS
        head = await _call(session, upstream, "bench_move")
        await connection.execute("update followed_networks set block = $1", head)
        assert worker.stdin is not None
        worker.stdin.write(b"\n")
        worker.stdin.flush()
        await asyncio.to_thread(_line, worker)
        await asyncio.sleep(0.5)  # workers read the index position a few times a second
        block, kept = await read(head), await read(head)
    return {"cold": median(cold), "block": median(block), "kept": median(kept), "calls": calls}


async def _one(session: aiohttp.ClientSession, url: str, pid: int, block: int) -> float:
    before = _cpu_ms(pid)
    async with session.get(url) as response:
        found = await response.json()
    took = _cpu_ms(pid) - before
    if response.status != 200 or found["as_of_block"] != block or found["total"] not in (TOKENS, 0):
        raise StartFailed(f"no balances: {response.status} {str(found)[:200]}")
    return took


async def _call(session: aiohttp.ClientSession, url: str, method: str) -> int:
    async with session.post(
        url, data=json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": []})
    ) as response:
        return int((await response.json())["result"])


def _cpu_ms(pid: int) -> float:
    """CPU time of all threads in milliseconds, from the kernel's nanosecond count."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((each / "schedstat").read_text().split()[0]) for each in threads) / 1e6


@contextmanager
def _tool(name: str, *arguments: str, cpu: int) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(
        ["taskset", "-c", str(cpu), sys.executable, str(TOOLS / name), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _line(process: "subprocess.Popen[bytes]") -> str:
    assert process.stdout is not None
    if not (line := process.stdout.readline()):
        raise StartFailed("a benchmark tool exited early")
    return line.decode().strip()
