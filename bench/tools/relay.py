"""The limit for any proxy in Python: copies bytes between two sockets without parsing. Usage: relay.py PORT UPSTREAM_PORT

Every client gets its own upstream connection. A slow reader pauses reading on the other side.
"""

import asyncio
import sys
from typing import cast

import uvloop


class Side(asyncio.Protocol):
    """One end of a pair; it writes everything it receives to the other end."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: Side | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.other and self.other.transport:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other and self.other.transport:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other and self.other.transport:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.other and self.other.transport:
            self.other.transport.close()


class Front(Side):
    """The client's end. Buffers data that arrives before the upstream connection is open.

    Pausing in connection_made would not help: uvloop starts reading after it in any case.
    """

    def __init__(self, upstream_port: int, tasks: asyncio.TaskGroup) -> None:
        super().__init__()
        self._upstream_port = upstream_port
        self._tasks = tasks
        self._early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._tasks.create_task(self._pair())

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early += data
        elif self.other.transport:
            self.other.transport.write(data)

    async def _pair(self) -> None:
        loop = asyncio.get_running_loop()
        transport, other = await loop.create_connection(Side, "127.0.0.1", self._upstream_port)
        other.other, self.other = self, other
        if self.transport is None:
            transport.close()
        elif self._early:
            transport.write(self._early)


async def main(port: int, upstream_port: int) -> None:
    async with asyncio.TaskGroup() as tasks:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Front(upstream_port, tasks), "127.0.0.1", port, backlog=4096)
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2])))
