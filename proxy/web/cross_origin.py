"""Requests of web pages from other origins (CORS: https://fetch.spec.whatwg.org/#http-cors-protocol).

A preflight carries no key, so its reply is the same for every origin: it lets the page send its request, and does not reveal
which origins keys allow. The page may read the reply to that request if its key allows the origin; a key without a list of
origins follows the operator's `server.cors_origins`. Replies to requests without a valid key, such as a 401, can be read by
every page. Cookies are never accepted from other origins, and the paths for signed-in people have no CORS headers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from aiohttp import web

from proxy.core.access import Key, KeyRestrictions

ANY = "*"
# Browsers send another preflight after this time. Chromium caches one for at most two hours.
MAX_AGE_S = 7200
# A wildcard covers every header but Authorization.
_ALLOWED_HEADERS = "Authorization, *"
_EXPOSED = (
    "Retry-After, X-Block-Number, X-Cache, X-Compute-Units, X-Cost, X-RateLimit-Limit, X-RateLimit-Remaining, "
    "X-RateLimit-Reset, X-Request-Id, X-Verified"
)


class CrossOrigin:
    def __init__(self, roots: Collection[str], origins: Sequence[str]) -> None:
        """`roots`: the first two segments of the paths that keys are used on. `origins`: the operator's default."""
        self._roots = frozenset(roots)
        self._allows_any = ANY in origins
        self._defaults = KeyRestrictions((), tuple(origins))

    def __repr__(self) -> str:
        return f"<CrossOrigin {', '.join(self._defaults.origins) or 'allowed origins of keys only'}>"

    def preflight(self, request: web.Request) -> web.Response | None:
        """The reply to a preflight, or None for any other request."""
        if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
            return None
        unrouted = request.match_info.http_exception
        if not self._takes_part(request) or not isinstance(unrouted, web.HTTPMethodNotAllowed):
            return None
        headers = {
            "Access-Control-Allow-Methods": ", ".join(sorted(unrouted.allowed_methods)),
            "Access-Control-Allow-Headers": _ALLOWED_HEADERS,
            "Access-Control-Max-Age": str(MAX_AGE_S),
        }
        return web.Response(status=204, headers=headers)

    def add_headers(self, request: web.Request, reply: web.StreamResponse, key: Key | None) -> None:
        """Let the page read the reply, if the key or the operator allows its origin."""
        if not self._takes_part(request):
            return
        reply.headers["Vary"] = ", ".join((*reply.headers.getall("Vary", ()), "Origin"))
        if allowed := self._allowed(key, request.headers["Origin"]):
            reply.headers["Access-Control-Allow-Origin"] = allowed
            reply.headers["Access-Control-Expose-Headers"] = _EXPOSED

    def _takes_part(self, request: web.Request) -> bool:
        return "Origin" in request.headers and "/".join(request.path.split("/", 3)[:3]) in self._roots

    def _allowed(self, key: Key | None, origin: str) -> str:
        """The origin that may read replies to this key; empty if it may not."""
        if key is not None and key.restrictions is not None and key.restrictions.origins:
            return origin if key.restrictions.has_origin(origin) else ""
        if key is None or self._allows_any:
            return ANY
        return origin if self._defaults.has_origin(origin) else ""
