"""An upstream whose requests are signed: a header of each depends on its body."""

from __future__ import annotations

from collections.abc import Callable

from proxy.core.upstream_health import UpstreamHealth
from proxy.turn_queue import TurnQueue
from proxy.wire.address import UpstreamAddress
from proxy.wire.http_upstream import HttpUpstream
from proxy.wire.upstream import ReplySink, UpstreamConnection
from proxy.wire.write_buffer import WriteBuffer


class SigningUpstream(HttpUpstream):
    """`sign`: makes the header of a body, with its line end."""

    __slots__ = ("_sign",)

    def __init__(
        self,
        health: UpstreamHealth,
        address: UpstreamAddress,
        write_buffer: WriteBuffer,
        turns: TurnQueue,
        *,
        limit: int,
        depth: int,
        batch: int,
        sign: Callable[[bytes], bytes],
    ) -> None:
        super().__init__(health, address, write_buffer, turns, limit=limit, depth=depth, batch=batch)
        self._sign = sign

    def __repr__(self) -> str:
        return f"<SigningUpstream {self.label}>"

    def submit(
        self, sink: ReplySink, *body: bytes, once: bool = False, fresh: bool = False, header: bytes = b""
    ) -> UpstreamConnection | None:
        signed = header + self._sign(b"".join(body))
        return HttpUpstream.submit(self, sink, *body, once=once, fresh=fresh, header=signed)
