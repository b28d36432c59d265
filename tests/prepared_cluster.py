"""A migrated database cluster, made once for a whole run. A copy takes a tenth of the time of `initdb` and the migrations."""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import asyncpg

from proxy.dev.postgres import Postgres
from proxy.store.postgres import migrate

# In the environment of every process of the run: the directory that they share.
PLACE = "PREPARED_CLUSTER"
# This data need not survive a power cut, and may be in memory.
SETTINGS = {"fsync": "off", "max_wal_size": "'128MB'"}


def begin() -> None:
    """For the process that starts the others."""
    directory = tempfile.mkdtemp(prefix="prepared-cluster-")
    os.chmod(directory, 0o711)  # without user namespaces, root starts the server as another user, who needs access
    os.environ[PLACE] = directory


def end() -> None:
    shutil.rmtree(os.environ.pop(PLACE), ignore_errors=True)


async def copy_to(directory: Path) -> None:
    """Fill a directory that does not exist yet with a cluster. Its database `penstock` has every migration."""
    if PLACE not in os.environ:  # a program that uses the tests' services, such as a benchmark
        begin()
        atexit.register(end)
    found = await _prepared(Path(os.environ[PLACE]))
    directory.parent.mkdir(parents=True, exist_ok=True)
    # The owner of the files stays the same.
    await asyncio.to_thread(subprocess.run, ["cp", "-a", str(found), str(directory)], check=True)


async def _prepared(directory: Path) -> Path:
    """The cluster, made by the first process that needs it."""
    found = directory / "cluster"
    with (directory / "lock").open("a") as lock:
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
        if not found.exists():
            await _make(found)
    return found


async def _make(found: Path) -> None:
    new, sockets = found.with_name("new"), found.with_name("s")
    sockets.mkdir(mode=0o700, exist_ok=True)
    server = Postgres(new, sockets, found.with_name("log"))
    try:
        await server.start()
        connection = await asyncpg.connect(server.url, timeout=5)
        for name, value in SETTINGS.items():
            await connection.execute(f"alter system set {name} = {value}")
        await migrate.migrate(connection)
        await connection.close()
    finally:
        await server.child.stop()
    new.rename(found)
