"""The rate of webhook deliveries: deliverer and a real Postgres on one core, a fast receiver on another."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench import machine
from bench.processes import StartFailed
from proxy.dev.postgres import Postgres
from proxy.errors import StartError

TOOLS = Path(__file__).parent / "tools"
ROOT = Path(__file__).parent.parent
COUNT = 5_000
WAITING = 1_000_000


def figures(workdir: Path, cpus: Sequence[int], rounds: int, *, waiting: int = WAITING) -> list[dict[str, float]]:
    """Return per round the deliveries per second (Penstock's and a bare client's) and the milliseconds from event to POST.

    The last round also measures the memory that `waiting` queued deliveries take.
    """
    try:
        return asyncio.run(_figures(workdir, cpus, rounds, waiting))
    except StartError as error:
        raise StartFailed(str(error)) from error


async def _figures(workdir: Path, cpus: Sequence[int], rounds: int, waiting: int) -> list[dict[str, float]]:
    sockets = workdir / "delivery-sockets"
    sockets.mkdir(exist_ok=True)
    postgres = Postgres(workdir / "delivery-postgres", sockets, workdir / "delivery-postgres.log")
    await postgres.start()
    try:
        assert postgres.child.process is not None
        machine.pin(postgres.child.process.pid, [cpus[0]])
        with _receiver(cpus[-1]) as port:
            return [
                await asyncio.to_thread(_measure, postgres.url, port, cpus[0], waiting if last == rounds else 0)
                for last in range(1, rounds + 1)
            ]
    finally:
        await postgres.child.stop()


@contextmanager
def _receiver(cpu: int) -> Iterator[int]:
    argv = ["taskset", "-c", str(cpu), sys.executable, str(TOOLS / "receive.py")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as receiver:
        try:
            assert receiver.stdout is not None
            yield int(receiver.stdout.readline())
        finally:
            receiver.kill()


def _measure(url: str, port: int, cpu: int, waiting: int) -> dict[str, float]:
    argv = [
        "taskset",
        "-c",
        str(cpu),
        sys.executable,
        str(TOOLS / "deliver.py"),
        url,
        str(port),
        str(COUNT),
        str(waiting),
    ]
    done = subprocess.run(
        argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, timeout=300, check=False
    )
    if done.returncode:
        raise StartFailed(done.stderr.decode()[-2000:])
    return dict(json.loads(done.stdout))
