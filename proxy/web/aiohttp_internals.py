"""The only module that uses undocumented members of aiohttp.

setup.cfg pins aiohttp's minor version, and `tests/web/test_aiohttp_internals.py` names each of these members, so that a new
version fails there first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from aiohttp import HttpVersion, StreamReader, http_parser, web, web_app, web_protocol
from aiohttp._websocket.helpers import websocket_mask
from aiohttp.http_parser import RawRequestMessage
from yarl import URL

from proxy.core.url_aliases import RequestKind
from proxy.web.request_targets import TARGET, RequestTarget, TargetReader

__all__ = [
    "AiohttpConnection",
    "RequestServer",
    "forget_handlers",
    "has_c_parser",
    "make_targets_native",
    "reply_in_version",
    "version_of",
    "websocket_mask",
]

RequestServer: TypeAlias = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

# With this limit, aiohttp's parser stops after each request until it is being served. If the parser read on, an error in later
# bytes would replace the requests that it has already parsed.
web_protocol.MAX_MSG_QUEUE_SIZE = 1


def has_c_parser() -> bool:
    return http_parser.HttpRequestParser is not http_parser.HttpRequestParserPy


def version_of(request: web.BaseRequest) -> HttpVersion:
    """The version in the request line. `request.version` would cache it, so that it could not be replaced."""
    return request._version


def reply_in_version(request: web.BaseRequest, version: HttpVersion) -> None:
    """Reply in this version. aiohttp replies in the version of the request, and caches it at the first look at `version`."""
    request._version = version


def forget_handlers() -> None:
    """Empty aiohttp's cache of handlers, which is the same for all applications of a process. It would keep a stopped one, and
    the memory that it maps, until a thousand other handlers have been used."""
    web_app._cached_build_middleware.cache_clear()


# aiohttp's router walks a path segment by segment and copies the rest each time: 6,000 segments take 10 ms. No path of the
# service has so many, so one with more is not looked for.
MOST_SEGMENTS = 64
_TOO_DEEP = "/path-with-too-many-segments"


def make_targets_native(server: web.Server, targets: TargetReader) -> None:
    """Make requests with the native targets of aliases, and without the keys in targets. aiohttp routes a request when it has
    been made."""
    make_request = server.request_factory

    def make(message: RawRequestMessage, *rest: Any) -> web.BaseRequest:
        given = message.url.raw_path_qs
        if message.url.raw_path.count("/") > MOST_SEGMENTS:
            given = ""
            target = RequestTarget(_TOO_DEEP)
        else:
            target = targets.read(given, message.headers.get("Host", ""), _kind_of(message))
        # A fragment is refused by `check_strictly`, which looks for it in the path.
        if "#" in message.path or (target.text == given and not target.has_keys):
            return make_request(message, *rest)
        url = URL.build(
            scheme=message.url.scheme,
            authority=message.url.raw_authority,
            path=target.path,
            query_string=target.query,
            encoded=True,
        )
        request = make_request(message._replace(path=target.text, url=url), *rest)
        request[TARGET] = target
        return request

    server.request_factory = make


def _kind_of(message: RawRequestMessage) -> RequestKind:
    if message.method in ("POST", "OPTIONS"):
        return "call"
    return "socket" if message.upgrade else "other"


class AiohttpConnection(web.RequestHandler):
    """aiohttp's handler of a connection, with public names for its private state."""

    __slots__ = ()

    @property
    def is_open(self) -> bool:
        """Whether `connection_made` was called, and not yet `connection_lost`."""
        return self._manager is not None

    @property
    def is_held(self) -> bool:
        """Whether aiohttp wants no more bytes at the moment."""
        return self._reading_paused or self._buffer_paused

    @property
    def body_being_read(self) -> StreamReader | None:
        """The body of the request that a handler serves."""
        return None if self._current_request is None else self._current_request.content

    @property
    def bytes_behind_request(self) -> bytes:
        return self._message_tail

    def drop_unserved_request(self) -> None:
        """Do not serve a request that was parsed in this turn. Called before `connection_lost`, which clears state that aiohttp
        would use."""
        if self._messages and self._current_request is None and self._task_handler is not None:
            self._task_handler.cancel()

    def pause_input(self) -> None:
        self._pause_transport_reading()

    def resume_input(self) -> None:
        """Called by aiohttp too, when a body has been read."""
        super()._resume_transport_reading()

    def _resume_transport_reading(self) -> None:
        self.resume_input()

    async def serve(self, request: web.BaseRequest, handler: RequestServer) -> web.StreamResponse:
        """Run the handler of a request whose headers are complete."""
        return await handler(request)

    async def _handle_request(
        self, request: web.BaseRequest, start_time: float | None, request_handler: RequestServer
    ) -> tuple[web.StreamResponse, bool]:
        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            return await self.serve(request, request_handler)

        return await super()._handle_request(request, start_time, handle)
