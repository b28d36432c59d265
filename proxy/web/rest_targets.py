"""Reads requests for routes of REST chains: which route a path names, and the params of its call.

Both ways that serve such requests use it: aiohttp's handler (`rpc/rest_handler.py`) and the hot path
(`front/rest_requests.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from proxy.chains.families import family_of
from proxy.core.event_stream import EVENT_STREAM
from proxy.core.near_names import near_names
from proxy.core.rest_routes import (
    BadTarget,
    RestParams,
    RestTransport,
    RouteTable,
    accepted_type,
    query_of,
    segments_of,
)
from proxy.errors import InvalidRequest, MethodNotAllowed, NotFound
from proxy.services.rpc.networks import Networks, Route

ROOT: Final = "/v1/rest/"
_LONGEST_HEADER: Final = 256


@dataclass(frozen=True, slots=True)
class RestTarget:
    """A request without its body. `headers`: at least those that the chain's API has, by their names in lower case."""

    verb: str
    path: str
    query: str
    accept: str
    headers: Mapping[str, str]


class RestTargets:
    def __init__(self, networks: Networks) -> None:
        self._tables = {
            name: RouteTable(route.policies)
            for name, route in networks.routes.items()
            if family_of(route.network).rest is not None
        }

    def __repr__(self) -> str:
        return f"<RestTargets {', '.join(self._tables)}>"

    def lists(self, verb: str, path: str, route: Route) -> bool:
        """Whether the network has such a route. Raises BadTarget."""
        return verb in self._tables[route.network.id].find(segments_of(path))[0]

    def read(self, request: RestTarget, route: Route, rest: RestTransport) -> tuple[str, RestParams]:
        """The route that the request names, and its params without a body. Raises BadTarget or a Fault."""
        methods, values = self._tables[route.network.id].find(segments_of(request.path))
        if not methods:
            raise self.unknown(request.verb, request.path, route)
        if request.verb not in methods:
            allowed = sorted(methods)
            raise MethodNotAllowed(f"this route has {' and '.join(allowed)} only", allowed=allowed)
        method, events = methods[request.verb], rest.events
        is_stream = events is not None and method == events.method
        types = (EVENT_STREAM,) if is_stream else rest.types
        accept = accepted_type(request.accept, types)
        if not accept:
            raise InvalidRequest(f"Accept: must allow {' or '.join(types)}", param="Accept")
        headers = {name: request.headers[name] for name in sorted(rest.request_headers) if name in request.headers}
        if not all(
            value.isascii() and value.isprintable() and len(value) <= _LONGEST_HEADER for value in headers.values()
        ):
            names = ", ".join(headers)
            raise InvalidRequest(f"the headers {names} must be of printable ASCII, up to {_LONGEST_HEADER} characters")
        query = query_of(request.query)
        if events is not None and is_stream:
            query = {events.parameter: events.wanted(query)}
        return method, RestParams(path=dict(values), query=query, accept=accept, headers=headers)

    def unknown(self, verb: str, path: str, route: Route) -> NotFound:
        """A route that is not listed. Its path is repeated only in the form of a listed one: it may contain a key."""
        family = family_of(route.network)
        refused, name = family.refused, path
        if family.rest is not None and refused:
            name = RouteTable(refused).find(segments_of(path))[0].get(verb, "")
        if name in refused:
            return NotFound(f"the route {name} is not available: {refused[name]}", reason="path")
        asked = f"{verb} {path}".strip()
        nearest = near_names(frozenset(route.policies)).nearest(asked) if len(path) <= 100 else ""
        advice = f"; did you mean {nearest}?" if nearest else ""
        return NotFound(f"{route.network.id} has no such route, or it is not available{advice}", reason="path")


def split_target(target: str) -> tuple[str, str, str, str]:
    """The chain, the network, the path below it, and the query, as they were sent. Raises BadTarget."""
    path, _, query = target.partition("?")
    parts = path.removeprefix(ROOT).split("/", 2)
    if not path.startswith(ROOT) or len(parts) < 2:
        raise BadTarget("the path must start with /v1/rest/{chain}/{network}/, without dot segments")
    return parts[0], parts[1], "/" + "".join(parts[2:]), query
