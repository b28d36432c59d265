"""Builds the routes from the API spec: every operation has a handler, and there are no other API paths."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import HttpVersion11, web

from proxy.web.api_middleware import CONTINUE, Handler
from proxy.web.api_spec import ApiOperation, ApiSpec

BASE = "/v1"


def of_spec(spec: ApiSpec, handlers: Mapping[str, Handler]) -> list[web.RouteDef]:
    """One route for each operation; an operation without a handler, or the reverse, is a bug."""
    if differing := set(spec.operations) ^ set(handlers):
        raise ValueError(f"operations and handlers differ: {sorted(differing)}")
    return [
        web.route(operation.method, BASE + _pattern(operation), handlers[operation.id], expect_handler=expect)
        for operation in spec.operations.values()
    ]


def _pattern(operation: ApiOperation) -> str:
    """The path as aiohttp matches it. A parameter that is a path takes all segments that follow."""
    pattern = operation.path
    for name, parameter in operation.path_parameters.items():
        if parameter.has_slashes:
            pattern = pattern.replace(f"{{{name}}}", f"{{{name}:.*}}")
    return pattern


def roots_for_keys(spec: ApiSpec) -> set[str]:
    """The first two segments of the paths that are used with a key, such as `/v1/rpc`."""
    return {
        BASE + "/" + operation.path.split("/")[1] for operation in spec.operations.values() if operation.session is None
    }


def own_roots(app: web.Application) -> set[str]:
    """The first segments of all paths, such as `v1` and `docs`."""
    return {resource.canonical.split("/")[1] for resource in app.router.resources()} - {""}


async def expect(request: web.Request) -> None:
    """Answer `Expect: 100-continue`. The middleware refuses any other expectation."""
    if request.headers["Expect"].lower() == CONTINUE and request.version == HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # The interim reply does not count as part of the final one.
        request.writer.output_size = 0
