"""The keys in request targets, taken out before anything else sees the target.

A key can be the last segment of a path for JSON-RPC or a socket, `/v1/rpc/{chain}/{network}/{key}`, or `apiKey` in the query of
any path. Handlers, logs, traces and records get the target without it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote, unquote_plus

from aiohttp import web

QUERY_NAME = "apiKey"
_PATH_KEY = re.compile(r"(/v1/(?:rpc|ws|bundler|paymaster)/[^/]+/[^/]+)/([^/]+)(/?)")


@dataclass(frozen=True, slots=True)
class RequestTarget:
    """A target without keys, and the keys that were in it."""

    path: str
    query: str = ""
    path_key: str = ""
    query_keys: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<RequestTarget {self.path} {'with' if self.has_keys else 'without'} keys>"

    @property
    def text(self) -> str:
        return f"{self.path}?{self.query}" if self.query else self.path

    @property
    def has_keys(self) -> bool:
        return bool(self.path_key or self.query_keys)

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.path_key, *self.query_keys)


NO_TARGET = RequestTarget("")
# The target of a request that has keys in its URL.
TARGET = web.RequestKey("target", RequestTarget)


def read_target(text: str) -> RequestTarget:
    """Split a target: a path, with or without a query."""
    path, _, query = text.partition("?")
    key = ""
    if found := _PATH_KEY.fullmatch(path):
        path, key = found[1] + found[3], unquote(found[2])
    if QUERY_NAME not in unquote(query):
        return RequestTarget(path, query, key)
    parts = [part.partition("=") for part in query.split("&")]
    named = [(unquote_plus(name) == QUERY_NAME, name + equals + value, value) for name, equals, value in parts]
    return RequestTarget(
        path,
        "&".join(whole for is_key, whole, _ in named if not is_key),
        key,
        tuple(unquote_plus(value) for is_key, _, value in named if is_key),
    )
