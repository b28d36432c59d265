"""A network of stubs (`node_stubs.py`, `rest_stubs.py`) behind the product's worker, whatever its family is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson

from tests.fault_stubs import BeaconNodeStub, BitcoinStub, CometStub, LcdStub
from tests.http_client import Reply
from tests.node_stubs import NearStub, NodeStub, PolkadotStub, StarknetStub, TonStub, running_stub
from tests.rest_stubs import AptosStub, Asked, RestStub, TronStub
from tests.rpc_harness import NetworkHarness
from tests.web.worker import running_worker

SIGNED = "application/x.aptos.signed_transaction+bcs"


@dataclass(frozen=True)
class Read:
    """A method and its params, or a route with its target and the type of its body."""

    method: str
    params: Any = ()
    body: bytes | None = None
    type: str = "application/json"

    def truth(self, stub: NodeStub) -> Any:
        """The reply of a node itself."""
        if not isinstance(stub, RestStub):
            return stub.answer(self.method, self.params)
        path, _, query = self.method.partition("?")
        given = dict(pair.split("=") for pair in query.split("&") if pair)
        if self.body is not None:
            given = orjson.loads(self.body)
        return stub.respond(Asked("GET" if self.body is None else "POST", tuple(path.strip("/").split("/")), given))


class FamilyHarness(NetworkHarness):
    """`surface`: where clients reach the network, `rpc` or `rest`."""

    @property
    def surface(self) -> str:
        return "rpc" if self.route.network.rules.rest is None else "rest"

    async def read(self, read: Read, **headers: str) -> Reply:
        if self.surface == "rest":
            return await self.request(read.method, read.body, Content_Type=read.type, **headers)
        call = {"jsonrpc": "2.0", "id": 1, "method": read.method, "params": read.params}
        return await self.worker.send(orjson.dumps(call), network=self.network, **headers)

    async def request(self, path: str, body: bytes | None = None, **headers: str) -> Reply:
        """Send a request for a path of a REST network: a POST if it has a body."""
        given = {"Host": "x", "X-API-Key": self.worker.keys["main"]}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            given = {"Content-Type": "application/json", **given, "Content-Length": str(len(body))}
        lines = [f"{name}: {value}" for name, value in given.items()]
        verb = "GET" if body is None else "POST"
        head = "\r\n".join([f"{verb} /v1/rest/{self.network}{path} HTTP/1.1", *lines, "", ""])
        async with await self.worker.connect() as client:
            return await client.send(head.encode() + (body or b""))

    def result_of(self, reply: Reply) -> Any:
        """The result in a reply, without what differs between servers."""
        assert reply.status in (200, 202), reply
        found = reply.json if self.surface == "rest" else reply.json.get("result", reply.json)
        return {name: value for name, value in found.items() if name != "@extra"} if isinstance(found, dict) else found


@asynccontextmanager
async def served(
    *stubs: NodeStub, states: Mapping[int, str] | None = None, **sections: Any
) -> AsyncIterator[FamilyHarness]:
    """`states`: those of upstreams that are not up, by their indexes."""
    async with AsyncExitStack() as stack:
        for each in stubs:
            await stack.enter_async_context(running_stub(each))
        network = stubs[0].network
        given = [{"url": each.url, "operator": f"operator-{index}"} for index, each in enumerate(stubs)]
        running = await stack.enter_async_context(running_worker({network: given}, **sections))
        harness = FamilyHarness(running, network)
        harness.tracker.withhold()
        await harness.look()
        await harness.shows(*[(states or {}).get(index, "up") for index in range(len(stubs))])
        yield harness


@dataclass(frozen=True)
class FamilyCase:
    """Reads about the newest block and others, and a write."""

    stub: type[NodeStub]
    reads: tuple[Read, ...]
    write: Read
    # Blocks can be replaced by others.
    forks: bool = True
    # A write goes to every upstream.
    to_all: bool = False


ACCOUNT = {"request_type": "view_account", "account_id": "alice.near"}
CASES = {
    "bitcoin": FamilyCase(
        BitcoinStub,
        (
            Read("getbestblockhash", []),
            Read("getblockhash", [499]),
            Read("getblockheader", [BitcoinStub().hash_of(400), True]),
            Read("getdifficulty", []),
        ),
        Read("sendrawtransaction", [BitcoinStub.TRANSACTION]),
        to_all=True,
    ),
    "cosmos": FamilyCase(
        CometStub,
        (
            Read("block", {}),
            Read("block", {"height": "499"}),
            Read("commit", ["490"]),
            Read("validators", {"height": "500"}),
        ),
        Read("broadcast_tx_sync", {"tx": "cGVuc3RvY2s="}),
    ),
    "lcd": FamilyCase(
        LcdStub,
        (
            Read("/cosmos/base/tendermint/v1beta1/blocks/latest"),
            Read("/cosmos/base/tendermint/v1beta1/blocks/499"),
            Read("/cosmos/bank/v1beta1/supply/by_denom?denom=uatom"),
        ),
        Read("/cosmos/tx/v1beta1/txs", body=b'{"tx_bytes":"cGVuc3RvY2s=","mode":"BROADCAST_MODE_SYNC"}'),
        forks=False,
    ),
    "beacon": FamilyCase(
        BeaconNodeStub,
        (
            Read("/eth/v1/beacon/headers/head"),
            Read("/eth/v1/beacon/headers/499"),
            Read("/eth/v1/beacon/blocks/400/root"),
            Read("/eth/v1/beacon/states/head/finality_checkpoints"),
        ),
        Read("/eth/v1/beacon/pool/voluntary_exits", body=b'{"message":{"epoch":"1"}}'),
    ),
    "starknet": FamilyCase(
        StarknetStub,
        (
            Read("starknet_getBlockWithTxHashes", ["latest"]),
            Read("starknet_getBlockWithTxHashes", {"block_id": {"block_number": 499}}),
            Read("starknet_getStorageAt", ["0x1", "0x2", {"block_number": 100}]),
            Read("starknet_call", [{"contract_address": "0x1"}, "latest"]),
        ),
        Read("starknet_addInvokeTransaction", [{"type": "INVOKE"}]),
    ),
    "near": FamilyCase(
        NearStub,
        (
            Read("block", {"finality": "optimistic"}),
            Read("block", {"block_id": 499}),
            Read("query", {**ACCOUNT, "block_id": 480}),
            Read("query", {**ACCOUNT, "finality": "optimistic"}),
        ),
        Read("broadcast_tx_async", ["DgAAAA=="]),
    ),
    "polkadot": FamilyCase(
        PolkadotStub,
        (
            Read("chain_getHeader", []),
            Read("chain_getBlockHash", [499]),
            Read("state_getStorage", ["0x26aa"]),
        ),
        Read("author_submitExtrinsic", ["0x2804"]),
    ),
    "ton": FamilyCase(
        TonStub,
        (
            Read("getMasterchainInfo", {}),
            Read("shards", {"seqno": 499}),
            Read("getAddressInformation", {"address": TonStub.ADDRESS}),
        ),
        Read("sendBoc", {"boc": "te6cckEBAQEAAgAAAEysuc0="}),
        forks=False,
    ),
    "tron": FamilyCase(
        TronStub,
        (
            Read("/wallet/getnowblock"),
            Read("/wallet/getblockbynum?num=499"),
            Read("/wallet/getaccount", body=b'{"address":"41"}'),
        ),
        Read("/wallet/broadcasttransaction", body=b'{"txID":"ab"}'),
    ),
    "aptos": FamilyCase(
        AptosStub,
        (
            Read("/v1"),
            Read("/v1/blocks/by_height/499"),
            Read("/v1/accounts/0x1/balance/0x1?ledger_version=2000"),
            Read("/v1/accounts/0x1/resources"),
        ),
        Read("/v1/transactions", body=b"\x01\x02", type=SIGNED),
        forks=False,
    ),
}
