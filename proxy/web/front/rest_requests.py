"""GET requests for routes of REST chains on the hot path.

A target becomes the call that aiohttp's handler makes of it, by the same code (`rest_targets.py`). What that refuses, streams
of events, and everything else that is unusual is left to the handler: None means *hand over*. A parsed request is remembered
with its header block, so a repeated one takes a look-up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, final

from proxy.chains.families import family_of
from proxy.core.caching import key_of
from proxy.core.event_stream import EVENT_STREAM
from proxy.core.jsonrpc import RawCall
from proxy.core.rest_routes import BadTarget, write_params
from proxy.errors import Fault
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.network_state import NetworkState
from proxy.services.rpc.networks import Route
from proxy.web.request_targets import read_target
from proxy.web.rest_targets import ROOT, RestTarget, RestTargets, split_target

# Longer targets are read by aiohttp's handler, in turn with other clients.
LONGEST_TARGET: Final = 1024
# aiohttp's handler refuses more segments.
MOST_SLASHES: Final = 64
_GET, _VERSION = b"GET ", b" HTTP/1.1"
_LINE_START: Final = _GET + ROOT.encode("ascii")
# Bytes that no server or client reads in another way than as they are.
_TARGET: Final = re.compile(rb"[A-Za-z0-9/_?=&%.~:,@+-]+")
_ACCEPT: Final = b"accept"
# Replies to requests with a cookie are not compressed: see `compress` in web/reply.py.
_COOKIE: Final = b"cookie"
# An empty id: a REST route has none.
_NO_ID: Final = b""


@final
class RouteRequest:
    """A request as a call, and its price as long as the head does not move."""

    __slots__ = ("_moves", "_tip", "_units", "cache_key", "call", "method")

    def __init__(self, call: RawCall, policy: MethodPolicy) -> None:
        self.call = call
        self.method = call[0]
        self.cache_key = key_of(policy.request_tail, call[1])
        self._moves = self._tip = -1
        self._units = 0

    def __repr__(self) -> str:
        return f"<RouteRequest {self.method}>"

    def price(self, policy: MethodPolicy, state: NetworkState) -> int:
        moves, tip = state.replies.moves, state.heads.tip
        if moves != self._moves or tip != self._tip:
            self._units = state.price(policy, self.call[1])
            self._moves, self._tip = moves, tip
        return self._units


class RestLocation:
    """A target that is split: its route, the path below the network, its query, and the keys in it."""

    __slots__ = ("keys", "path", "query", "route")

    def __init__(self, route: Route, path: str, query: str, keys: tuple[str, ...]) -> None:
        self.route = route
        self.path = path
        self.query = query
        self.keys = keys

    def __repr__(self) -> str:
        return f"<RestLocation {self.route.network.id} {'with' if any(self.keys) else 'without'} keys>"


@final
class RouteRequestReader:
    def __init__(self, routes: Mapping[str, Route], targets: RestTargets) -> None:
        """`routes`: those of REST chains, by chain and network as paths name them, such as `ethereum-beacon/mainnet`."""
        self._routes = dict(routes)
        self._targets = targets
        transports = [rest for route in routes.values() if (rest := family_of(route.network).rest) is not None]
        # The names of headers that are a part of a request.
        self._names = frozenset(name.encode() for rest in transports for name in rest.request_headers) | {
            _ACCEPT,
            _COOKIE,
        }

    def __repr__(self) -> str:
        return f"<RouteRequestReader {', '.join(self._routes)}>"

    def is_significant(self, line: bytes) -> bool:
        """Whether a header line is a part of the request, besides those that all requests have."""
        return line.partition(b":")[0].lower() in self._names

    def locate(self, line: bytes) -> RestLocation | None:
        """Find the route of a request line."""
        if not (line.startswith(_LINE_START) and line.endswith(_VERSION)):
            return None
        text = line[len(_GET) : -len(_VERSION)]
        if len(text) > LONGEST_TARGET or text.count(b"/") > MOST_SLASHES or not _TARGET.fullmatch(text):
            return None
        target = read_target(text.decode("ascii"))
        try:
            chain, network, path, query = split_target(target.text)
        except BadTarget:
            return None
        route = self._routes.get(f"{chain}/{network}")
        return None if route is None else RestLocation(route, path, query, target.keys)

    def read(self, location: RestLocation, lines: Sequence[bytes]) -> RouteRequest | None:
        """The request with these significant header lines."""
        rest = family_of(location.route.network).rest
        headers: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(b":")
            if (name := name.lower()) in self._names:
                if name == _COOKIE or name.decode() in headers or not value.isascii():
                    return None
                headers[name.decode()] = value.strip(b" \t").decode("ascii")
        accept = headers.pop(_ACCEPT.decode(), "")
        if rest is None or EVENT_STREAM in accept:
            return None
        request = RestTarget("GET", location.path, location.query, accept, headers)
        try:
            # To say what is wrong with a target takes longer than to find out that it is.
            if not self._targets.lists("GET", location.path, location.route):
                return None
            method, params = self._targets.read(request, location.route, rest)
        except (BadTarget, Fault):
            return None
        if params.accept == EVENT_STREAM:
            return None
        return RouteRequest((method, write_params(params), _NO_ID), location.route.policies[method])
