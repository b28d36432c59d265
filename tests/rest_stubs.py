"""Nodes of Aptos and Tron made from their specifications, as far as the tests call them. See `node_stubs.py`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from tests.node_stubs import NodeError, NodeStub


@dataclass(frozen=True)
class Asked:
    """A request. `given`: its query, or its JSON body."""

    verb: str
    parts: tuple[str, ...]
    given: Mapping[str, Any] = field(default_factory=dict)
    body: bytes = b""
    type: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def route(self) -> str:
        return f"{self.verb} /{'/'.join(self.parts)}"


class RestStub(NodeStub):
    """Answers requests in place of calls. The code of a NodeError is the status of the reply, and the rest its body."""

    def reply_headers(self) -> dict[str, str]:
        return {}

    def respond(self, asked: Asked) -> Any:
        raise NotImplementedError

    async def serve(self, request: web.Request) -> web.Response:
        body = await request.read()
        is_json = request.content_type == "application/json"
        given = orjson.loads(body) if is_json and body else dict(request.query)
        asked = Asked(
            request.method,
            tuple(request.path.strip("/").split("/")),
            given,
            body,
            request.content_type,
            request.headers,
        )
        self.calls.append((asked.route, given))
        await self.pass_or_hang()
        try:
            found = {"made": "up"} if asked.route == self.lies_about else self.respond(asked)
            status = 200
        except NodeError as exc:
            status = exc.error["code"]
            found = {name: value for name, value in exc.error.items() if name != "code"}
        # Some nodes end their replies with a line break.
        headers = {"Content-Type": "application/json", **self.reply_headers()}
        return web.Response(body=orjson.dumps(found) + b"\n", status=status, headers=headers)


class AptosStub(RestStub):
    """The REST API of a full node. A block has ten versions. An account's balance is the version at which it is read."""

    network = "aptos/mainnet"
    chain = "1"
    VERSIONS = 10
    HASH = "0x" + "ab" * 32
    COIN = "0x1::aptos_coin::AptosCoin"

    def __init__(self) -> None:
        super().__init__()
        self.oldest = 0

    @property
    def version(self) -> int:
        return self.head * self.VERSIONS + self.VERSIONS - 1

    def reply_headers(self) -> dict[str, str]:
        return {
            "X-Aptos-Chain-Id": self.chain,
            "X-Aptos-Ledger-Version": str(self.version),
            "X-Aptos-Block-Height": str(self.head),
            "X-Aptos-Oldest-Block-Height": str(self.oldest),
            "X-Private": "secret",
        }

    def respond(self, asked: Asked) -> Any:
        match (asked.verb, *asked.parts[1:]):
            case ("GET",):
                return self._ledger()
            case ("GET", "blocks", "by_height", height):
                return self._block(int(height))
            case ("GET", "blocks", "by_version", version):
                return self._block(int(version) // self.VERSIONS)
            case ("GET", "estimate_gas_price"):
                return {"gas_estimate": 100, "deprioritized_gas_estimate": 100, "prioritized_gas_estimate": 150}
            case ("GET", "transactions", "by_hash" | "wait_by_hash" as kind, found):
                return self._transaction(found, is_done=kind == "wait_by_hash")
            case ("GET", "accounts", address, *rest):
                return self._account(address, rest, self._version(asked))
            case ("POST", "view"):
                return [str(self._version(asked))]
            case ("POST", "transactions"):
                assert asked.type == "application/x.aptos.signed_transaction+bcs"
                self.take(asked.body.hex())
                raise NodeError(202, "", hash=self.HASH, type="pending_transaction", **_SENT)
            case _:
                raise NodeError(404, "no such route", error_code="web_framework_error")

    def _ledger(self) -> dict[str, Any]:
        return {
            "chain_id": int(self.chain),
            "epoch": "7",
            "ledger_version": str(self.version),
            "oldest_ledger_version": str(self.oldest * self.VERSIONS),
            "ledger_timestamp": str(1_700_000_000_000_000 + self.head),
            "node_role": "full_node",
            "oldest_block_height": str(self.oldest),
            "block_height": str(self.head),
            "git_hash": "0" * 40,
        }

    def _version(self, asked: Asked) -> int:
        version = int(asked.given.get("ledger_version", self.version)) if asked.verb == "GET" else self.version
        if version > self.version:
            message = f"Ledger version({version}) is not available"
            raise NodeError(404, message, error_code="version_not_found", vm_error_code=None)
        if version < self.oldest * self.VERSIONS:
            raise NodeError(410, f"Ledger version({version}) has been pruned", error_code="version_pruned")
        return version

    def _block(self, height: int) -> dict[str, Any]:
        if height > self.head:
            raise NodeError(404, f"Block not found by height({height})", error_code="block_not_found")
        if height < self.oldest:
            raise NodeError(410, f"Block({height}) has been pruned", error_code="block_pruned")
        return {
            "block_height": str(height),
            "block_hash": self.hash_of(height),
            "block_timestamp": str(1_700_000_000_000_000 + height),
            "first_version": str(height * self.VERSIONS),
            "last_version": str(height * self.VERSIONS + self.VERSIONS - 1),
            "transactions": None,
        }

    def _transaction(self, found: str, *, is_done: bool) -> dict[str, Any]:
        if found != self.HASH or not self.writes:
            message = f"Transaction not found by Transaction hash({found})"
            raise NodeError(404, message, error_code="transaction_not_found")
        if not is_done and len(self.writes) == 1 and self.head == 500:
            return {"hash": found, "type": "pending_transaction", **_SENT}
        done = {"version": str(self.version), "success": True, "vm_status": "Executed successfully"}
        return {"hash": found, "type": "user_transaction", **_SENT, **done}

    def _account(self, address: str, rest: list[str], version: int) -> Any:
        if address.endswith("dead"):
            raise NodeError(404, f"Account not found by Address({address})", error_code="account_not_found")
        match rest:
            case []:
                return {"sequence_number": "3", "authentication_key": address}
            case ["balance", _]:
                return version
            case ["resource", kind]:
                return {"type": kind, "data": {"coin": {"value": str(version)}}}
            case ["resources"]:
                return [{"type": f"0x1::coin::CoinStore<{self.COIN}>", "data": {"coin": {"value": str(version)}}}]
            case _:
                raise NodeError(404, "no such resource", error_code="resource_not_found")


_SENT = {
    "sender": "0x1",
    "sequence_number": "3",
    "max_gas_amount": "200000",
    "gas_unit_price": "100",
    "expiration_timestamp_secs": "1900000000",
    "payload": {"type": "entry_function_payload", "function": "0x1::a::b", "type_arguments": [], "arguments": []},
}


class TronStub(RestStub):
    """java-tron's full node. Errors and empty objects have the status 200, and a member that is zero is left out."""

    network = "tron/mainnet"
    GENESIS = chain = "00000000000000001ebf88508a03865c71d452e25f4d51194196a1d22b6653dc"
    TRANSACTION = "5e" * 32

    def __init__(self) -> None:
        super().__init__()
        # An error for all reads but those of blocks.
        self.fails_with = ""

    def hash_of(self, number: int) -> str:
        tail = hashlib.sha256(self.named(number)).hexdigest()[16:]
        return self.chain if number == 0 else f"{number:016x}{tail}"

    def respond(self, asked: Asked) -> Any:
        surface, name = asked.parts
        newest = self.final if surface == "walletsolidity" else self.head
        given = asked.given
        match name:
            case "getnowblock":
                return self._block(newest)
            case "getblock":
                return self._block(int(given.get("id_or_num", newest)))
            case "getblockbynum":
                number = int(given["num"])
                return self._block(number) if number <= newest else {}
            case "getblockbyid":
                found = self.number_of(given["value"])
                return {} if found is None else self._block(found)
            case "getblockbylimitnext":
                numbers = range(int(given["startNum"]), min(int(given["endNum"]), newest + 1))
                return {"block": [self._block(number) for number in numbers]}
            case _ if self.fails_with:
                return {"Error": self.fails_with}
            case "gettransactioninfobyid":
                if given["value"] != self.TRANSACTION or newest < 400:
                    return {}
                return {"id": self.TRANSACTION, "blockNumber": 400, "fee": 1100, "receipt": {"net_usage": 268}}
            case "getaccount":
                return {"address": given["address"], "balance": 1_000_000 + newest}
            case "getchainparameters":
                return {"chainParameter": [{"key": "getMaintenanceTimeInterval", "value": 21_600_000}]}
            case "triggerconstantcontract":
                word = f"{newest:064x}"
                return {"result": {"result": True}, "energy_used": 541, "constant_result": [word]}
            case "broadcasttransaction":
                self.take(given)
                return {"result": True, "txid": given["txID"]}
            case _:
                return {"Error": "class java.lang.NullPointerException : null"}

    def _block(self, number: int) -> dict[str, Any]:
        raw: dict[str, Any] = {"number": number} if number else {}
        raw |= {"timestamp": 1_700_000_000_000 + 3000 * number, "witness_address": "41" + "11" * 20}
        raw |= {"txTrieRoot": "00" * 32, "parentHash": self.hash_of(max(number - 1, 0)), "version": 30}
        return {"blockID": self.hash_of(number), "block_header": {"raw_data": raw, "witness_signature": "00" * 65}}
