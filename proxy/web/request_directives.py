"""Reads the directives (`core/directives.py`) of a request that aiohttp serves: from its headers and its query."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from aiohttp import web
from multidict import MultiDict, MultiMapping

from proxy.core import directives
from proxy.core.access import Key
from proxy.core.directives import BY_HEADER, BY_NAME, Directive, Directives


def directives_of(
    request: web.Request, key: Key, labels: Collection[str] | None = None, *, in_query: bool = True
) -> Directives | None:
    """The directives of a request, or None. Raises if one is not valid, if the key may not use it, or if it names an upstream
    that is not among `labels`, which is None for requests that are not sent to one. `in_query`: the query is ours, and not an
    upstream's."""
    given = [*_given(request, in_query=in_query)]
    fresh = "no-cache" in request.headers.get("Cache-Control", "").lower()
    wanted = directives.read(given, fresh=fresh)
    refusal = (
        directives.refusal(given, key.directives)
        or directives.unknown_upstream(wanted, labels)
        or directives.on_live_key(wanted, live=key.live)
    )
    if refusal is not None:
        raise refusal
    if key.fault is not None and (wanted is None or wanted.fault is None):
        return replace(wanted or Directives(), fault=key.fault)
    return wanted


def _given(request: web.Request, *, in_query: bool) -> Iterable[tuple[Directive, str]]:
    for header, text in request.headers.items():
        if (directive := BY_HEADER.get(header.lower())) is not None:
            yield directive, text
    for name, text in request.query.items() if in_query else ():
        if (directive := BY_NAME.get(name)) is not None:
            yield directive, text


def without_directives(query: MultiMapping[str]) -> MultiDict[str]:
    """The other parameters of a query."""
    return MultiDict((name, text) for name, text in query.items() if name not in BY_NAME)
