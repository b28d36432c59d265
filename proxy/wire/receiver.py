"""Posting deliveries to webhook receivers, which are untrusted.

The guard checks the address of every connection. Redirects are not followed. One deadline covers connecting, sending and the
reply. The reply is read up to a limit and not decompressed. Failures are not raised: the outcome is returned.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from yarl import URL

from proxy import __version__
from proxy.core.lru_cache import LruCache
from proxy.wire.http1 import BadReply
from proxy.wire.outbound_guard import Blocked, OutboundGuard, UrlRefused
from proxy.wire.receiver_connection import (
    ConnectionBroken,
    Origin,
    ReceiverConnection,
    ReceiverConnections,
    ReceiverReply,
    origin_of,
    request_start_of,
)

# How an attempt ends. `answered`: with a status. Otherwise no reply arrived in time, the receiver was not reachable, the
# connection was lost, the address is not allowed, or the reply is not HTTP.
DeliveryOutcome = Literal["answered", "timeout", "unreachable", "reset", "refused", "invalid"]

# Characters of an unsuccessful reply that the webhook's owner can read.
EXCERPT = 300
# Bounds the cache of checked URLs.
CHECKED = 10_000
# How much of an exchange is recorded: bytes of the body and of the headers, and characters of a signature.
SHOWN_OF_SUCCESS, SHOWN_OF_FAILURE = 256, 4096
SHOWN_OF_HEADERS = 1024
SHOWN_OF_SIGNATURE = 12
_OUTCOMES: tuple[tuple[tuple[type[Exception], ...], DeliveryOutcome], ...] = (
    ((TimeoutError,), "timeout"),
    ((Blocked,), "refused"),
    ((ConnectionBroken,), "reset"),
    ((OSError,), "unreachable"),
    # Not HTTP; or a header that cannot be sent.
    ((BadReply, ValueError), "invalid"),
)
_COOKIE = re.compile(r"^(set-cookie:\s*[^=;]*=).*", re.IGNORECASE)
_UNPRINTABLE = re.compile(r"[^\t\n\x20-\x7e\xa0-\U0010ffff]")
_UNSEEN = re.compile(r"[^\x20-\x7e\xa0-\U0010ffff]+")
_HEADERS = {"User-Agent": f"Penstock-Webhooks/{__version__}", "Accept": "*/*", "Accept-Encoding": "identity"}


class _ConnectTimeout(TimeoutError):
    """There was no connection in time, so nothing was sent."""


class RecordedExchange(NamedTuple):
    """The parts of an attempt that its owner can read: header lines without secrets, and the beginning of the reply's body."""

    sent: str
    headers: str = ""
    body: str = ""


@dataclass(frozen=True, slots=True)
class DeliveryReply:
    outcome: DeliveryOutcome
    status: int | None = None
    excerpt: str | None = None
    # As received, or empty.
    retry_after: str = ""
    # None if nothing was sent.
    exchange: RecordedExchange | None = field(default=None, compare=False)


class Receiver:
    """Posts to all receivers. Callers limit how many posts run at once."""

    def __init__(self, guard: OutboundGuard, *, timeout_s: float, tls: ssl.SSLContext | None = None) -> None:
        self._guard = guard
        self._timeout_s = timeout_s
        self._connections = ReceiverConnections(guard, tls=tls)
        self._checked: LruCache[str, tuple[Origin, bytes]] = LruCache(CHECKED)

    def __repr__(self) -> str:
        return f"<Receiver {self._timeout_s} s, {self._guard!r}>"

    async def post(self, url: str, body: bytes, *, headers: Mapping[str, str]) -> DeliveryReply:
        try:
            origin, start = self._check(url)
        except UrlRefused:
            return DeliveryReply("refused")
        except ValueError:  # A host that cannot be sent.
            return DeliveryReply("invalid")
        sent = _sent(start, headers)
        try:
            return _reply(await self._post(origin, start, body, headers), sent)
        except Exception as exc:
            if (outcome := _outcome(exc)) is None:
                raise
            is_sent = outcome not in ("unreachable", "refused") and not isinstance(exc, _ConnectTimeout)
            return DeliveryReply(outcome, exchange=RecordedExchange(sent) if is_sent else None)

    async def _post(self, origin: Origin, start: bytes, body: bytes, headers: Mapping[str, str]) -> ReceiverReply:
        named = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        request = b"%b%bContent-Length: %d\r\n\r\n%b" % (start, named.encode("latin-1"), len(body), body)
        loop = asyncio.get_running_loop()
        end = loop.time() + self._timeout_s
        connection = self._connections.kept(origin) or await self._connect(origin, end)
        try:
            return await connection.post(request, end - loop.time())
        except ConnectionBroken as exc:
            # The receiver closed the idle connection while it was being reused: this does not count as an attempt.
            if not (exc.unused and connection.is_used):
                raise
        except BaseException:
            connection.abort()
            raise
        connection = await self._connect(origin, end)
        try:
            return await connection.post(request, end - loop.time())
        except BaseException:
            connection.abort()
            raise

    async def _connect(self, origin: Origin, end: float) -> ReceiverConnection:
        try:
            async with asyncio.timeout_at(end):
                return await self._connections.connect(origin)
        except TimeoutError:
            raise _ConnectTimeout from None

    def _check(self, text: str) -> tuple[Origin, bytes]:
        checked = self._checked.get(text)
        if checked is None:
            url: URL = self._guard.check(text)
            checked = self._checked[text] = origin_of(url), request_start_of(url, _HEADERS)
        return checked

    async def close(self) -> None:
        await self._connections.close()


def _outcome(exc: Exception) -> DeliveryOutcome | None:
    """The outcome to report for an error; None for an unexpected error."""
    return next((outcome for kinds, outcome in _OUTCOMES if isinstance(exc, kinds)), None)


def _reply(reply: ReceiverReply, sent: str) -> DeliveryReply:
    is_success = 200 <= reply.status < 300
    excerpt = None if is_success else _excerpt(reply.body)
    most = SHOWN_OF_SUCCESS if is_success else SHOWN_OF_FAILURE
    exchange = RecordedExchange(sent, _received(reply.headers), _printable(reply.body[:most]))
    return DeliveryReply("answered", reply.status, excerpt, reply.retry_after, exchange)


def _sent(start: bytes, headers: Mapping[str, str]) -> str:
    """The request's headers, with signatures cut short: a whole one would let its reader replay the delivery."""
    own = start.decode("ascii").partition("\r\n")[2].replace("\r\n", "\n")
    return own + "\n".join(
        [
            f"{name}: {value if 'signature' not in name.lower() else value[:SHOWN_OF_SIGNATURE] + '…'}"
            for name, value in headers.items()
        ]
    )


def _received(headers: bytes) -> str:
    """The reply's headers without its status line, and without the values of cookies."""
    lines = _printable(headers[:SHOWN_OF_HEADERS]).strip().split("\n")[1:]
    return "\n".join([_COOKIE.sub(r"\1…", line) for line in lines])


def _printable(body: bytes) -> str:
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", body.decode("utf-8", "replace").replace("\r\n", "\n"))


def _excerpt(body: bytes) -> str | None:
    """The printable part of the body, on one line."""
    text = _UNSEEN.sub(" ", body.decode("utf-8", "replace")).strip()
    return text[:EXCERPT] or None
