"""A connection whose last reply was sent before all of its request had arrived.

Closing a connection while bytes are unread resets it, and a client that is still sending would never see the reply. So the rest
is read and dropped for a while: a slice at a time, in turn with other clients.
"""

from __future__ import annotations

import asyncio

from proxy.web.front.connection_limiter import ConnectionLimiter, LimitedConnection
from proxy.wire.sliced_reading import SlicedReading

# How much is read, and for how long: four times the largest call.
MOST_BYTES = 4_194_304
MOST_S = 5.0


class LingeringConnection(asyncio.Protocol):
    """`client`: an account or an address, whose turns it takes."""

    def __init__(self, limiter: ConnectionLimiter, transport: asyncio.Transport, address: str, client: str) -> None:
        self._limiter = limiter
        self._address = address
        self._client = client
        self._left = MOST_BYTES
        self._until = limiter.now() + MOST_S
        self.transport: asyncio.Transport | None = transport

    def __repr__(self) -> str:
        return f"<LingeringConnection of {self._address}>"

    def begin(self, former: LimitedConnection) -> None:
        """Take over the connection, after the reply was written to it."""
        assert self.transport is not None
        self._limiter.replace(former, self)
        self._limiter.deadline_runs(self)
        self.transport.set_protocol(SlicedReading(self))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self._left -= len(data)
        if self.transport is None:
            return
        if self._left <= 0:
            self.transport.close()
        else:
            self.transport.pause_reading()
            self._limiter.turns.add(self._client, self._read_on)

    def _read_on(self) -> bool:
        if self.transport is not None:
            self.transport.resume_reading()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._limiter.remove(self, self._address)

    def check(self, now: float) -> None:
        if now >= self._until:
            self.force_close()

    def close_if_quiet(self, now: float, quiet_s: float) -> None:
        """It closes soon anyway."""

    def force_close(self) -> None:
        if self.transport is not None:
            self.transport.close()
