"""pgbouncer in transaction mode in front of the test server. It is a package of the distribution, not of Python."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg

from proxy.dev import postgres
from proxy.dev.child import Child, Program, inherited_environment
from tests import programs
from tests.database import Server

PROGRAM = programs.find("pgbouncer")
CONFIG = """
[databases]
* = host={sockets} user=penstock
[pgbouncer]
listen_addr =
unix_socket_dir = {home}
auth_type = any
pool_mode = transaction
default_pool_size = 2
logfile = {home}/log
"""


def url(sockets: Path, database: str) -> str:
    return f"{postgres.url(sockets, database)}&port=6432"


@asynccontextmanager
async def pooler(server: Server, home: Path) -> AsyncIterator[Path]:
    """Run pgbouncer, with two connections for each database, and yield its socket directory."""
    assert PROGRAM is not None
    home.chmod(0o777)
    (config := home / "pgbouncer.ini").write_text(CONFIG.format(sockets=server.sockets, home=home))
    child = Child(
        Program(
            name="pgbouncer",
            argv=(PROGRAM, str(config)),
            env=inherited_environment(LC_ALL="C"),
            is_ready=lambda: _answers(url(home, postgres.USER)),
            ready_within_s=20.0,
            stop_signal=signal.SIGINT,
            log_file=home / "output",
            before_exec=postgres.without_root(),
        )
    )
    await child.start()
    try:
        yield home
    finally:
        await child.stop()


async def _answers(address: str) -> bool:
    try:
        connection = await asyncpg.connect(address, timeout=1, statement_cache_size=0)
    except (OSError, asyncpg.PostgresError, TimeoutError):
        return False
    await connection.close()
    return True
