"""An upstream in front of a real node that is some blocks behind it, as if it had not received them yet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from tests.service import node_session

# Longer texts than a block number are hashes, addresses and data.
LONGEST_NUMBER = 12


class LaggingUpstream:
    """Fails all calls until it has a `node` to pass them on to."""

    def __init__(self, behind: int, session: aiohttp.ClientSession) -> None:
        self._behind = behind
        self._session = session
        self.node = ""
        self.url = ""

    def __repr__(self) -> str:
        return f"<LaggingUpstream {self._behind} behind {self.node or 'nothing'}>"

    async def answer(self, request: web.Request) -> web.Response:
        if not self.node:
            return web.Response(status=503)
        asked = await request.json()
        replied = [await self._reply(call) for call in asked] if isinstance(asked, list) else await self._reply(asked)
        return web.json_response(replied)

    async def _reply(self, call: dict[str, Any]) -> dict[str, Any]:
        newest = (
            int((await self._ask({**call, "method": "eth_blockNumber", "params": []}))["result"], 16) - self._behind
        )
        if call["method"] == "eth_blockNumber":
            return {"jsonrpc": "2.0", "id": call["id"], "result": hex(newest)}
        params = [_at(each, newest) for each in call.get("params", [])]
        reply = await self._ask({**call, "params": params})
        if any(_is_after(each, newest) for each in (*params, _number_of(reply.get("result")))):
            return {"jsonrpc": "2.0", "id": call["id"], **_unknown(call["method"])}
        return reply

    async def _ask(self, call: dict[str, Any]) -> dict[str, Any]:
        async with self._session.post(self.node, json=call) as response:
            found: dict[str, Any] = await response.json()
            return found


def _at(param: Any, newest: int) -> Any:
    """The param as the node must receive it to answer with the state of this block."""
    if isinstance(param, dict) and "fromBlock" in param:
        return {**param, "toBlock": hex(min(newest, int(_at(param.get("toBlock", "latest"), newest), 16)))}
    return hex(newest) if param in ("latest", "pending") else param


def _unknown(method: str) -> dict[str, Any]:
    """What nodes reply about a block that they do not have."""
    is_lookup = method.startswith(("eth_getBlock", "eth_getTransactionBy", "eth_getTransactionReceipt"))
    return {"result": None} if is_lookup else {"error": {"code": -32000, "message": "header not found"}}


def _number_of(result: Any) -> Any:
    """The number of the block that a block, a transaction or a receipt has."""
    return (result.get("blockNumber") or result.get("number")) if isinstance(result, dict) else None


def _is_after(param: Any, newest: int) -> bool:
    is_number = isinstance(param, str) and param.startswith("0x") and 2 < len(param) <= LONGEST_NUMBER
    return is_number and int(param, 16) > newest


@asynccontextmanager
async def lagging_upstreams(*behind: int) -> AsyncIterator[list[LaggingUpstream]]:
    async with node_session() as session:
        found = [LaggingUpstream(each, session) for each in behind]
        runners = []
        for upstream in found:
            application = web.Application()
            application.router.add_post("/", upstream.answer)
            runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            upstream.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
            runners.append(runner)
        yield found
        for runner in runners:
            await runner.cleanup()
