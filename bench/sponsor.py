"""The cost of sponsoring an operation: a worker and a real Postgres on one core."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import asyncpg

from bench import machine
from bench.processes import StartFailed
from proxy.dev.postgres import Postgres
from proxy.errors import StartError
from proxy.store.postgres import migrate

TOOL = Path(__file__).parent / "tools" / "sponsor.py"
ROOT = Path(__file__).parent.parent


def figures(workdir: Path, cpu: int, *, rounds: int, seconds: float) -> list[dict[str, float]]:
    """Return per round the latency in milliseconds (p50), the rate per second, and the share of CPU spent on signing."""
    try:
        return asyncio.run(_figures(workdir, cpu, rounds, seconds))
    except StartError as error:
        raise StartFailed(str(error)) from error


async def _figures(workdir: Path, cpu: int, rounds: int, seconds: float) -> list[dict[str, float]]:
    sockets = workdir / "sponsor-sockets"
    sockets.mkdir(exist_ok=True)
    postgres = Postgres(workdir / "sponsor-postgres", sockets, workdir / "sponsor-postgres.log")
    await postgres.start()
    try:
        connection = await asyncpg.connect(postgres.url)
        await migrate.migrate(connection)
        await connection.close()
        assert postgres.child.process is not None
        machine.pin(postgres.child.process.pid, [cpu])
        return [await asyncio.to_thread(_measure, postgres.url, cpu, seconds) for _ in range(rounds)]
    finally:
        await postgres.child.stop()


def _measure(url: str, cpu: int, seconds: float) -> dict[str, float]:
    argv = ["taskset", "-c", str(cpu), sys.executable, str(TOOL), url, str(seconds)]
    done = subprocess.run(
        argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, timeout=60 + 4 * seconds, check=False
    )
    if done.returncode:
        raise StartFailed(done.stderr.decode()[-2000:])
    return dict(json.loads(done.stdout))
