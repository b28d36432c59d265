"""Posting a delivery to a receiver, whose owner is a stranger.

It may be anywhere, say anything, and take its time. So the connection is the guard's, which judges the very address it goes
to; redirects are not followed; attempt and reply together have one deadline; of the reply no more is read than the limit, and
it is not expanded. Nothing here raises for what happens outside: how it ended is what is returned.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Mapping
from typing import Literal, NamedTuple

from yarl import URL

from proxy import __version__
from proxy.wire.guard import Blocked, Guard, UrlRefused
from proxy.wire.http1 import BadReply
from proxy.wire.receiver_connection import (
    ConnectionBroken,
    Origin,
    ReceiverConnection,
    ReceiverConnections,
    ReceiverReply,
    head_of,
    origin_of,
)

# How an attempt ends: with a status; or without one, because nothing came in time, nobody was reached, the connection was lost,
# the address may not be reached, or what came is no HTTP.
DeliveryOutcome = Literal["answered", "timeout", "unreachable", "reset", "refused", "invalid"]

# Of a reply that is no success, for its receiver's owner to read.
EXCERPT = 300
# Addresses remembered as checked.
CHECKED = 10_000
_UNSEEN = re.compile(r"[^\x20-\x7e\xa0-\U0010ffff]+")
_HEADERS = {"User-Agent": f"Penstock-Webhooks/{__version__}", "Accept": "*/*", "Accept-Encoding": "identity"}


class DeliveryReply(NamedTuple):
    outcome: DeliveryOutcome
    status: int | None = None
    excerpt: str | None = None
    # As it came, or empty.
    retry_after: str = ""


class Receiver:
    """`post` for all receivers there are. Whoever posts sees to it that it is not too much at once."""

    def __init__(self, guard: Guard, *, timeout_s: float, tls: ssl.SSLContext | None = None) -> None:
        self._guard = guard
        self._timeout_s = timeout_s
        self._lines = ReceiverConnections(guard, tls=tls)
        self._checked: dict[str, tuple[Origin, bytes]] = {}

    def __repr__(self) -> str:
        return f"<Receiver {self._timeout_s} s, {self._guard!r}>"

    async def post(self, url: str, body: bytes, *, headers: Mapping[str, str]) -> DeliveryReply:
        try:
            return _reply(await self._ask(*self._check(url), body, headers))
        except TimeoutError:
            return DeliveryReply("timeout")
        except (UrlRefused, Blocked):
            return DeliveryReply("refused")
        except ConnectionBroken:
            return DeliveryReply("reset")
        except OSError:
            return DeliveryReply("unreachable")
        except (BadReply, ValueError):  # no HTTP; or what is neither a name nor a header to the one who has to send it
            return DeliveryReply("invalid")

    async def _ask(self, origin: Origin, head: bytes, body: bytes, headers: Mapping[str, str]) -> ReceiverReply:
        named = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        request = b"%b%bContent-Length: %d\r\n\r\n%b" % (head, named.encode("latin-1"), len(body), body)
        loop = asyncio.get_running_loop()
        end = loop.time() + self._timeout_s
        line = self._lines.kept(origin) or await self._connect(origin, end)
        try:
            return await line.ask(request, end - loop.time())
        except ConnectionBroken as exc:
            # It was closed at the other end in the moment that we took it up again: that was no attempt.
            if not (exc.unused and line.is_used):
                raise
        except BaseException:
            line.cut()
            raise
        line = await self._connect(origin, end)
        try:
            return await line.ask(request, end - loop.time())
        except BaseException:
            line.cut()
            raise

    async def _connect(self, origin: Origin, end: float) -> ReceiverConnection:
        async with asyncio.timeout_at(end):
            return await self._lines.connect(origin)

    def _check(self, text: str) -> tuple[Origin, bytes]:
        found = self._checked.get(text)
        if found is None:
            if len(self._checked) >= CHECKED:
                self._checked.clear()
            url: URL = self._guard.check(text)
            found = self._checked[text] = origin_of(url), head_of(url, _HEADERS)
        return found

    async def close(self) -> None:
        await self._lines.close()


def _reply(said: ReceiverReply) -> DeliveryReply:
    is_success = 200 <= said.status < 300
    return DeliveryReply("answered", said.status, None if is_success else _excerpt(said.body), said.retry_after)


def _excerpt(body: bytes) -> str | None:
    """What can be shown of it, on one line."""
    text = _UNSEEN.sub(" ", body.decode("utf-8", "replace")).strip()
    return text[:EXCERPT] or None
