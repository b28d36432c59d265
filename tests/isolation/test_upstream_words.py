"""No error of an upstream shows a client the upstream's address or credentials."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import orjson
import pytest
from aiohttp import web

from tests.bundler_harness import ENTRY_POINTS_METHOD
from tests.http_client import Reply, request, rpc
from tests.rpc_upstreams import Chain, ScriptedUpstream, scripted
from tests.sockets import bare
from tests.web.worker import LIVE, NO_CACHE, Worker, on_uvloop, running_worker

PASSWORD, PATH_KEY, QUERY_KEY, HEADER_KEY = "pa55-w0rd!", "pathKEY0123456789", "querykeyABC123", "headertoken998877"
HOST = "127.0.0.1"
PAIR = base64.b64encode(f"patricia:{PASSWORD}".encode()).decode()
SECRETS = (PASSWORD, PAIR, PATH_KEY, QUERY_KEY, HEADER_KEY, HOST, "UNHEARD")
# An error of each class.
CODES = (
    3,
    0,
    1,
    -32000,
    -32002,
    -32003,
    -32521,
    -32600,
    -32601,
    -32602,
    -32603,
    -32700,
    -32014,
    -32015,
    10**30,
)
# An upstream that limits our rate rests afterwards, and calls wait for it: those come last, one of each.
LIMITS = (-32005, 429)
SHORT_WAITS = {"rpc": {"call_timeout_s": 0.5}}
WORDS = (
    "bad key {}", "execution reverted: {}", "invalid argument 0: {}", "nonce too low: {}", "missing trie node {}",
    "method not found at {}", "the range is too large: {}", "{}: connection refused", "see {}",
)  # fmt: skip


def is_hidden(text: bytes) -> bool:
    return not any(secret.lower().encode() in text.lower() for secret in SECRETS)


def errors_with(secret: str) -> Iterator[tuple[int, bytes]]:
    """Error members with the status of the reply. Words that the settings do not contain come where no error object is."""
    unheard = f"UNHEARD {secret}"
    for shape in (unheard, [unheard], {"message": unheard}, {"code": "x", "message": unheard}, True, 7, {}, [], ""):
        yield 200, orjson.dumps(shape)
        yield 403, orjson.dumps(shape)
    for more in ({"url": unheard}, {"stack": [unheard]}, {"Message": unheard}):
        yield 200, orjson.dumps({"code": -32000, "message": "odd", **more})
    yield 200, b'{"code":-32000,"message":"%b","message":"odd"}' % unheard.encode()
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in secret).encode()
    yield 200, b'{"code":-32000,"message":"%b"}' % escaped
    yield 200, b'{"code":3,"message":"execution reverted","data":{"a":["%b"]}}' % escaped
    for code in CODES:
        for words in WORDS:
            yield 200, _with_code(code, {"message": words.format(secret)})
        yield 500, _with_code(code, {"message": "", "data": {secret: [secret.upper()]}})


def limits_with(secret: str) -> Iterator[tuple[int, bytes]]:
    for code in LIMITS:
        yield 200, _with_code(code, {"message": f"too many requests from {secret}", "data": {secret: [secret]}})


def _with_code(code: int, error: dict[str, Any]) -> bytes:
    """Codes may be larger than orjson writes."""
    return orjson.dumps({"code": 1, **error}).replace(b":1,", b":%d," % code, 1)


class LeakyUpstream(ScriptedUpstream):
    """Answers every call but those about the head with the next error."""

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain)
        self.application.router.add_post("/v2/{key}", self._answer)
        self.status, self.error = 200, b"{}"

    @property
    def secret_url(self) -> str:
        return f"http://patricia:{PASSWORD}@{HOST}:{self.port}/v2/{PATH_KEY}?apikey={QUERY_KEY}"

    async def _answer(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        calls = body if isinstance(body, list) else [body]
        if calls[0]["method"] in ("eth_blockNumber", "net_version"):
            return await super()._answer(request)
        replies = [self._reply_of(call) for call in calls]
        text = b"[" + b",".join(replies) + b"]" if isinstance(body, list) else replies[0]
        return web.Response(status=self.status, body=text, content_type="application/json")

    def _reply_of(self, call: dict[str, Any]) -> bytes:
        self.requests += 1
        return b'{"jsonrpc":"2.0",%b"error":%b}' % (self.named(call["id"]), self.error)

    def named(self, id_: int) -> bytes:
        return b'"id":%d,' % id_


class NamelessUpstream(LeakyUpstream):
    """Answers under no id, as a gateway does."""

    def named(self, id_: int) -> bytes:
        return (b"", b'"id":null,')[id_ % 2]


@asynccontextmanager
async def leaky(kind: type[LeakyUpstream]) -> AsyncIterator[tuple[Worker, LeakyUpstream]]:
    async with AsyncExitStack() as stack:
        upstreams = await stack.enter_async_context(scripted(1, Chain(), kind))
        upstream: LeakyUpstream = upstreams[0]  # type: ignore[assignment]
        given = {"url": upstream.secret_url, "headers": {"Authorization": f"Bearer {HEADER_KEY}"}}
        bundlers = [{"network": LIVE, **given}]
        settings = {**NO_CACHE, **SHORT_WAITS}
        yield await stack.enter_async_context(running_worker({LIVE: [given]}, bundlers=bundlers, **settings)), upstream


def bodies() -> list[tuple[int, bytes]]:
    secrets = (PASSWORD, PAIR, PATH_KEY, QUERY_KEY, HEADER_KEY, f"http://{HOST}:1/x")
    return [each for errors in (errors_with, limits_with) for secret in secrets for each in errors(secret)]


CALL = rpc("eth_call", [{"to": "0x" + "11" * 20}, "latest"])


@pytest.mark.parametrize("kind", [LeakyUpstream, NamelessUpstream])
@on_uvloop
async def test_secrets_in_errors_reach_no_client_over_http(kind: type[LeakyUpstream]) -> None:
    async with leaky(kind) as (running, upstream), await running.connect() as client:
        for upstream.status, upstream.error in bodies():
            for body in (CALL, b"[%b,%b]" % (CALL, CALL)):
                reply = await client.send(running.post(body))
                _expect_hidden(reply, upstream.error)
            reply = await client.send(
                request("POST", f"/v1/bundler/{LIVE}", rpc(ENTRY_POINTS_METHOD), key=running.keys["main"])
            )
            _expect_hidden(reply, upstream.error)
        assert upstream.requests > len(bodies())


def _expect_hidden(reply: Reply, error: bytes) -> None:
    assert is_hidden(reply.body), (error, reply.body)
    assert is_hidden(repr(reply.headers).encode()), (error, reply.headers)
    for item in reply.json if isinstance(reply.json, list) else [reply.json]:
        if reply.status == 200:
            assert isinstance(item["error"]["code"], int), item
            assert isinstance(item["error"]["message"], str), item


@pytest.mark.parametrize("kind", [LeakyUpstream, NamelessUpstream])
@on_uvloop
async def test_secrets_in_errors_reach_no_socket(kind: type[LeakyUpstream]) -> None:
    async with leaky(kind) as (running, upstream), bare(running) as socket:
        for upstream.status, upstream.error in bodies():
            for body in (CALL, b"[%b,%b]" % (CALL, CALL)):
                socket.write(body)
                reply = orjson.dumps(await socket.json())
                assert is_hidden(reply), (upstream.error, reply)


@on_uvloop
async def test_secrets_in_errors_reach_no_rest_resource() -> None:
    async with leaky(LeakyUpstream) as (running, upstream), await running.connect() as client:
        for upstream.status, upstream.error in bodies()[::20]:
            for path in ("gas/ethereum/prices", f"tokens/ethereum/metadata/0x{'11' * 20}"):
                reply = await client.send(request("GET", f"/v1/{path}", key=running.keys["main"]))
                assert is_hidden(reply.body), (upstream.error, reply.body)
