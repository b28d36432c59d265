"""Sends a large reply from memory in slices: the kernel may take megabytes at once, and other clients would wait for that."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, final

from proxy.services.rpc.batches import slices
from proxy.turn_queue import TurnQueue
from proxy.web.front.reply_stream import ReplyStream
from proxy.wire.upstream import Piece

# A reply up to this size is written at once.
AT_ONCE: Final = 262_144


@final
class ReplySlices:
    """The unsent rest of a large reply. A slice is sent in each of the client's turns."""

    __slots__ = ("_client", "_on_end", "_rest", "_stream", "_turns")

    def __init__(
        self, parts: tuple[Piece, ...], stream: ReplyStream, client: str, turns: TurnQueue, on_end: Callable[[], None]
    ) -> None:
        self._stream, self._client, self._turns, self._on_end = stream, client, turns, on_end
        self._rest: deque[Piece] = deque()
        for part in parts:
            self._rest.extend(slices(part))

    def __repr__(self) -> str:
        return f"<ReplySlices {len(self._rest)} left>"

    def resume(self) -> None:
        """The client reads again."""
        self._stream.stalled(0.0)
        self._turns.add(self._client, self.send_next)

    def send_next(self) -> bool:
        transport = self._stream.transport
        if not self._rest or transport is None:
            return False
        transport.write(self._rest.popleft())
        if not self._rest:
            self._on_end()
        elif not self._stream.stalled_since:
            self._turns.add(self._client, self.send_next)
        return True
