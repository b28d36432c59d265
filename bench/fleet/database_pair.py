"""Postgres with a streaming standby. If the primary dies, the standby is promoted, and the old primary follows it.

This stands for Patroni or a managed database: the service only sees one address of two hosts. Replication is synchronous while
there is a standby, so no acknowledged write is lost.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import asyncpg

from proxy.dev import postgres
from proxy.dev.postgres import Postgres
from proxy.errors import StartError

# How often the servers are looked at, and how long a primary must be gone before its standby is promoted.
LOOK_S, GONE_S = 0.25, 1.0


class DatabasePair:
    def __init__(self, home: Path) -> None:
        self._home = home
        self._rooms = [home / name for name in ("a", "b")]
        for room in self._rooms:
            (room / "s").mkdir(parents=True, mode=0o700)
        self.primary = 0
        self.promotions = 0
        self.servers: list[Postgres] = []

    def __repr__(self) -> str:
        return f"<DatabasePair primary {self.primary}, {self.promotions} promotions>"

    @property
    def url(self) -> str:
        """An address of both servers. It leads to the one that accepts writes."""
        hosts = ",".join(str(room / "s") for room in self._rooms)
        return f"postgresql://{postgres.USER}@/{postgres.USER}?host={hosts}&target_session_attrs=primary"

    def runs(self, place: int) -> bool:
        process = self.servers[place].child.process
        return process is not None and process.returncode is None

    async def start(self) -> None:
        first = self._server(0)
        await first.start()
        self.servers = [first, self._server(1, standby_of=first.url)]
        await self._follow(1)

    async def kill(self, place: int) -> None:
        process = self.servers[place].child.process
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def watch(self) -> None:
        """Supervised loop: promote the standby of a dead primary, and bring back a dead standby."""
        while True:
            await asyncio.sleep(LOOK_S)
            if not self.runs(self.primary):
                await asyncio.sleep(GONE_S)
                await self._promote(1 - self.primary)
            elif not self.runs(1 - self.primary):
                await self._wait_for_standby(self.primary, wanted=False)
                await self._follow(1 - self.primary)

    async def stop(self) -> None:
        for server in self.servers:
            await server.child.stop()

    def _server(self, place: int, *, standby_of: str = "") -> Postgres:
        room = self._rooms[place]
        return Postgres(room / "data", room / "s", room / "log", standby_of=standby_of)

    async def _promote(self, place: int) -> None:
        await self.servers[place].promote()
        await self._wait_for_standby(place, wanted=False)
        self.primary = place
        self.promotions += 1
        await self._follow(1 - place)

    async def _follow(self, place: int) -> None:
        """Make a server a new copy of the primary. Afterwards, writes wait for it."""
        shutil.rmtree(self._rooms[place] / "data", ignore_errors=True)
        self.servers[place] = self._server(place, standby_of=self.servers[1 - place].url)
        try:
            await self.servers[place].start()
        except StartError:  # The primary died meanwhile.
            return
        await self._wait_for_standby(1 - place, wanted=True)

    async def _wait_for_standby(self, place: int, *, wanted: bool) -> None:
        """Whether the writes of this server wait for its standby."""
        try:
            connection = await asyncpg.connect(self.servers[place].url, timeout=5)
        except (OSError, asyncpg.PostgresError, TimeoutError):
            return
        try:
            await connection.execute(f"alter system set synchronous_standby_names = '{'*' if wanted else ''}'")
            await connection.execute("select pg_reload_conf()")
        finally:
            await connection.close()
