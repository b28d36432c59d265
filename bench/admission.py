"""The cost of admission with many keys in a real Postgres: per request, with leased limits too, and at start-up."""

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import asyncpg

from bench.cases import NO_VALKEY
from bench.processes import StartFailed
from proxy.core import access
from proxy.dev.postgres import Postgres
from proxy.errors import StartError
from proxy.store.postgres import migrate
from proxy.store.shared_memory import rate_buckets

KEYS = 100_000
KEYS_PER_ACCOUNT = 10
REQUESTS = 50_000
PEPPER = "a pepper that only the bench ever uses"
TOOL = Path(__file__).parent / "tools" / "admit.py"
ROOT = Path(__file__).parent.parent

# The values of each round, by figure and row.
Costs = dict[str, dict[str, list[float]]]


def figures(workdir: Path, cpus: Sequence[int]) -> Costs:
    """Return µs of CPU per request for one worker and for two at once, those of one worker with leased limits next to limits
    without Valkey, and the seconds to load the keys."""
    try:
        return asyncio.run(_figures(workdir, cpus))
    except StartError as error:
        raise StartFailed(str(error)) from error


async def _figures(workdir: Path, cpus: Sequence[int]) -> Costs:
    sockets = workdir / "admission-sockets"
    sockets.mkdir()
    postgres = Postgres(workdir / "admission-postgres", sockets, workdir / "admission-postgres.log")
    await postgres.start()
    try:
        keys_file = workdir / "keys.txt"
        keys_file.write_text("\n".join(await _fill(postgres.url)))
        alone = await asyncio.to_thread(_measure, postgres.url, keys_file, cpus[:1], shared=False)
        pair = await asyncio.to_thread(_measure, postgres.url, keys_file, cpus[:2], shared=True)
    finally:
        await postgres.child.stop()
    warm = {
        name: {"penstock": costs["leased"], NO_VALKEY: costs["plain"]} for name, costs in alone[0]["warm_us"].items()
    }
    return {
        "alone": {"penstock": [min(run["us"] for run in alone)]},
        "shared": {"penstock": [max(run["us"] for run in pair)]},
        "loaded_s": {"penstock": [max(run["loaded_s"] for run in alone)]},
        **warm,
    }


async def _fill(url: str) -> list[str]:
    """Insert accounts and keys with COPY; return the key texts."""
    connection = await asyncpg.connect(url)
    try:
        await migrate.migrate(connection)
        accounts = [
            (f"acct_{number}", f"account {number}", "a@example.com", "growth")
            for number in range(KEYS // KEYS_PER_ACCOUNT)
        ]
        await connection.copy_records_to_table("accounts", records=accounts, columns=["id", "name", "email", "plan"])
        texts = [access.mint("live", secrets.token_bytes(32)) for _ in range(KEYS)]
        rows = [_row(number, text) for number, text in enumerate(texts)]
        columns = ["id", "account_id", "lineage_id", "name", "mode", "digest", "hint"]
        await connection.copy_records_to_table("keys", records=rows, columns=columns)
        return texts
    finally:
        await connection.close()


def _row(number: int, text: str) -> tuple[Any, ...]:
    key_id = f"key_{number}"
    digest = access.digest(PEPPER.encode(), text)
    return key_id, f"acct_{number // KEYS_PER_ACCOUNT}", key_id, "bench", "live", digest, access.hint_of(text)


def _measure(url: str, keys_file: Path, cpus: Sequence[int], *, shared: bool) -> list[dict[str, Any]]:
    """Run one process per core at the same time, all on the same shared buckets."""
    fd = rate_buckets.create()
    argv = [
        sys.executable,
        str(TOOL),
        url,
        str(fd),
        str(keys_file),
        str(REQUESTS),
        PEPPER,
        "shared" if shared else "own",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(["taskset", "-c", str(cpu), *argv], pass_fds=(fd,), env=environment, stdout=subprocess.PIPE)
        for cpu in cpus
    ]
    end = time.monotonic() + 120
    try:
        return [json.loads(process.communicate(timeout=end - time.monotonic())[0]) for process in started]
    finally:
        for process in started:
            process.kill()
        os.close(fd)
