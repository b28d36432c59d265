"""Nodes of Bitcoin, CometBFT, the REST API of Cosmos and the beacon chain, made from their specifications.

The tests of these families run on real nodes, which cannot be put on a fork, hang or lie when a test wants it. These can: see
`node_stubs.py`.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import orjson

from tests.node_stubs import NodeError, NodeStub
from tests.rest_stubs import Asked, RestStub


class BitcoinStub(NodeStub):
    """Bitcoin Core. A transaction may be sent again."""

    network = "bitcoin/testnet"
    chain = "000000000933ea01ad0ee984209779baaec3ced90fa3f408719526f8d77f4943"
    # One input, one output, no witness.
    TRANSACTION = "0200000001" + "11" * 32 + "0000000000ffffffff01" + "0010000000000000" + "00" + "00000000"

    def hash_of(self, number: int) -> str:
        return self.chain if number == 0 else hashlib.sha256(self.named(number)).hexdigest()

    def answer(self, method: str, params: Any) -> Any:
        match method:
            case "getblockcount":
                return self.head
            case "getbestblockhash":
                return self.hash_of(self.head)
            case "getblockhash":
                if params[0] > self.head:
                    raise NodeError(-8, "Block height out of range")
                return self.hash_of(params[0])
            case "getblockheader":
                return self._header(params[0])
            case "getblockchaininfo":
                return {"chain": "test", "blocks": self.head, "initialblockdownload": False, "pruned": False}
            case "getindexinfo":
                return {"txindex": {"synced": True, "best_block_height": self.head}}
            case "getdifficulty":
                return 1.5 + self.head
            case "sendrawtransaction":
                self.take(params[0])
                raw = hashlib.sha256(bytes.fromhex(params[0])).digest()
                return hashlib.sha256(raw).digest()[::-1].hex()
            case _:
                raise NodeError(-32601, "Method not found")

    def _header(self, block_hash: str) -> dict[str, Any]:
        number = self.number_of(block_hash)
        if number is None:
            raise NodeError(-5, "Block not found")
        before = {} if number == 0 else {"previousblockhash": self.hash_of(number - 1)}
        after = {} if number == self.head else {"nextblockhash": self.hash_of(number + 1)}
        return {"hash": block_hash, "confirmations": self.head - number + 1, "height": number, **before, **after}


class CometStub(NodeStub):
    """CometBFT 0.38. Integers are texts, and almost every error is -32603 with the reason in `data`."""

    network = "cosmoshub/mainnet"
    chain = "cosmoshub-4"

    def hash_of(self, number: int) -> str:
        return hashlib.sha256(self.named(number)).hexdigest().upper()

    def answer(self, method: str, params: Any) -> Any:
        named = params if isinstance(params, dict) else dict(zip(("height",), params, strict=False))
        match method:
            case "status":
                newest = {"latest_block_hash": self.hash_of(self.head), "latest_block_height": str(self.head)}
                info = {**newest, "earliest_block_height": "1", "catching_up": False}
                return {"node_info": {"network": self.chain}, "sync_info": info}
            case "commit":
                number = self._number(named)
                commit = {"height": str(number), "block_id": {"hash": self.hash_of(number)}}
                return {"signed_header": {"header": {"height": str(number)}, "commit": commit}, "canonical": True}
            case "block":
                number = self._number(named)
                header = {"chain_id": self.chain, "height": str(number)}
                return {"block_id": {"hash": self.hash_of(number)}, "block": {"header": header}}
            case "validators":
                return {"block_height": str(self._number(named)), "validators": [], "count": "0", "total": "0"}
            case "broadcast_tx_sync":
                self.take(named["tx"])
                name = hashlib.sha256(base64.b64decode(named["tx"])).hexdigest().upper()
                return {"code": 0, "data": "", "log": "", "codespace": "", "hash": name}
            case _:
                raise NodeError(-32601, "Method not found")

    def _number(self, named: dict[str, Any]) -> int:
        number = int(named.get("height") or self.head)
        if number > self.head:
            reason = f"height {number} must be less than or equal to the current blockchain height {self.head}"
            raise NodeError(-32603, "Internal error", data=reason)
        return number


class LcdStub(RestStub):
    """The REST API of a node of the Cosmos SDK. Every reply has the height of the state that it is from in a header. `kept`: of
    how many heights it keeps the state."""

    network = "cosmoshub-lcd/mainnet"
    chain = "cosmoshub-4"
    kept = 1_000_000
    HEIGHT = "x-cosmos-block-height"

    def reply_headers(self) -> dict[str, str]:
        return {"Grpc-Metadata-X-Cosmos-Block-Height": str(self.head)}

    def respond(self, asked: Asked) -> Any:
        match asked.parts:
            case ("cosmos", "base", "tendermint", _, "syncing"):
                return {"syncing": False}
            case ("cosmos", "base", "tendermint", _, "node_info"):
                return {"default_node_info": {"network": self.chain}}
            case ("cosmos", "base", "tendermint", _, "blocks", height):
                return self._block(self.head if height == "latest" else int(height))
            case ("cosmos", "bank", _, "supply", "by_denom"):
                return {"amount": {"denom": asked.given["denom"], "amount": str(1_000_000 + self._height(asked))}}
            case ("cosmos", "staking", _, "params"):
                self._height(asked)
                return {"params": {"unbonding_time": "1814400s"}}
            case ("cosmos", "tx", _, "txs") if asked.verb == "POST":
                self.take(asked.given)
                name = hashlib.sha256(base64.b64decode(asked.given["tx_bytes"])).hexdigest().upper()
                return {"tx_response": {"height": "0", "txhash": name, "code": 0}}
            case _:
                raise NodeError(501, "Not Implemented")

    def _height(self, asked: Asked) -> int:
        height = int(asked.headers.get(self.HEIGHT, 0)) or self.head
        if height > self.head:
            raise NodeError(400, "cannot query with height in the future; please provide a valid height")
        if height <= self.head - self.kept:
            raise NodeError(500, f"failed to load state at height {height}; version does not exist")
        return height

    def _block(self, number: int) -> dict[str, Any]:
        if number > self.head:
            raise NodeError(400, "requested block height is bigger then the chain length: invalid request")
        block_hash = base64.b64encode(hashlib.sha256(self.named(number)).digest()).decode()
        return {"block_id": {"hash": block_hash}, "block": {"header": {"height": str(number)}}}


class BeaconNodeStub(RestStub):
    """A beacon node with a block in every slot."""

    network = "ethereum-beacon/mainnet"
    chain = "0x4b363db94e286120d76eb905340fdd4e54bfe9f06bf33ff6cf5ad27f511bfe95"

    def respond(self, asked: Asked) -> Any:
        match asked.parts[2:]:
            case ("beacon", "genesis"):
                return {"data": {"genesis_time": "1606824023", "genesis_validators_root": self.chain}}
            case ("node", "syncing"):
                return {"data": {"head_slot": str(self.head), "sync_distance": "0", "is_syncing": False}}
            case ("beacon", "headers", word):
                slot = self._slot(word)
                message = {"slot": str(slot), "parent_root": self.hash_of(slot - 1)}
                return self._about(
                    slot, {"root": self.hash_of(slot), "canonical": True, "header": {"message": message}}
                )
            case ("beacon", "blocks", word, "root"):
                return self._about(self._slot(word), {"root": self.hash_of(self._slot(word))})
            case ("beacon", "states", word, "finality_checkpoints"):
                return self._about(self._slot(word), {"finalized": {"epoch": str(self._slot(word) // 32 - 2)}})
            case ("beacon", "pool", "voluntary_exits") if asked.verb == "POST":
                self.take(orjson.loads(asked.body))
                return {}
            case _:
                raise NodeError(404, "no such route")

    def _slot(self, word: str) -> int:
        slot = {"head": self.head, "finalized": self.final, "justified": self.final, "genesis": 0}.get(word)
        if slot is None:
            slot = int(word) if word.isdecimal() else self.number_of(word)
        if slot is None or slot > self.head:
            raise NodeError(404, f"No block found for id '{word}'")
        return slot

    def _about(self, slot: int, data: Any) -> dict[str, Any]:
        return {"execution_optimistic": False, "finalized": slot <= self.final, "data": data}
