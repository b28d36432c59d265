"""The address of Valkey or Redis.

    valkey://user:password@host:6379/0                 one server; redis:// means the same, valkeys:// and rediss:// use TLS
    valkey://host1:6379,host2:6379                     several: nodes of a Cluster, or servers, one of which takes writes
    valkey://host1:26379,host2:26379/0?sentinel=name   the Sentinels that know the primary of this name

All keys contain the same hash tag, so a Cluster keeps them on one node; a node that does not have them names the one that does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

# All keys have this hash tag.
TAG = "{penstock}"
DEFAULT_PORT = 6379
_MOVED = re.compile(r"^MOVED \d+ (.+):(\d+)$")

HostPort = tuple[str, int]


@dataclass(frozen=True, slots=True)
class ValkeyAddress:
    servers: tuple[HostPort, ...]
    tls: bool
    username: str
    password: str
    database: int
    # The name of the primary, if the servers are Sentinels.
    sentinel: str

    def __repr__(self) -> str:
        """Without the credentials."""
        return f"<ValkeyAddress {', '.join(f'{host}:{port}' for host, port in self.servers)}>"

    def auth(self) -> tuple[str, ...]:
        return ("AUTH", self.username or "default", self.password) if self.password else ()

    def login(self) -> list[tuple[str, ...]]:
        """The commands that a new connection starts with."""
        words: list[tuple[str, ...]] = [("HELLO", "3", *self.auth())]
        if self.database:
            words.append(("SELECT", str(self.database)))
        return words


def address_of(url: str) -> ValkeyAddress:
    parts = urlsplit(url)
    # urlsplit does not understand several hosts: it takes the port for all that follows the first colon.
    login, _, hosts = parts.netloc.rpartition("@")
    username, _, password = login.partition(":")
    path = parts.path.strip("/")
    return ValkeyAddress(
        tuple(_host_port(each) for each in hosts.split(",")),
        tls=parts.scheme.endswith("s") and parts.scheme != "redis",
        username=unquote(username),
        password=unquote(password),
        database=int(path) if path.isdecimal() else 0,
        sentinel=parse_qs(parts.query).get("sentinel", [""])[0],
    )


def is_misplaced(error: str) -> bool:
    """Whether another server is needed: this one does not have the keys, is a replica, or has lost the functions."""
    return error.startswith(("MOVED", "READONLY", "CLUSTERDOWN", "MASTERDOWN", "ERR Function not found"))


def moved_to(error: str) -> HostPort | None:
    """The node that a Cluster's error names."""
    match = _MOVED.match(error)
    return (match[1], int(match[2])) if match else None


def _host_port(text: str) -> HostPort:
    host, _, port = text.rpartition(":") if re.search(r":\d+$", text) else (text, "", "")
    return host.strip("[]"), int(port or DEFAULT_PORT)
