"""Request targets: keys are taken out of them, and URLs of other services become native ones, before anything else sees them.

A key can be the last segment of a path for JSON-RPC or a socket, `/v1/rpc/{chain}/{network}/{key}`, the segment before a route
of a REST chain, `/v1/rest/{chain}/{network}/{key}/…`, or `apiKey` in the query of any path. Aliases that are switched on
(core/url_aliases) map other URLs to a network and a key. Handlers, logs, traces and records get the native target without keys.
A slash at the end of a path for JSON-RPC is dropped: clients of Bitcoin add one to every URL. So is `/websocket` at the end of
a path for sockets, which clients of Cosmos chains add.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, unquote_plus

from aiohttp import web

from proxy.core.url_aliases import RequestKind, SplitUrl, UrlAliases

QUERY_NAME = "apiKey"
_PATH_KEY = re.compile(r"(/v1/(?:rpc|ws|bundler|paymaster)/[^/]+/[^/]+)/([^/]+)(/?)")
_SLASH = re.compile(r"(/v1/rpc/[^/]+/[^/]+)/")
_REST_KEY = re.compile(r"(/v1/rest/[^/]+/[^/]+)/([^/]+)(/.*)?")
# A route never begins like a key.
_KEY_STARTS = ("svc_live_", "svc_test_")

# Segments and parameters of URLs of other services. To split thousands takes the loop's time, before a key is known.
MOST_SEGMENTS, MOST_PARAMETERS = 16, 128

_LIST_NAME = re.compile(r"(\w+)(?:\[\]|%5[Bb]%5[Dd])", re.ASCII)


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
    if path.startswith("/v1/ws/"):
        path = path.removesuffix("/websocket")
    if match := _PATH_KEY.fullmatch(path):
        path, key = match[1] + match[3], unquote(match[2])
    elif match := _SLASH.fullmatch(path):
        path = match[1]
    elif (match := _REST_KEY.fullmatch(path)) and unquote(match[2]).startswith(_KEY_STARTS):
        path, key = match[1] + (match[3] or "/"), unquote(match[2])
    if QUERY_NAME not in unquote(query):
        return RequestTarget(path, query, key)
    parts = [part.partition("=") for part in query.split("&")]
    named = [(_is_key(name), name + equals + value, value) for name, equals, value in parts]
    return RequestTarget(
        path,
        "&".join(whole for is_key, whole, _ in named if not is_key),
        key,
        tuple(unquote_plus(value) for is_key, _, value in named if is_key),
    )


def _is_key(name: str) -> bool:
    return name == QUERY_NAME or ("%" in name and unquote_plus(name) == QUERY_NAME)


class TargetReader:
    """Reads targets with the aliases that are switched on."""

    def __init__(self, aliases: UrlAliases | None = None, own_roots: Collection[str] = ()) -> None:
        """`own_roots`: the first segments of the service's own paths, which are never aliases."""
        self._aliases = aliases
        self._own_roots = frozenset(own_roots)

    def __repr__(self) -> str:
        return f"<TargetReader {self._aliases!r}>"

    def read(self, text: str, host: str, kind: RequestKind) -> RequestTarget:
        """`text`: a path, with or without a query."""
        if self._aliases and (native := self._native(self._aliases, text, host, kind)) is not None:
            return native
        return read_target(text)

    def _native(self, aliases: UrlAliases, text: str, host: str, kind: RequestKind) -> RequestTarget | None:
        path, _, query = text.partition("?")
        if path.count("/") > MOST_SEGMENTS or query.count("&") >= MOST_PARAMETERS:
            return None
        segments = path.split("/")[1:]
        if not segments or segments[0] in self._own_roots:
            return None
        labels = host.partition(":")[0].lower().split(".")
        url = SplitUrl(labels, [unquote(each) for each in segments], parse_qsl(query, keep_blank_values=True))
        if (meaning := aliases.read(url, kind)) is None:
            return None
        stem = "rpc" if kind == "call" else "ws"
        parts = [part for part in query.split("&") if unquote_plus(part.partition("=")[0]) not in meaning.taken]
        if meaning.path:
            rest = read_target(f"/?{_with_joined_lists(parts)}")
            return RequestTarget(meaning.path, rest.query, meaning.key, rest.query_keys)
        rest = read_target(f"/?{'&'.join(parts)}")
        return RequestTarget(f"/v1/{stem}/{meaning.network}", rest.query, meaning.key, rest.query_keys)


def _with_joined_lists(parts: Sequence[str]) -> str:
    """A query whose lists, `name[]=a&name[]=b`, have the form of the API: `name=a,b`."""
    plain, lists = list[str](), dict[str, list[str]]()
    for part in parts:
        name, _, value = part.partition("=")
        if match := _LIST_NAME.fullmatch(name):
            lists.setdefault(match[1], []).append(value)
        else:
            plain.append(part)
    return "&".join((*plain, *(f"{name}={','.join(values)}" for name, values in lists.items())))
