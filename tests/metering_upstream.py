"""A stub of a provider that meters its calls by a published price list, on its own: it shares no code with the product."""

from __future__ import annotations

import asyncio
import random
import tomllib
from typing import Any

import orjson
from aiohttp import web

from proxy.data_files import CONFIG
from tests.real_nodes import RealNode
from tests.rpc_upstreams import Chain, ScriptedUpstream

# How many blocks behind the head a block must be to count as old.
OLD_BLOCKS = 128


class MeteringUpstream(ScriptedUpstream):
    """Shares of requests get a 429, a 503 or an error, or are answered late."""

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain)
        self.list: dict[str, Any] = {}
        self.billed = 0
        self.billed_calls = 0
        self.billed_by_method: dict[str, int] = {}
        self.refuses = self.fails = self.lacks = self.is_late = 0.0
        self.late_s = 0.15
        self._random = random.Random(7)

    def bills_like(self, provider: str) -> None:
        self.list = tomllib.loads((CONFIG / "providers" / f"{provider}.toml").read_text())["credits"]

    async def _answer(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        calls = body if isinstance(body, list) else [body]
        draw = self._random.random()
        if draw < self.refuses:
            return self._refusal(calls, 429)
        if draw < self.refuses + self.fails:
            return self._refusal(calls, 503)
        if isinstance(body, list) and len(body) > self.batch:
            error = {"code": -32600, "message": "no such batch"}
            return web.json_response({"jsonrpc": "2.0", "id": None, "error": error})
        replies = []
        for call in calls:
            if self._random.random() < self.lacks and call["method"].startswith("eth_"):
                self._bill(call, self._failed(call, "unknown_method"))
                message = f"the method {call['method']} does not exist/is not available"
                error = {"code": -32601, "message": message}
                replies.append({"jsonrpc": "2.0", "id": call["id"], "error": error})
                continue
            self._bill(call, self.price(call))
            if self._random.random() < self.is_late:
                await asyncio.sleep(self.late_s)
            replies.append(await self._reply(call))
        return web.json_response(replies if isinstance(body, list) else replies[0])

    def _refusal(self, calls: list[dict[str, Any]], status: int) -> web.Response:
        for call in calls:
            self._bill(call, self._failed(call, str(status)))
        return web.Response(status=status, text="no", headers={"Retry-After": "0"} if status == 429 else {})

    def price(self, call: dict[str, Any]) -> int:
        prices: dict[str, int] = self.list.get("methods", {})
        fitting = [n for n in prices if n == call["method"] or (n[-1] == "*" and call["method"].startswith(n[:-1]))]
        if fitting:
            return prices[max(fitting, key=len)]
        return int(self.list["default"]) * (int(self.list.get("archive_factor", 1)) if self._is_old(call) else 1)

    def _is_old(self, call: dict[str, Any]) -> bool:
        if call["method"] == "eth_getLogs":
            block = call["params"][0]["fromBlock"]
        elif call["method"] in ("eth_getBalance", "eth_call"):
            block = call["params"][1]
        else:
            return False
        return str(block).startswith("0x") and self.chain.head - int(block, 16) >= OLD_BLOCKS

    def _failed(self, call: dict[str, Any], how: str) -> int:
        errors: dict[str, int] = self.list.get("errors", {})
        full = self.price(call)
        return min(full, errors.get(how, errors.get(f"{how[0]}xx", full)))

    def _bill(self, call: dict[str, Any], credits_: int) -> None:
        self.billed += credits_
        self.billed_calls += 1
        method = call["method"]
        self.billed_by_method[method] = self.billed_by_method.get(method, 0) + credits_


class NodeProvider(MeteringUpstream):
    """A provider with a real node behind it."""

    def __init__(self, node: RealNode, prices: str) -> None:
        super().__init__(Chain())
        self.chain.head = len(node.branch)
        self.bills_like(prices)
        self._node = node

    async def _reply(self, call: dict[str, Any]) -> dict[str, Any]:
        return {**await self._node.reply(call["method"], call.get("params", ())), "id": call["id"]}


def billing_by(*providers: str) -> type[MeteringUpstream]:
    """Upstreams that bill from their first call on, each by the list of the next provider."""
    left = iter(providers)

    class BillingUpstream(MeteringUpstream):
        def __init__(self, chain: Chain) -> None:
            super().__init__(chain)
            self.bills_like(next(left))

    return BillingUpstream
