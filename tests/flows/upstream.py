"""An upstream controlled by a test: a real server that counts its calls and returns configured replies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import orjson
from aiohttp import web

# Credentials in an upstream's URL, which must never leave the service.
USER, PASSWORD, SECRET_PATH = "flow", "canary-password", "canary-path"
Act = Callable[[dict[str, object]], Awaitable[web.StreamResponse]]


HEAD = {"number": "0x10", "hash": "0x" + "11" * 32}
# The service's own calls to find an upstream's head and chain. They always get a reply.
PROBES = {"eth_blockNumber": HEAD["number"], "eth_getBlockByNumber": HEAD}
# And to know which client it is and which methods it has. They are not counted.
CHECKS = (
    "web3_clientVersion",
    "rpc_modules",
    "eth_simulateV1",
    "eth_getBlockReceipts",
    "trace_callMany",
    "debug_storageRangeAt",
)
SEPOLIA, HOODI = 11155111, 560048


async def echo(call: dict[str, object]) -> web.StreamResponse:
    """Return the method's name as the result."""
    return reply(call, result=call["method"])


def reply(call: dict[str, object], **members: object) -> web.Response:
    return web.Response(
        body=orjson.dumps({"jsonrpc": "2.0", "id": call["id"], **members}), content_type="application/json"
    )


class Upstream:
    """The server. The service is configured with its `url`."""

    def __init__(self, chain_id: int = SEPOLIA) -> None:
        self.chain_id = chain_id
        self.port = 0
        self.calls = 0
        self.act: Act = echo
        application = web.Application()
        application.router.add_post(f"/{SECRET_PATH}", self._answer)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)

    @property
    def url(self) -> str:
        return f"http://{USER}:{PASSWORD}@127.0.0.1:{self.port}/{SECRET_PATH}"

    async def open(self) -> None:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        if isinstance(body, dict):
            return await self._one(body)
        answers = [await self._one(call) for call in body]
        for answer in answers:
            if answer.status != 200:
                return answer
        joined = (
            b"["
            + b",".join(
                answer.body for answer in answers if isinstance(answer, web.Response) and isinstance(answer.body, bytes)
            )
            + b"]"
        )
        return web.Response(body=joined, content_type="application/json")

    async def _one(self, call: dict[str, object]) -> web.StreamResponse:
        method = str(call["method"])
        if method in PROBES:
            return reply(call, result=PROBES[method])
        if method == "eth_chainId":
            return reply(call, result=hex(self.chain_id))
        if method in CHECKS and not call.get("params"):
            return reply(call, result=None)
        self.calls += 1
        return await self.act(call)
