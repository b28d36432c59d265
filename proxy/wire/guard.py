"""The one way out to addresses that strangers name: URLs are judged as text, connections by the address they go to.

The text alone proves nothing, because a name may resolve to anything and to something else a second later. So the connector
asks again for each socket that is about to be opened, with the very address that the kernel will be given: an address literal
in whatever spelling, a name that was rebound, the target of a redirect. Name look-ups have threads of their own: a name server
that never answers must not keep the rest of the program from resolving its upstreams.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from aiohappyeyeballs import AddrInfoType
from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, TCPConnector
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from proxy.core.egress import EgressPolicy

# Longer than any honest address, shorter than what would be a burden to parse.
LONGEST_URL = 2048
# Look-ups under way at once; and connections.
LOOKUPS = 8
CONNECTIONS = 64
PER_HOST = 8
KEEPALIVE_S = 5.0

# urllib drops tabs and line ends without a word, and some parsers take a backslash for a slash: nothing is read two ways here.
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\]")
_WITH_USER = re.compile(r"[a-z+.-]*://[^/?#]*@", re.IGNORECASE)
# WHATWG URL, 3.5: a host whose last label is a number is an IPv4 address in some spelling or other, or it is invalid.
_ENDS_IN_NUMBER = re.compile(r"(?:^|\.)(?:[0-9]+|0x[0-9a-f]*)\.?$", re.IGNORECASE)
_DOTTED = re.compile(r"(?:0|[1-9][0-9]{0,2})(?:\.(?:0|[1-9][0-9]{0,2})){3}", re.ASCII)


class UrlRefused(ValueError):
    """A URL that may not be followed. The text says why, for the one who wrote it."""


class Blocked(OSError):
    """A connection that was about to go where none may go. All are alike, so that an answer tells nothing about our network."""

    def __init__(self) -> None:
        super().__init__("the address may not be reached")


class Guard:
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
        return f"<Guard {'/'.join(self._schemes)} {sorted(self._ports) or 'any port'} {self.reach!r}>"

    def check(self, text: str) -> URL:
        """The URL, parsed as it will be connected to. Its host may still turn out to be one of ours: see `session`."""
        if len(text) > LONGEST_URL:
            raise UrlRefused(f"is longer than {LONGEST_URL} characters")
        if _UNSAFE.search(text):
            raise UrlRefused("has a space, a control character or a backslash in it")
        try:
            url = URL(text)
            host, port = url.host, url.port
        except ValueError:  # a port that is none, a host that cannot be encoded
            raise UrlRefused("is not a valid URL") from None
        if url.scheme not in self._schemes:
            raise UrlRefused(f"must begin with {' or '.join(f'{scheme}://' for scheme in self._schemes)}")
        if _WITH_USER.match(text):
            raise UrlRefused("must not hold a user or a password")
        if not host:
            raise UrlRefused("has no host")
        if not port or (self._ports and port not in self._ports):
            raise UrlRefused(f"must use the port {' or '.join(map(str, sorted(self._ports))) or 'that it means'}")
        self._check_host(url.raw_host or host)
        return url

    def _check_host(self, host: str) -> None:
        is_literal = ":" in host or _DOTTED.fullmatch(host) is not None
        if not is_literal and "%" in host:
            raise UrlRefused("has a host that is no name")
        if not is_literal and _ENDS_IN_NUMBER.search(host):
            raise UrlRefused("has a host that is neither a name nor an address in its usual form")
        if is_literal and not self.reach.may(host):
            raise UrlRefused("has a host that may not be reached: it is not a public address")

    def session(
        self,
        headers: Mapping[str, str],
        *,
        timeout_s: float,
        connections: int = CONNECTIONS,
        per_host: int = PER_HOST,
        keepalive_s: float = KEEPALIVE_S,
    ) -> ClientSession:
        """A client whose every connection is checked. It keeps no cookies, expands nothing and knows no proxy."""
        connector = TCPConnector(
            limit=connections,
            limit_per_host=per_host,
            keepalive_timeout=keepalive_s,
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
        """For the address that it will be connected to, and no other."""
        family, kind, proto, _, address = info
        if not self.reach.may(str(address[0])):
            raise Blocked
        return socket.socket(family, kind, proto)


class GuardedResolver(AbstractResolver):
    """The system's resolver, on a few threads of its own."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(LOOKUPS, thread_name_prefix="lookup")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, lambda: _look_up(host, port, family))
        return [
            ResolveResult(
                hostname=host, host=str(address[0]), port=port, family=kind, proto=proto, flags=socket.AI_NUMERICHOST
            )
            for kind, _, proto, _, address in found
        ]

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


_Info = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[object, ...]]


def _look_up(host: str, port: int, family: socket.AddressFamily) -> list[_Info]:
    return list(socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG))
