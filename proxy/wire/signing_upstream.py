"""An upstream whose requests are signed: a header of each depends on its body."""

from __future__ import annotations

from collections.abc import Callable

from proxy.core.upstream_health import UpstreamHealth
from proxy.wire.http_upstream import HttpUpstream, PoolTerms
from proxy.wire.upstream import ReplySink, UpstreamConnection


class SigningUpstream(HttpUpstream):
    """`sign`: makes the header of a body, with its line end."""

    __slots__ = ("_sign",)

    def __init__(self, health: UpstreamHealth, terms: PoolTerms, sign: Callable[[bytes], bytes]) -> None:
        super().__init__(health, terms)
        self._sign = sign

    def __repr__(self) -> str:
        return f"<SigningUpstream {self.label}>"

    def submit(
        self, sink: ReplySink, *body: bytes, once: bool = False, fresh: bool = False, header: bytes = b""
    ) -> UpstreamConnection | None:
        signed = header + self._sign(b"".join(body))
        return HttpUpstream.submit(self, sink, *body, once=once, fresh=fresh, header=signed)
