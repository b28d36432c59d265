"""TLS for client connections: each is counted and has a deadline from its start, and becomes a `FrontConnection` after its
handshake.

All connections start with one context. Its callback selects the certificate for the client's server name, so new certificates
take effect for new connections while open ones continue.
"""

from __future__ import annotations

import asyncio
import ssl
from functools import partial

from proxy import telemetry
from proxy.settings import Certificates, TlsSettings
from proxy.web.front.connection_limiter import ConnectionLimiter
from proxy.wire.tls_transport import TlsTransport


class TlsListener:
    """Makes the protocol of each new connection: `create_server` calls it."""

    def __init__(self, limiter: ConnectionLimiter, tls: TlsSettings, certificates: Certificates) -> None:
        self._limiter = limiter
        self._tls = tls
        # Only the context that created a session can resume it, so all connections start with the same one.
        self._base = certificates.contexts(tls)[0][1]
        self._base.sni_callback = self._choose
        self._default = self._base
        self._by_name: dict[str, ssl.SSLContext] = {}
        self.renew(certificates)

    def __repr__(self) -> str:
        return f"<TlsListener {self.names}>"

    @property
    def names(self) -> list[str]:
        return sorted(self._by_name)

    def __call__(self) -> asyncio.Protocol:
        return PendingHandshake(self._limiter, self._base)

    def renew(self, certificates: Certificates) -> None:
        """Use these certificates for new connections."""
        contexts = certificates.contexts(self._tls)
        self._default = contexts[0][1]
        # If several certificates have the same name, the first one is used.
        self._by_name = {name: context for names, context in reversed(contexts) for name in names}

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, base: ssl.SSLContext) -> None:
        connection.context = self._context_for((name or "").lower())

    def _context_for(self, name: str) -> ssl.SSLContext:
        # RFC 6125, 6.4.3: a wildcard stands for one label.
        wildcard = f"*.{name.partition('.')[2]}"
        return self._by_name.get(name) or self._by_name.get(wildcard) or self._default


class PendingHandshake(asyncio.Protocol):
    """A connection before the end of its handshake. It counts as a connection and has the deadline of a request's headers."""

    def __init__(self, limiter: ConnectionLimiter, context: ssl.SSLContext) -> None:
        self._limiter = limiter
        self._context = context
        self._plain: asyncio.Transport | None = None
        self._tls: TlsTransport | None = None
        self._front: asyncio.Protocol | None = None
        self._address = ""
        self._since = 0.0

    def __repr__(self) -> str:
        return f"<PendingHandshake {self._tls!r}>"

    @property
    def transport(self) -> None:
        """No reply can be written: the client would not understand it."""
        return

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._plain = transport  # type: ignore[assignment]
        peer = transport.get_extra_info("peername")
        self._address = peer[0] if isinstance(peer, tuple) else ""
        self._since = self._limiter.now()
        self._front = self._limiter()
        # A handshake costs as much as many calls, so the handshakes of one address take turns with other clients' work.
        take_turn = partial(self._limiter.turns.add, self._address)
        self._tls = TlsTransport(self._context, self._front, self._on_handshake, take_turn=take_turn)
        transport.set_protocol(self._tls)  # type: ignore[arg-type]
        self._limiter.deadline_runs(self)
        self._limiter.add(self, self._address)
        self._tls.connection_made(transport)

    def _on_handshake(self, exc: Exception | None) -> None:
        self._limiter.remove(self, self._address)
        tls, front = self._tls, self._front
        assert tls is not None
        assert front is not None
        self._front = self._plain = None
        if exc is None:
            front.connection_made(tls)
        else:
            telemetry.tls_handshake_failures_total.inc()

    # Called by the connection limiter

    def check(self, now: float) -> None:
        if now - self._since > self._limiter.limits.header_timeout_s:
            self.force_close()

    def close_if_quiet(self, now: float, quiet_s: float) -> None:
        if now - self._since >= quiet_s:
            self.force_close()

    def force_close(self) -> None:
        if self._plain is not None:
            self._plain.abort()
