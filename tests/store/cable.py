"""A fault-injecting proxy between a pool and Postgres: forwards a Unix socket until a test cuts or mutes it."""

from __future__ import annotations

import asyncio
from pathlib import Path

# The name that libpq and asyncpg look for in a socket directory.
NAME = ".s.PGSQL.5432"


class Cable:
    """Forwards until it is cut. `muted` keeps connections open but forwards nothing, like a machine that hangs.

    `drop_silently` mutes only the current connections, like a firewall that drops idle ones.
    """

    def __init__(self, directory: Path, sockets: Path) -> None:
        self.directory = directory
        self._path = directory / NAME
        self.target = sockets / NAME
        self._server: asyncio.Server | None = None
        self._ends: set[asyncio.StreamWriter] = set()
        self._dropped: set[asyncio.StreamWriter] = set()
        self.carried = 0
        self.muted = False

    def __repr__(self) -> str:
        return f"<Cable {'up' if self._server else 'cut'}, {len(self._ends) // 2} connections>"

    async def plug(self) -> None:
        self.muted = False
        self._server = await asyncio.start_unix_server(self._carry, self._path)

    async def cut(self) -> None:
        """Stop listening and abort all connections."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for end in tuple(self._ends):
            end.transport.abort()
        await server.wait_closed()
        self._path.unlink(missing_ok=True)

    def drop_silently(self) -> None:
        self._dropped |= self._ends

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(self.target)
        self._ends |= {writer, far_writer}
        self.carried += 1
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, far_writer))
                group.create_task(self._pump(far_reader, writer))
        finally:
            self._ends -= {writer, far_writer}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                if not self.muted and writer not in self._dropped:
                    writer.write(data)
        except ConnectionError:
            pass
        finally:
            writer.close()
