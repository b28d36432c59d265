"""Upstreams with a deep history that answer only short ranges of logs, and note every call with its time."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import orjson
from aiohttp import web

from bench.tools import contracts
from proxy.core.rest_routes import RouteTable, segments_of
from proxy.settings import shipped_tables
from tests.beacon_stub import BeaconStub, is_poll
from tests.bundler_harness import ScriptedBundler
from tests.costs.hostile_inputs import address, topic
from tests.families_harness import CASES
from tests.node_stubs import NodeError, NodeStub, TonStub
from tests.rest_stubs import Asked, RestStub
from tests.rpc_upstreams import Call, Chain, Refused, ScriptedUpstream
from tests.svm_upstreams import SvmUpstream

HEAD = 19_100_000
# As many blocks as the strictest public upstreams allow in one call for logs.
MAX_RANGE = 10
TRANSACTIONS = 300
TRANSFER = "0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef"
# Calls that the service makes by itself to follow the head, whatever clients do.
OWN = frozenset({"eth_blockNumber", "eth_chainId", "getSlot", "getGenesisHash", "getHealth"})
# And to know which client it is and which methods it has, once an hour, without params.
CHECKS = frozenset(
    {
        "web3_clientVersion",
        "rpc_modules",
        "eth_simulateV1",
        "eth_getBlockReceipts",
        "trace_callMany",
        "debug_storageRangeAt",
    }
)
# And to find the oldest block of each kind of data that the upstream has: at no address, and of an empty call.
NOWHERE = "0x" + "00" * 20
TAGS = ("latest", "finalized", "safe", "earliest")

_transactions = orjson.Fragment(
    orjson.dumps(
        [
            {
                "hash": topic(number),
                "from": address(number),
                "to": address(number + 1),
                "value": "0xde0b6b3a7640000",
                "nonce": "0x1",
                "transactionIndex": hex(number),
                "input": "0xa9059cbb" + "00" * 64,
                "gas": "0x5208",
                "gasPrice": "0x3b9aca00",
            }
            for number in range(TRANSACTIONS)
        ]
    )
)
_traces = orjson.Fragment(
    orjson.dumps(
        [
            {
                "txHash": topic(number),
                "result": {
                    "type": "CALL",
                    "from": address(number),
                    "to": address(number + 1),
                    "value": "0x0",
                    "calls": [{"type": "CALL", "from": address(number), "to": address(number + 1), "value": "0x1"}] * 3,
                },
            }
            for number in range(TRANSACTIONS)
        ]
    )
)


# The logs of a transaction. The receipts of a block have 3 MB, and those of a block with an even number 9 MB.
_many_logs = [
    {"address": address(number), "topics": [topic(number)] * 4, "data": "0x" + "ab" * 256, "logIndex": hex(number)}
    for number in range(30)
]
_logs, _many = orjson.Fragment(orjson.dumps(_many_logs[:10])), orjson.Fragment(orjson.dumps(_many_logs))


class NotedCalls:
    """The calls of an upstream that clients caused, in the order of their arrival."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, str]] = []

    def __repr__(self) -> str:
        return f"<NotedCalls {len(self._calls)}>"

    def note(self, method: str, params: Any) -> bool:
        """Return whether a client may have caused the call."""
        is_poll = method == "eth_getBlockByNumber" and params and params[0] in TAGS
        is_check = method in CHECKS and not params
        if method in OWN or is_poll or is_check or _is_search(method, params):
            return False
        self._calls.append((time.monotonic(), method))
        return True

    def between(self, begin: float, end: float) -> Counter[str]:
        first = bisect_left(self._calls, begin, key=itemgetter(0))
        return Counter(method for at, method in self._calls[first:] if at < end)


def _is_search(method: str, params: Any) -> bool:
    if method == "eth_getLogs":
        return bool(params) and isinstance(params[0], dict) and params[0].get("address") == NOWHERE
    searched = {"eth_getBalance": [NOWHERE], "eth_getProof": [NOWHERE, []], "debug_traceCall": [{}]}
    return method in searched and isinstance(params, list) and params[:-1] == searched[method]


class NotingUpstream(ScriptedUpstream):
    """Notes its calls, and answers hostile ones like a node."""

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain)
        self.noted = NotedCalls()
        # Changes the results of calls that clients cause.
        self.spoil: Callable[[Any], Any] | None = None

    async def _answer(self, request: web.Request) -> web.Response:
        """A body that is no JSON for it gets an error, under no id."""
        try:
            body = orjson.loads(await request.read())
        except orjson.JSONDecodeError:
            return _json({"jsonrpc": "2.0", "id": None, "error": {"code": -32700, "message": "parse error"}})
        if isinstance(body, dict):
            return _json(await self._reply(body))
        return _json([await self._reply(call) for call in body])

    async def _reply(self, call: dict[str, Any]) -> dict[str, Any]:
        is_own = not self.noted.note(call["method"], call["params"])
        found = await super()._reply(call)
        self.calls.clear()
        if self.spoil is not None and not is_own and "result" in found:
            try:
                found["result"] = self.spoil(found["result"])
            except Refused as exc:
                return {"jsonrpc": "2.0", "id": call["id"], "error": exc.error}
        return found

    def _result(self, call: Call) -> Any:
        try:
            return super()._result(call)
        except (TypeError, KeyError, ValueError, IndexError, AttributeError):  # hostile params
            return None


def _json(body: Any) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json")


class DeepUpstream(NotingUpstream, ScriptedBundler):
    """An EVM upstream that is a bundler too."""

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain)
        self.max_range = MAX_RANGE

    def _header(self, number: int) -> dict[str, Any]:
        return {
            **self.chain.block(number),
            "timestamp": hex(1_700_000_000 + number),
            "logsBloom": "0x" + "ff" * 256,
            "gasUsed": "0x5208",
            "gasLimit": "0x1c9c380",
            "baseFeePerGas": "0x7",
        }

    def _eth_getBlockByNumber(self, params: list[Any]) -> dict[str, Any] | None:
        number = self._number(params[0])
        if not 0 <= number <= self.head:
            return None
        return {**self._header(number), "transactions": _transactions if params[1] else []}

    def _eth_getBlockByHash(self, params: list[Any]) -> dict[str, Any] | None:
        """Hashes do not tell their number: only those of the newest blocks are found."""
        for number in range(self.head, self.head - 200, -1):
            if self.chain.hash_of(number) == params[0]:
                return {**self._header(number), "transactions": _transactions if params[1] else []}
        return None

    def _eth_getLogs(self, params: list[Any]) -> list[dict[str, Any]]:
        if (name := params[0].get("blockHash")) is not None:
            block = self._eth_getBlockByHash([name, False])
            return [self._log(int(block["number"], 16))] if block else []
        super()._eth_getLogs(params)  # refuses wide ranges
        first, last = self._number(params[0].get("fromBlock")), self._number(params[0].get("toBlock"))
        return [self._log(number) for number in range(first, min(last, self.head) + 1)]

    def _log(self, number: int) -> dict[str, Any]:
        return {
            "address": address(number % 1000),
            "topics": [TRANSFER, "0x" + address(1)[2:].zfill(64), "0x" + address(2)[2:].zfill(64)],
            "data": f"0x{number:064x}",
            "blockNumber": hex(number),
            "blockHash": self.chain.hash_of(number),
            "transactionHash": topic(number % TRANSACTIONS),
            "transactionIndex": "0x0",
            "logIndex": "0x0",
            "removed": False,
        }

    def _eth_call(self, params: list[Any]) -> Any:
        """Every contract is a token."""
        data = params[0]["data"]
        return orjson.Fragment(contracts.answer(data)) if data.startswith(contracts.AGGREGATE) else "0x"

    def _eth_getBlockReceipts(self, params: list[Any]) -> list[Any]:
        more = {} if self._number(params[0]) % 2 else {"logs": _many}
        return [{**self._eth_getTransactionReceipt([topic(number)]), **more} for number in range(TRANSACTIONS)]

    def _eth_getTransactionReceipt(self, params: list[Any]) -> dict[str, Any]:
        block = {"blockNumber": hex(self.head), "blockHash": self.chain.hash_of(self.head)}
        return {"transactionHash": params[0], "status": "0x1", **block, "logs": _logs}

    def _debug_traceBlockByHash(self, params: list[Any]) -> orjson.Fragment:
        return _traces


class NotingBeacon(BeaconStub):
    """A beacon node that notes the routes of its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.noted = NotedCalls()
        self._routes = RouteTable(shipped_tables().methods["beacon"])

    async def serve(self, request: web.Request) -> web.StreamResponse:
        methods, _ = self._routes.find(segments_of(request.raw_path.partition("?")[0]))
        if not is_poll(request):
            self.noted.note(methods.get(request.method, ""), ())
        found = await super().serve(request)
        self.targets.clear()
        self.headers.clear()
        return found


class NotingNode(NodeStub):
    """A node of another family. All calls that arrive before clients may call it are the service's own."""

    def __init__(self) -> None:
        super().__init__()
        self.noted = NotedCalls()
        # Calls of the service itself. Their params stay as they are, since the head does.
        self._own: set[bytes] = set()
        self._is_open_to_clients = False
        family = next(name for name, case in CASES.items() if isinstance(self, case.stub))
        self._routes = RouteTable(shipped_tables().methods[family] if isinstance(self, RestStub) else ())

    def open_to_clients(self) -> None:
        self._is_open_to_clients = True

    async def serve(self, request: web.Request) -> web.Response:
        try:
            reply = await super().serve(request)
        except (orjson.JSONDecodeError, AssertionError):
            reply = self._refusal()
        for name, given in self.calls:
            method = self._named(name, request)
            call = orjson.dumps([method, name, given])
            if not self._is_open_to_clients:
                self._own.add(call)
            elif call not in self._own:
                self.noted.note(method, given)
        self.calls.clear()
        self.writes.clear()
        return reply

    def _refusal(self) -> web.Response:
        """The reply to a body that it cannot read."""
        if isinstance(self, RestStub | TonStub):
            return web.json_response({"ok": False, "error": "invalid request", "code": 422}, status=422)
        return _json({"jsonrpc": "2.0", "id": None, "error": {"code": -32700, "message": "parse error"}})

    def _named(self, name: str, request: web.Request) -> str:
        if not isinstance(self, RestStub):
            return name
        methods, _ = self._routes.find(segments_of(request.raw_path.partition("?")[0]))
        return methods.get(request.method, "")

    def told(self, method: str, params: Any) -> Any:
        try:
            return super().told(method, params)
        except (TypeError, KeyError, ValueError, IndexError, AttributeError):
            raise NodeError(422 if isinstance(self, TonStub) else -32602, "invalid params") from None


class NotingRestNode(NotingNode, RestStub):
    def respond(self, asked: Asked) -> Any:
        try:
            return super().respond(asked)
        except (TypeError, KeyError, ValueError, IndexError, AttributeError, AssertionError):
            raise NodeError(400, "invalid request") from None


def noting_node(family: str) -> NotingNode:
    stub = CASES[family].stub
    base = NotingRestNode if issubclass(stub, RestStub) else NotingNode
    found = type(f"Noting{stub.__name__}", (base, stub), {})()
    assert isinstance(found, NotingNode)
    return found


class PolledSvmUpstream(NotingUpstream, SvmUpstream):
    """A Solana upstream without a WebSocket: the service polls it."""

    def _getProgramAccounts(self, params: list[Any], slot: int) -> Any:
        account = {"lamports": slot, "owner": params[0], "data": ["", "base64"], "executable": False, "rentEpoch": 0}
        found = [{"pubkey": params[0], "account": {**account, "space": 0}}]
        return {"context": {"slot": slot}, "value": found} if len(params) > 1 else found


class QueryUpstream:
    """A node of CometBFT that has an event for every query, four times a second."""

    def __init__(self, chain: str) -> None:
        self.noted = NotedCalls()
        self._chain = chain
        self._runner: web.AppRunner | None = None
        self.port = 0

    def __repr__(self) -> str:
        return f"<QueryUpstream :{self.port}>"

    async def open(self) -> None:
        application = web.Application()
        application.router.add_post("/", self._answer)
        application.router.add_get("/websocket", self._stream)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def _status(self) -> dict[str, Any]:
        head = {"latest_block_height": "100", "latest_block_hash": "AB" * 32, "earliest_block_height": "1"}
        return {"node_info": {"network": self._chain}, "sync_info": {**head, "catching_up": False}}

    async def _answer(self, request: web.Request) -> web.Response:
        try:
            body = orjson.loads(await request.read())
        except orjson.JSONDecodeError:
            return _json({"jsonrpc": "2.0", "id": None, "error": {"code": -32700, "message": "parse error"}})
        calls = body if isinstance(body, list) else [body]
        for call in calls:
            if call["method"] != "status":
                self.noted.note(call["method"], ())
        replies = [{"jsonrpc": "2.0", "id": call["id"], "result": self._status()} for call in calls]
        return _json(replies if isinstance(body, list) else replies[0])

    async def _stream(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            call = orjson.loads(message.data)
            result = self._status() if call["method"] == "status" else {}
            await socket.send_str(_reply(call["id"], result))
            while call["method"] == "subscribe" and not socket.closed:
                await asyncio.sleep(0.25)
                await socket.send_str(_reply(call["id"], {"query": "x", "data": {"value": "y" * 500}}))
        return socket


def _reply(id_: Any, result: Any) -> str:
    return orjson.dumps({"jsonrpc": "2.0", "id": id_, "result": result}).decode()
