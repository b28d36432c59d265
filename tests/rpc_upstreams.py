"""Upstreams of one scripted chain: real servers that count every call and reply from the chain or from a script.

Every answer is derived from what was asked (`value_of`), so that a wrong one is seen; and from a block where there is one, so
that an upstream which is behind answers as such a one would.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
import sha3
from aiohttp import web

# How vendors refuse a range, with the limit put in.
REFUSALS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "alchemy": lambda first, limit: {
        "code": -32602,
        "message": "Log response size exceeded. You can make eth_getLogs requests with up to a "
        f"{limit} block range. Based on your parameters, this block range should work: "
        f"[{hex(first)}, {hex(first + limit - 1)}]",
    },
    "infura": lambda first, limit: {"code": -32005, "message": "query returned more than 10000 results"},
    "quicknode": lambda first, limit: {"code": -32614, "message": f"eth_getLogs is limited to a {limit} range"},
    "geth": lambda first, limit: {"code": -32000, "message": "exceed maximum block range: " + str(limit)},
    "nameless": lambda first, limit: {"code": -32008, "message": "Response is too big"},
}


def value_of(*parts: Any) -> str:
    """The chain's reply to a call, as 32 bytes."""
    return "0x" + hashlib.sha256(orjson.dumps(parts)).hexdigest()


def tx_hash(raw: str) -> str:
    return "0x" + str(sha3.keccak_256(bytes.fromhex(raw.removeprefix("0x"))).hexdigest())


@dataclass
class Chain:
    """The true state of the chain, shared by all its upstreams."""

    head: int = 1000
    name: str = "one"
    # The chain id or genesis hash that its upstreams report.
    identity: str = "1"
    # How many times the blocks from a height on were replaced, by that height.
    forks: dict[int, int] = field(default_factory=dict)
    # Blocks by the hash of the transactions in them.
    mined: dict[str, int] = field(default_factory=dict)

    def hash_of(self, number: int) -> str:
        return value_of(
            "block", self.name, number, sum(count for height, count in self.forks.items() if height <= number)
        )

    def reorganise(self, depth: int = 1) -> None:
        height = self.head - depth + 1
        self.forks[height] = self.forks.get(height, 0) + 1

    def block(self, number: int) -> dict[str, Any]:
        return {"number": hex(number), "hash": self.hash_of(number), "parentHash": self.hash_of(number - 1)}

    def log(self, number: int) -> dict[str, Any]:
        return {"blockNumber": hex(number), "blockHash": self.hash_of(number), "logIndex": "0x0", "topics": []}


@dataclass(frozen=True)
class Call:
    id: Any
    method: str
    params: list[Any]


class Refused(Exception):
    def __init__(self, code: int, message: str, **more: Any) -> None:
        super().__init__(message)
        self.error = {"code": code, "message": message, **more}


class ScriptedUpstream:
    """One upstream. Its attributes may be changed at any time."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.behind = 0
        self.calls: list[Call] = []
        self.requests = 0
        self.port = 0
        # The widest range of logs, and whose words refuse a wider one.
        self.max_range = 0
        self.refusal = "alchemy"
        # Calls in one request; 0: a batch is refused.
        self.batch = 1000
        # Requests to answer 429 or 503, and what Retry-After says.
        self.limited = 0
        self.retry_after: str | None = "2"
        self.limited_by = 429
        # Answers of its own, by method: a result, or an exception.
        self.answers: dict[str, Callable[[list[Any]], Any]] = {}
        # While it is not set, calls of these methods wait for it.
        self.gate = asyncio.Event()
        self.held: set[str] = set()
        self.most_at_once = 0
        self._now = 0
        self._filters: dict[str, int] = {}
        self._pool: set[str] = set()
        self.application = web.Application(client_max_size=1 << 24)
        self.application.router.add_post("/", self._answer)
        self._runner = web.AppRunner(self.application, access_log=None, shutdown_timeout=0.05)

    def __repr__(self) -> str:
        return f"<ScriptedUpstream :{self.port} head {self.head}, {len(self.calls)} calls>"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    @property
    def head(self) -> int:
        return self.chain.head - self.behind

    @property
    def counts(self) -> Counter[str]:
        return Counter(call.method for call in self.calls)

    def count(self, method: str) -> int:
        return self.counts[method]

    async def open(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        self.gate.set()
        await self._runner.cleanup()

    # Requests

    async def _answer(self, request: web.Request) -> web.Response:
        self.requests += 1
        body = orjson.loads(await request.read())
        if self.limited:
            self.limited -= 1
            headers = {} if self.retry_after is None else {"Retry-After": self.retry_after}
            return web.Response(status=self.limited_by, text="slow down", headers=headers)
        if isinstance(body, dict):
            return _json(await self._reply(body))
        if len(body) > self.batch:
            return _json({"jsonrpc": "2.0", "id": None, "error": {"code": -32600, "message": "no such batch"}})
        return _json([await self._reply(call) for call in body])

    async def _reply(self, call: dict[str, Any]) -> dict[str, Any]:
        given = Call(call["id"], call["method"], call["params"])
        self.calls.append(given)
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            if given.method in self.held:
                await self.gate.wait()
            return {"jsonrpc": "2.0", "id": given.id, "result": self._result(given)}
        except Refused as exc:
            return {"jsonrpc": "2.0", "id": given.id, "error": exc.error}
        finally:
            self._now -= 1

    def _result(self, call: Call) -> Any:
        if (own := self.answers.get(call.method)) is not None:
            return own(call.params)
        found = getattr(self, f"_{call.method}", None)
        return found(call.params) if found else value_of(call.method, call.params)

    # Replies of the chain

    def _number(self, tag: Any) -> int:
        if tag in ("latest", "pending", None):
            return self.head
        named = {"earliest": 0, "finalized": self.head - 64}
        return named[tag] if tag in named else int(tag, 16)

    def _eth_chainId(self, params: list[Any]) -> str:
        return hex(int(self.chain.identity))

    def _eth_blockNumber(self, params: list[Any]) -> str:
        return hex(self.head)

    def _eth_getBlockByNumber(self, params: list[Any]) -> dict[str, Any] | None:
        number = self._number(params[0])
        return self.chain.block(number) if number <= self.head else None

    def _eth_getBalance(self, params: list[Any]) -> str:
        number = self._number(params[1])
        if number > self.head:
            raise Refused(-32000, "header not found")
        return value_of("balance", params[0], self.chain.hash_of(number))

    _eth_getTransactionCount = _eth_getBalance

    def _eth_getTransactionReceipt(self, params: list[Any]) -> dict[str, Any] | None:
        number = self.chain.mined.get(params[0])
        if number is None or number > self.head:
            return None
        return {"transactionHash": params[0], "blockNumber": hex(number), "blockHash": self.chain.hash_of(number)}

    _eth_getTransactionByHash = _eth_getTransactionReceipt

    def _eth_getLogs(self, params: list[Any]) -> list[dict[str, Any]]:
        first, last = self._number(params[0].get("fromBlock")), self._number(params[0].get("toBlock"))
        if self.max_range and last - first + 1 > self.max_range:
            error = REFUSALS[self.refusal](first, self.max_range)
            raise Refused(error["code"], error["message"])
        return [self.chain.log(number) for number in range(first, min(last, self.head) + 1)]

    def _eth_sendRawTransaction(self, params: list[Any]) -> str:
        if params[0] in self._pool:
            raise Refused(-32000, "already known")
        self._pool.add(params[0])
        return tx_hash(params[0])

    # Filters are this upstream's own

    def _eth_newFilter(self, params: list[Any]) -> str:
        name = hex(0xF000 + len(self._filters))
        self._filters[name] = self.head
        return name

    _eth_newBlockFilter = _eth_newFilter

    def _eth_getFilterChanges(self, params: list[Any]) -> list[str]:
        since = self._filters.get(params[0])
        if since is None:
            raise Refused(-32000, "filter not found")
        self._filters[params[0]] = self.head
        return [self.chain.hash_of(number) for number in range(since + 1, self.head + 1)]

    def _eth_uninstallFilter(self, params: list[Any]) -> bool:
        return self._filters.pop(params[0], None) is not None


def _json(body: Any) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json")


@asynccontextmanager
async def scripted(
    count: int, chain: Chain, kind: type[ScriptedUpstream] = ScriptedUpstream
) -> AsyncIterator[list[ScriptedUpstream]]:
    """Upstreams of one chain."""
    found = [kind(chain) for _ in range(count)]
    for each in found:
        await each.open()
    try:
        yield found
    finally:
        for each in found:
            await each.close()
