"""Nodes of Starknet, NEAR and Polkadot made from their specifications, as far as the tests call them.

No registry has nodes of these chains, so these are JSON-RPC servers with the shapes and errors that the specifications give: a
chain whose head can be moved, reads at its blocks, and one transaction. Every call is kept.
"""

from __future__ import annotations

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
    """`head` and `final` can be moved. `calls`: the methods and params that arrived."""

    network = ""
    takes_batches = True

    def __init__(self) -> None:
        self.head, self.final, self.url = 500, 480, ""
        self.calls: list[tuple[str, Any]] = []

    def hash_of(self, number: int) -> str:
        return "0x0" + hashlib.sha256(f"{self.network} {number}".encode()).hexdigest()[1:]

    def number_of(self, block_hash: str) -> int | None:
        return next((each for each in range(self.head + 1) if self.hash_of(each) == block_hash), None)

    def answer(self, method: str, params: Any) -> Any:
        raise NotImplementedError

    def count(self, method: str) -> int:
        return sum(name == method for name, _ in self.calls)

    async def serve(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        if isinstance(body, list):
            assert self.takes_batches, "a batch reached a node that refuses them"
            return web.json_response([self._reply(each) for each in body])
        return web.json_response(self._reply(body))

    def _reply(self, call: dict[str, Any]) -> dict[str, Any]:
        assert call.keys() == {"jsonrpc", "id", "method", "params"}
        self.calls.append((call["method"], call["params"]))
        try:
            return {"jsonrpc": "2.0", "id": call["id"], "result": self.answer(call["method"], call["params"])}
        except NodeError as exc:
            return {"jsonrpc": "2.0", "id": call["id"], "error": exc.error}


class StarknetStub(NodeStub):
    """Specification 0.9 (github.com/starkware-libs/starknet-specs)."""

    network = "starknet/mainnet"
    TRANSACTION = "0x5eed"

    def answer(self, method: str, params: Any) -> Any:
        named = params if isinstance(params, dict) else {}
        given = list(params.values()) if named else list(params)
        match method:
            case "starknet_chainId":
                return "0x534e5f4d41494e"
            case "starknet_specVersion":
                return "0.9.0"
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
            case _:
                raise NodeError(-32601, "Method not found")

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
    takes_batches = False

    def hash_of(self, number: int) -> str:
        return "Near" + hashlib.sha256(str(number).encode()).hexdigest()[:40].replace("0", "z")

    def answer(self, method: str, params: Any) -> Any:
        named = params if isinstance(params, dict) else {}
        match method:
            case "status":
                info = {"latest_block_height": self.head, "earliest_block_height": 100, "syncing": False}
                return {
                    "chain_id": "mainnet",
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
    GENESIS = "0x91b171bb158e2d3848fa23a9f1c25182fb8e20313b2c1eb49219da7a70ce90c3"

    def hash_of(self, number: int) -> str:
        return self.GENESIS if number == 0 else super().hash_of(number)

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
}


@asynccontextmanager
async def running_stub(stub: NodeStub) -> AsyncIterator[NodeStub]:
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/{path:.*}", stub.serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    try:
        yield stub
    finally:
        await runner.cleanup()
