"""TLS to one upstream: its context, the name to verify, and the session that the next connection resumes.

A resumed handshake needs no certificate and no signature, so reconnecting after an upstream closed an idle connection is cheap.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable

from proxy.settings import LinkSettings, client_context
from proxy.wire.tls_transport import TlsTransport


class TlsClient:
    def __init__(self, link: LinkSettings, host: str) -> None:
        self.context = client_context(link.ca, link.cert, link.key, link.min_tls)
        self.name = link.server_name or host
        self._session: ssl.SSLSession | None = None

    def __repr__(self) -> str:
        return f"<TlsClient {'with' if self._session else 'without'} a session>"

    async def join(self, protocol: asyncio.Protocol, connect: Callable[[asyncio.Protocol], Awaitable[None]]) -> None:
        """Let `connect` open a plain connection, and connect the protocol after the handshake. Raises OSError."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_handshake(exc: Exception | None) -> None:
            if done.done():
                return
            if exc is None:
                protocol.connection_made(tls)
                done.set_result(None)
            else:
                done.set_exception(exc if isinstance(exc, OSError) else ConnectionError(str(exc)))

        tls = TlsTransport(
            self.context,
            protocol,
            on_handshake,
            hostname=self.name,
            session=self._session,
            on_session=self._keep,
        )
        try:
            await connect(tls)  # type: ignore[arg-type]
            await done
        except BaseException:
            tls.abort()
            raise

    def _keep(self, session: ssl.SSLSession) -> None:
        self._session = session
