"""Upstreams that react to hostile calls as real ones do: each rejects, fails or crashes in its own way."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from tests.rpc_upstreams import ScriptedUpstream


def is_hostile(call: dict[str, Any]) -> bool:
    """The steady client sends `eth_call` with an object and a tag, and our own probes send what a chain understands."""
    params = call.get("params")
    if call["method"] == "eth_call":
        return not (isinstance(params, list) and len(params) == 2 and isinstance(params[0], dict) and "to" in params[0])
    good = {"eth_blockNumber": [], "eth_supportedEntryPoints": [], "eth_getBlockByNumber": ["latest", False]}
    return params != good.get(call["method"], {})


class HostileAwareUpstream(ScriptedUpstream):
    """Answers good calls; subclasses say what a hostile one gets."""

    async def _answer(self, request: web.Request) -> web.Response:
        self.requests += 1
        body = orjson.loads(await request.read())
        calls = body if isinstance(body, list) else [body]
        if any(map(is_hostile, calls)):
            return self.reject(request, body)
        replies = [await self._reply(call) for call in calls]
        return _json(replies if isinstance(body, list) else replies[0])

    def _reply_to(self, call: dict[str, Any]) -> dict[str, Any]:
        if is_hostile(call):
            return {"jsonrpc": "2.0", **self.error(call)}
        return {"jsonrpc": "2.0", "id": call["id"], "result": "0x1"}

    def reject(self, request: web.Request, body: Any) -> web.Response:
        if isinstance(body, list):
            return _json([self._reply_to(call) for call in body])
        return _json(self._reply_to(body))

    def error(self, call: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError


class StrictUpstream(HostileAwareUpstream):
    """As JSON-RPC 2.0 has it: an invalid request is answered under no id."""

    def error(self, call: dict[str, Any]) -> dict[str, Any]:
        return {"id": None, "error": {"code": -32600, "message": "Invalid Request"}}


class GethLikeUpstream(HostileAwareUpstream):
    """Repeats the caller's own words in its message."""

    def error(self, call: dict[str, Any]) -> dict[str, Any]:
        words = f"invalid argument 0: rate limit, internal error, timeout: {orjson.dumps(call['params']).decode()}"
        return {"id": call["id"], "error": {"code": -32000, "message": words}}


class HardhatLikeUpstream(HostileAwareUpstream):
    """Fails with an internal error where it does not expect what it gets."""

    def error(self, call: dict[str, Any]) -> dict[str, Any]:
        return {"id": call["id"], "error": {"code": -32603, "message": "Internal error"}}


class BadGatewayUpstream(HostileAwareUpstream):
    """Stands behind a proxy that answers for it when it crashes."""

    def reject(self, request: web.Request, body: Any) -> web.Response:
        return web.Response(status=502, text="<html>bad gateway</html>", content_type="text/html")


class CrashingUpstream(HostileAwareUpstream):
    """Drops the connection on which a hostile call came."""

    def reject(self, request: web.Request, body: Any) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()


class GarbageUpstream(HostileAwareUpstream):
    """Sends bytes that are no reply."""

    def reject(self, request: web.Request, body: Any) -> web.Response:
        return web.Response(body=b'{"jsonrpc":"2.0","id":\xff', content_type="application/json")


KINDS = (
    StrictUpstream, GethLikeUpstream, HardhatLikeUpstream, BadGatewayUpstream, CrashingUpstream, GarbageUpstream,
)  # fmt: skip


def _json(body: Any) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json")
