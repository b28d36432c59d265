"""Nodes of Starknet, NEAR, Polkadot and TON made from their specifications, as far as the tests call them.

No registry has nodes of these chains, so these are JSON-RPC servers with the shapes and errors that the specifications give: a
chain whose head can be moved, reads at its blocks, and one transaction. Every call is kept.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import web

from tests.client_scripts import SCRIPTS


class NodeError(Exception):
    """An error of the node, as a JSON-RPC error object."""

    def __init__(self, code: int, message: str, **more: Any) -> None:
        super().__init__(message)
        self.error = {"code": code, "message": message, **more}


class NodeStub:
    """`head` and `final` can be moved. `calls`: the methods and params that arrived. `writes`: the transactions that it took.

    Faults: `hangs`: it takes requests and does not reply. `fork`: the first block that differs from those of other nodes.
    `chain`: the name of its chain, if it is another one. `lies_about`: a method whose results are made up. `is_broken`: its
    replies are not JSON.
    """

    network = ""
    # The identity of the chain.
    chain = ""
    takes_batches = True
    hangs = False
    fork: int | None = None
    lies_about = ""
    is_broken = False

    def __init__(self) -> None:
        self.head, self.final, self.url = 500, 480, ""
        self.calls: list[tuple[str, Any]] = []
        self.writes: list[Any] = []

    def named(self, number: int) -> bytes:
        """What the hash of a block is made of."""
        branch = "" if self.fork is None or number < self.fork else " fork"
        return f"{self.network} {number}{branch}".encode()

    def hash_of(self, number: int) -> str:
        return "0x0" + hashlib.sha256(self.named(number)).hexdigest()[1:]

    def take(self, transaction: Any) -> str:
        """Take a transaction; returns its hash."""
        self.writes.append(transaction)
        return "0x0" + hashlib.sha256(orjson.dumps(transaction)).hexdigest()[1:]

    async def pass_or_hang(self) -> None:
        if self.hangs:
            await asyncio.sleep(600)

    def number_of(self, block_hash: str) -> int | None:
        return next((each for each in range(self.head + 1) if self.hash_of(each) == block_hash), None)

    def answer(self, method: str, params: Any) -> Any:
        raise NotImplementedError

    def told(self, method: str, params: Any) -> Any:
        return {"made": "up"} if method == self.lies_about else self.answer(method, params)

    def count(self, method: str) -> int:
        return sum(name == method for name, _ in self.calls)

    async def serve(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        await self.pass_or_hang()
        if isinstance(body, list):
            assert self.takes_batches, "a batch reached a node that refuses them"
            return web.json_response([self._reply(each) for each in body])
        return web.json_response(self._reply(body))

    def _reply(self, call: dict[str, Any]) -> dict[str, Any]:
        assert call.keys() == {"jsonrpc", "id", "method", "params"}
        self.calls.append((call["method"], call["params"]))
        try:
            return {"jsonrpc": "2.0", "id": call["id"], "result": self.told(call["method"], call["params"])}
        except NodeError as exc:
            return {"jsonrpc": "2.0", "id": call["id"], "error": exc.error}


_COMMITMENTS = ("event_commitment", "transaction_commitment", "receipt_commitment", "state_diff_commitment")


class StarknetStub(NodeStub):
    """Specification 0.9 (github.com/starkware-libs/starknet-specs), with the commitments that blocks have since 0.10."""

    network = "starknet/mainnet"
    chain = "0x534e5f4d41494e"
    version = "0.9.0"
    TRANSACTION = "0x5eed"

    def hash_of(self, number: int) -> str:
        # Without zeros in front, as the specification wants.
        return "0x5" + hashlib.sha256(self.named(number)).hexdigest()[2:]

    def answer(self, method: str, params: Any) -> Any:
        named = params if isinstance(params, dict) else {}
        given = list(params.values()) if named else list(params)
        match method:
            case "starknet_chainId":
                return self.chain
            case "starknet_specVersion":
                return self.version
            case "starknet_blockNumber":
                return self.head
            case "starknet_blockHashAndNumber":
                return {"block_hash": self.hash_of(self.head), "block_number": self.head}
            case "starknet_getBlockWithTxHashes" | "starknet_getBlockWithTxs":
                return self._block(named.get("block_id", given[0] if given else "latest"))
            case "starknet_getNonce":
                return hex(self._number(named.get("block_id", given[0])))
            case "starknet_getStorageAt":
                return hex(7 + self._number(named.get("block_id", given[-1])))
            case "starknet_call":
                return ["0x1", hex(self._number(named.get("block_id", given[-1])))]
            case "starknet_getTransactionReceipt":
                return self._receipt(named.get("transaction_hash", given[0]))
            case "starknet_getClassHashAt":
                return "0xc1a55"
            case "starknet_getEvents":
                return self._events(named.get("filter", given[0]))
            case "starknet_addInvokeTransaction":
                return {"transaction_hash": self.take(given[0])}
            case _:
                raise NodeError(-32601, "Method not found")

    def _events(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Three pages. A token has the name of the node."""
        name, _, page = wanted.get("continuation_token", f"{id(self)}-1").partition("-")
        if name != str(id(self)):
            raise NodeError(33, "The supplied continuation token is invalid or unknown")
        events = [{"from_address": "0x1", "keys": [hex(int(page))], "data": []}]
        more = {} if page == "3" else {"continuation_token": f"{name}-{int(page) + 1}"}
        return {"events": events, **more}

    def _number(self, block_id: Any) -> int:
        if isinstance(block_id, dict):
            found = block_id["block_number"] if "block_number" in block_id else self.number_of(block_id["block_hash"])
        else:
            found = {"latest": self.head, "pre_confirmed": self.head, "l1_accepted": self.final}.get(block_id)
        if found is None or found > self.head:
            raise NodeError(24, "Block not found")
        return int(found)

    def _block(self, block_id: Any) -> dict[str, Any]:
        number = self._number(block_id)
        price = {"price_in_fri": "0x1", "price_in_wei": "0x1"}
        return {
            "status": "ACCEPTED_ON_L1" if number <= self.final else "ACCEPTED_ON_L2",
            "block_hash": self.hash_of(number),
            "parent_hash": self.hash_of(number - 1),
            "block_number": number,
            "new_root": "0x1",
            "timestamp": 1_700_000_000 + number,
            "sequencer_address": "0x2",
            "l1_gas_price": price,
            "l2_gas_price": price,
            "l1_data_gas_price": price,
            "l1_da_mode": "BLOB",
            "starknet_version": "0.14.0",
            "transactions": [],
            **dict.fromkeys(_COMMITMENTS, "0x1"),
            **dict.fromkeys(("event_count", "transaction_count", "state_diff_length"), 0),
        }

    def _receipt(self, transaction: str) -> dict[str, Any]:
        if transaction != self.TRANSACTION:
            raise NodeError(29, "Transaction hash not found")
        return {
            "type": "INVOKE",
            "transaction_hash": transaction,
            "actual_fee": {"amount": "0x1", "unit": "FRI"},
            "messages_sent": [],
            "events": [],
            "execution_resources": {"l1_gas": 0, "l1_data_gas": 1, "l2_gas": 2},
            "finality_status": "ACCEPTED_ON_L1",
            "execution_status": "SUCCEEDED",
            "block_hash": self.hash_of(400),
            "block_number": 400,
        }


class NearStub(NodeStub):
    """nearcore's JSON-RPC: no batches, params as objects, heights without a block, and errors with a cause."""

    network = "near/mainnet"
    chain = "mainnet"
    takes_batches = False

    def hash_of(self, number: int) -> str:
        return "Near" + hashlib.sha256(self.named(number)).hexdigest()[:40].replace("0", "z")

    def answer(self, method: str, params: Any) -> Any:
        named = params if isinstance(params, dict) else {}
        match method:
            case "status":
                info = {"latest_block_height": self.head, "earliest_block_height": 100, "syncing": False}
                return {
                    "chain_id": self.chain,
                    "protocol_version": 77,
                    "sync_info": info,
                    "version": {"version": "2.7.0"},
                }
            case "block":
                return self._block(named)
            case "gas_price":
                return {"gas_price": "100000000"}
            case "query":
                return self._query(named)
            case "broadcast_tx_async":
                return self.take(params)
            case "tx":
                return {"final_execution_status": "FINAL", "status": {"SuccessValue": ""}, "transaction": {"hash": "x"}}
            case _:
                cause = {"name": "METHOD_NOT_FOUND", "info": {"method_name": method}}
                raise NodeError(-32601, "Method not found", name="REQUEST_VALIDATION_ERROR", cause=cause)

    def _height(self, named: dict[str, Any]) -> int:
        block = named.get("block_id")
        if block is None:
            return self.final if named.get("finality") == "final" else self.head
        found = block if isinstance(block, int) else self.number_of(block)
        if found is None or found > self.head or found % 10 == 3:  # Some heights have no block.
            raise NodeError(
                *(-32000, "Server error"),
                name="HANDLER_ERROR",
                cause={"name": "UNKNOWN_BLOCK", "info": {}},
                data=f"DB Not Found Error: BLOCK HEIGHT: {block}",
            )
        return int(found)

    def _block(self, named: dict[str, Any]) -> dict[str, Any]:
        height = self._height(named)
        header = {"height": height, "hash": self.hash_of(height), "prev_hash": self.hash_of(height - 1)}
        return {"author": "a.near", "header": {**header, "timestamp": 1_700_000_000_000_000_000 + height}, "chunks": []}

    def _query(self, named: dict[str, Any]) -> dict[str, Any]:
        if named["account_id"] != "alice.near":
            cause = {"name": "UNKNOWN_ACCOUNT", "info": {"requested_account_id": named["account_id"]}}
            data = f"account {named['account_id']} does not exist while viewing"
            raise NodeError(-32000, "Server error", name="HANDLER_ERROR", cause=cause, data=data)
        height = self._height(named)
        at = {"block_height": height, "block_hash": self.hash_of(height)}
        if named["request_type"] == "call_function":
            return {"result": list(b'"hello"'), "logs": [], **at}
        return {"amount": "340282366920938463463374607431768211455", "locked": "0", "code_hash": "1" * 32,
                "storage_usage": 182, "storage_paid_at": 0, **at}  # fmt: skip


class PolkadotStub(NodeStub):
    """Substrate's JSON-RPC with the metadata of Polkadot's runtime, which @polkadot/types-support has."""

    network = "polkadot/mainnet"
    GENESIS = chain = "0x91b171bb158e2d3848fa23a9f1c25182fb8e20313b2c1eb49219da7a70ce90c3"

    def hash_of(self, number: int) -> str:
        return self.chain if number == 0 else super().hash_of(number)

    def answer(self, method: str, params: Any) -> Any:
        if method in _POLKADOT:
            return _POLKADOT[method](self, params)
        raise NodeError(-32601, "Method not found")

    def at(self, params: Any, index: int) -> int:
        if len(params) <= index or params[index] is None:
            return self.head
        if (found := self.number_of(params[index])) is None:
            raise NodeError(4003, "Client error: UnknownBlock: Header was not found in the database")
        return found

    def value(self, params: Any, index: int) -> str:
        """Every value is the number of its block, as a little-endian u64."""
        return "0x" + self.at(params, index).to_bytes(8, "little").hex()

    def header(self, params: Any) -> dict[str, Any]:
        number = self.at(params, 0)
        return {
            "parentHash": self.hash_of(number - 1),
            "number": hex(number),
            "stateRoot": self.hash_of(number + 1_000_000),
            "extrinsicsRoot": self.hash_of(number + 2_000_000),
            "digest": {"logs": []},
        }

    def block_hash(self, params: Any) -> str | None:
        number = params[0] if params and params[0] is not None else self.head
        number = int(number, 16) if isinstance(number, str) else number
        return self.hash_of(number) if number <= self.head else None

    @staticmethod
    def shipped(kind: str) -> str:
        file = SCRIPTS / "node_modules/@polkadot/types-support/metadata/v14" / f"polkadot-{kind}.js"
        return file.read_text()

    def metadata(self) -> str:
        found = re.search(r"0x[0-9a-f]+", self.shipped("hex"))
        assert found is not None
        return found[0]

    def version(self) -> Any:
        return orjson.loads(self.shipped("ver").partition("default")[2].strip().rstrip(";"))


_POLKADOT: dict[str, Callable[[PolkadotStub, Any], Any]] = {
    "chain_getHeader": PolkadotStub.header,
    "chain_getBlockHash": PolkadotStub.block_hash,
    "chain_getFinalizedHead": lambda stub, _: stub.hash_of(stub.final),
    "chain_getBlock": lambda stub, params: {
        "block": {"header": stub.header(params), "extrinsics": []},
        "justifications": None,
    },
    "system_health": lambda stub, _: {"peers": 9, "isSyncing": False, "shouldHavePeers": True},
    "system_chain": lambda stub, _: "Polkadot",
    "system_properties": lambda stub, _: {"ss58Format": 0, "tokenDecimals": 10, "tokenSymbol": "DOT"},
    "rpc_methods": lambda stub, _: {"methods": sorted(_POLKADOT)},
    "state_getMetadata": lambda stub, _: stub.metadata(),
    "state_getRuntimeVersion": lambda stub, _: stub.version(),
    "state_getStorage": lambda stub, params: stub.value(params, 1),
    "state_queryStorageAt": lambda stub, params: [
        {"block": stub.hash_of(stub.at(params, 1)), "changes": [[key, stub.value(params, 1)] for key in params[0]]}
    ],
    "system_accountNextIndex": lambda stub, _: 5,
    "author_submitExtrinsic": lambda stub, params: stub.take(params),
}


class TonStub(NodeStub):
    """toncenter's API v2. `echoes`: replies have the id of their call. Errors have the status of HTTP that is their code."""

    network = "ton/mainnet"
    ROOT = chain = "F6OpKZKqvqeFp6CQmFomXNMfMj2EnaUSOXN+Mh+wVWk="
    ADDRESS = "EQCxE6mUtQJKFnGfaROTKOt1lZbDiiX1kCixRv7Nw2Id_sDs"

    def __init__(self, *, echoes: bool = True) -> None:
        super().__init__()
        self.echoes = echoes

    def hash_of(self, number: int) -> str:
        return base64.b64encode(hashlib.sha256(self.named(number)).digest()).decode()

    async def serve(self, request: web.Request) -> web.Response:
        call = orjson.loads(await request.read())
        assert isinstance(call["params"], dict), "this server takes objects alone"
        self.calls.append((call["method"], call["params"]))
        await self.pass_or_hang()
        named = {"jsonrpc": "2.0", "id": call["id"]} if self.echoes else {}
        try:
            result = self.told(call["method"], call["params"])
        except NodeError as exc:
            reply = {"ok": False, "error": exc.error["message"], "code": exc.error["code"], **named}
            return web.json_response(reply, status=exc.error["code"])
        if isinstance(result, dict):
            result["@extra"] = f"1700000000.{len(self.calls)}:{id(self) % 97}:0.5"
        return web.json_response({"ok": True, "result": result, **named})

    def answer(self, method: str, params: Any) -> Any:
        match method:
            case "getMasterchainInfo":
                init = {**self._id(0), "root_hash": self.chain}
                info = {"last": self._id(self.head), "state_root_hash": self.ROOT, "init": init}
                return {"@type": "blocks.masterchainInfo", **info}
            case "shards":
                return {"@type": "blocks.shards", "shards": [self._id(self._number(params) + 7, workchain=0)]}
            case "getBlockTransactions":
                return {"id": self._id(params["seqno"]), "req_count": 40, "incomplete": False, "transactions": []}
            case "getAddressInformation":
                number = self._number(params)
                ids = {"@type": "internal.transactionId", "lt": "0", "hash": self.ROOT}
                state = {"balance": str(10**12 + number), "state": "active", "data": "", "code": ""}
                return {**state, "last_transaction_id": ids, "block_id": self._id(number), "sync_utime": 1_700_000_000}
            case "runGetMethod":
                return {"gas_used": 549, "exit_code": 0, "stack": [["num", hex(self._number(params))]]}
            case "sendBoc":
                self.take(params["boc"])
                return {"@type": "ok"}
            case _:
                raise NodeError(404, "Method not found")

    def _number(self, params: Any) -> int:
        number = params.get("seqno", self.head)
        if number > self.head:
            raise NodeError(500, "LITE_SERVER_NOTREADY: cannot load block: seqno not in db")
        return int(number)

    def _id(self, number: int, workchain: int = -1) -> dict[str, Any]:
        place = {"workchain": workchain, "shard": "-9223372036854775808", "seqno": number}
        return {
            "@type": "ton.blockIdExt",
            **place,
            "root_hash": self.hash_of(number),
            "file_hash": self.hash_of(-number),
        }


@asynccontextmanager
async def running_stub(stub: NodeStub) -> AsyncIterator[NodeStub]:
    async def serve(request: web.Request) -> web.Response:
        if stub.is_broken:
            stub.calls.append(("broken", None))
            return web.Response(body=b"<html>502</html>", content_type="application/json")
        return await stub.serve(request)

    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{path:.*}", serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    try:
        yield stub
    finally:
        await runner.cleanup()
