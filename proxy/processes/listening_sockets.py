"""The listening sockets of a host's workers, as one of the workers uses them.

Each worker has its own socket on the shared port, and the kernel spreads new connections over all of them, including the socket
of a worker that has died or hangs. The supervisor sends the numbers of such sockets to the other workers, which accept their
connections until a successor does.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence

import orjson


class ListeningSockets:
    """`accept_for_others` is a supervised loop."""

    def __init__(self, fds: Sequence[int], place: int) -> None:
        self._fds = fds
        self._place = place
        self._unattended: frozenset[int] = frozenset()
        self._changed = asyncio.Event()
        self._servers: dict[int, asyncio.Server] = {}

    def __repr__(self) -> str:
        return f"<ListeningSockets own {self._place}, also {sorted(self._servers)}>"

    def own(self) -> socket.socket:
        return socket.socket(fileno=self._fds[self._place])

    def set_unattended(self, line: bytes) -> None:
        """A line of the supervisor with the numbers of all sockets that no worker attends to."""
        self._unattended = frozenset(orjson.loads(line))
        self._changed.set()

    async def accept_for_others(self, accept_from: Callable[[socket.socket], Awaitable[asyncio.Server]]) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            for place in self._servers.keys() - self._unattended:
                self._servers.pop(place).close()
            for place in self._unattended - self._servers.keys():
                self._servers[place] = await accept_from(socket.socket(fileno=os.dup(self._fds[place])))

    def close_others(self) -> None:
        """Close all sockets except this worker's own. As long as one process has a socket open, clients can connect to it."""
        for server in self._servers.values():
            server.close()
        self._servers.clear()
        for index, fd in enumerate(self._fds):
            if index != self._place:
                os.close(fd)


def unattended_line(places: Sequence[int]) -> bytes:
    return orjson.dumps(places) + b"\n"
