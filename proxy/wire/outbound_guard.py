"""Protection against server-side request forgery: all connections to untrusted URLs are made through a guard.

A URL is checked as text, and each connection by the address it goes to. The text alone proves nothing, because a name may
resolve to any address, and to another one a second later. So the connector checks every socket before it is opened, with the
address that the kernel will get: an address literal in any spelling, a name that was rebound, the target of a redirect. Name
lookups use separate threads, so that a name server that never replies cannot block the lookups of upstreams.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from aiohappyeyeballs import AddrInfoType
from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, TCPConnector
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from proxy.connection_queue import ConnectionQueue, TooManyWaiting
from proxy.core.egress import EgressPolicy
from proxy.tasks import client_of_task

# Longer than any legitimate URL, and short enough to parse cheaply.
LONGEST_URL = 2048
# Concurrent name lookups and connections, and how many of each a client may have in progress or waiting in the queue.
LOOKUPS = 32
CONNECTIONS = 64
MOST_OF_A_CLIENT = 1000
# A lookup that gets no thread for this long fails. Deadlines of callers are shorter.
LOOKUP_WAIT_S = 60.0
PER_HOST = 8
KEEPALIVE_S = 5.0

# urllib silently drops tabs and line ends, and some parsers read a backslash as a slash: such ambiguous URLs are refused.
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\]")
_WITH_USER = re.compile(r"[a-z+.-]*://[^/?#]*@", re.IGNORECASE)
# WHATWG URL, 3.5: a host whose last label is a number is an IPv4 address in some spelling, or invalid.
_ENDS_IN_NUMBER = re.compile(r"(?:^|\.)(?:[0-9]+|0x[0-9a-f]*)\.?$", re.IGNORECASE)
_DOTTED = re.compile(r"(?:0|[1-9][0-9]{0,2})(?:\.(?:0|[1-9][0-9]{0,2})){3}", re.ASCII)


class UrlRefused(ValueError):
    """A URL that must not be used. The message explains why to its author."""


class Blocked(OSError):
    """A connection to a forbidden address. The message is always the same, so that it reveals nothing about our network."""

    def __init__(self) -> None:
        super().__init__("connections to this address are not allowed")


class OutboundGuard:
    def __init__(
        self,
        reach: EgressPolicy,
        *,
        http: bool = False,
        ports: Iterable[int] = (443,),
        resolver: AbstractResolver | None = None,
    ) -> None:
        self.reach = reach
        self._schemes = ("https", "http") if http else ("https",)
        self._ports = frozenset(ports)
        self.resolver = resolver

    def __repr__(self) -> str:
        return f"<OutboundGuard {'/'.join(self._schemes)} {sorted(self._ports) or 'any port'} {self.reach!r}>"

    def check(self, text: str) -> URL:
        """Parse and check a URL. Its host may still resolve to a private address: see `session`."""
        if len(text) > LONGEST_URL:
            raise UrlRefused(f"is longer than {LONGEST_URL} characters")
        if _UNSAFE.search(text):
            raise UrlRefused("must not contain spaces, control characters or backslashes")
        try:
            url = URL(text)
            host, port = url.host, url.port
        except ValueError:  # An invalid port, or a host that cannot be encoded.
            raise UrlRefused("is not a valid URL") from None
        if url.scheme not in self._schemes:
            raise UrlRefused(f"must begin with {' or '.join(f'{scheme}://' for scheme in self._schemes)}")
        if _WITH_USER.match(text):
            raise UrlRefused("must not contain a user name or a password")
        if not host:
            raise UrlRefused("has no host")
        if not port or (self._ports and port not in self._ports):
            raise UrlRefused(f"must use the port {' or '.join(map(str, sorted(self._ports))) or 'of its scheme'}")
        self._check_host(url.raw_host or host)
        return url

    def _check_host(self, host: str) -> None:
        is_literal = ":" in host or _DOTTED.fullmatch(host) is not None
        if not is_literal and "%" in host:
            raise UrlRefused("has an invalid host")
        if not is_literal and _ENDS_IN_NUMBER.search(host):
            raise UrlRefused("has a host that is neither a name nor a regular address")
        if is_literal and not self.reach.may(host):
            raise UrlRefused("must have a public address as its host")

    def session(self, headers: Mapping[str, str], *, timeout_s: float) -> ClientSession:
        """A client whose connections are all checked. It stores no cookies, does not decompress and uses no proxy."""
        connector = TCPConnector(
            limit=CONNECTIONS,
            limit_per_host=PER_HOST,
            keepalive_timeout=KEEPALIVE_S,
            resolver=self.resolver or GuardedResolver(),
            ttl_dns_cache=10,
            socket_factory=self.open_socket,
        )
        return ClientSession(
            connector=connector,
            headers=headers,
            cookie_jar=DummyCookieJar(),
            timeout=ClientTimeout(total=timeout_s),
            auto_decompress=False,
            trust_env=False,
        )

    def open_socket(self, info: AddrInfoType) -> socket.socket:
        """Open a socket for this address, if it is allowed."""
        family, kind, proto, _, address = info
        if not self.reach.may(str(address[0])):
            raise Blocked
        return socket.socket(family, kind, proto)


class GuardedResolver(AbstractResolver):
    """The system's resolver, on separate threads.

    A name whose servers do not answer occupies a thread for up to half a minute, even after its caller has given up. So the
    threads are shared between clients, and one with many such names does not block the lookups of others.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(LOOKUPS, thread_name_prefix="lookup")
        self._turns = ConnectionQueue(LOOKUPS, per_client=MOST_OF_A_CLIENT)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        addresses = await self._look_up(host, port, family)
        return [
            ResolveResult(
                hostname=host, host=str(address[0]), port=port, family=kind, proto=proto, flags=socket.AI_NUMERICHOST
            )
            for kind, _, proto, _, address in addresses
        ]

    async def _look_up(self, host: str, port: int, family: socket.AddressFamily) -> list[_Info]:
        loop, client = asyncio.get_running_loop(), client_of_task.get()
        try:
            await self._turns.enter(client, within_s=LOOKUP_WAIT_S)
        except (TimeoutError, TooManyWaiting) as exc:
            raise OSError("too many name lookups") from exc

        def leave(_: object) -> None:
            with suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(self._turns.leave, client)

        looking = self._threads.submit(_look_up, host, port, family)
        looking.add_done_callback(leave)
        return await asyncio.wrap_future(looking)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


_Info = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[object, ...]]


def _look_up(host: str, port: int, family: socket.AddressFamily) -> list[_Info]:
    return list(socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG))
