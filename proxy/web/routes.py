"""Routes are the OpenAPI document's: every operation has a handler, and no other path exists."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from aiohttp import HttpVersion11, web

from proxy.web.api_spec import ApiSpec
from proxy.web.gate import CONTINUE

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
BASE = "/v1"


def of_spec(spec: ApiSpec, handlers: Mapping[str, Handler]) -> list[web.RouteDef]:
    """One route for each operation; an operation without a handler, or the reverse, is a bug."""
    if differing := set(spec.operations) ^ set(handlers):
        raise ValueError(f"operations and handlers differ: {sorted(differing)}")
    return [
        web.route(operation.method, BASE + operation.path, handlers[operation.id], expect_handler=expect)
        for operation in spec.operations.values()
    ]


async def expect(request: web.Request) -> None:
    """`Expect: 100-continue` is answered; what else somebody may expect is the gate's to refuse."""
    if request.headers["Expect"].lower() == CONTINUE and request.version == HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # What was written so far is no part of the reply.
        request.writer.output_size = 0
