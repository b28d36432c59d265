"""Opening WebSockets to an upstream, with the options of its settings."""

from __future__ import annotations

from typing import Any

import aiohttp
from yarl import URL

from proxy.settings import LinkSettings, client_context
from proxy.wire.address import headers_of
from proxy.wire.upstream import MAX_REPLY_BYTES


class WebSocketLink:
    """The address contains credentials and stays here: no error, log line or `repr` includes it."""

    def __init__(self, link: LinkSettings) -> None:
        self._link = link
        self._url = URL(link.url, encoded=True)

    def __repr__(self) -> str:
        return "<WebSocketLink>"

    def session(self) -> aiohttp.ClientSession:
        link = self._link
        if link.socket:
            return aiohttp.ClientSession(trust_env=False, connector=aiohttp.UnixConnector(link.socket))
        context = client_context(link.ca, link.cert, link.key, link.min_tls) if link.uses_tls else True
        return aiohttp.ClientSession(trust_env=False, connector=aiohttp.TCPConnector(ssl=context))

    async def open(
        self, session: aiohttp.ClientSession, *, heartbeat_s: float, decode_text: bool = True
    ) -> aiohttp.ClientWebSocketResponse[Any]:
        return await session.ws_connect(
            self._url,
            headers=headers_of(self._link),
            heartbeat=heartbeat_s,
            max_msg_size=MAX_REPLY_BYTES,
            compress=0,
            decode_text=decode_text,
            proxy=self._link.proxy or None,
            server_hostname=self._link.server_name or None,
        )
