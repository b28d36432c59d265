"""A worker with a database, scripted bundlers and a scripted chain, in the event loop of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import asyncpg
import eth_abi
import orjson
import sha3

from tests.database import connected
from tests.faults import FaultProxy, fault_proxy
from tests.http_client import Reply, request, rpc
from tests.rpc_upstreams import Chain, ScriptedUpstream, scripted
from tests.web.worker import LIVE, Worker, running_worker

SEND, ESTIMATE = "eth_sendUserOperation", "eth_estimateUserOperationGas"
BY_HASH, RECEIPT = "eth_getUserOperationByHash", "eth_getUserOperationReceipt"
ENTRY_POINTS_METHOD = "eth_supportedEntryPoints"
ENTRY_POINTS = {
    "0.6": "0x5FF137D4b0FDCD49DcA30c7CF57E578a026d2789",
    "0.7": "0x0000000071727De22E5E9d8BAf0edAc6f37da032",
    "0.8": "0x4337084D9E255Ff0702461CF8895CE9E3b5Ff108",
}
EP07 = ENTRY_POINTS["0.7"]
SENDER = "0x9f1A0469CBce2fEb53C705746446981548845b3B"
OPERATION: dict[str, Any] = {
    "sender": SENDER,
    "nonce": "0x3",
    "callData": "0xb61d27f6",
    "callGasLimit": "0x13880",
    "verificationGasLimit": "0x186a0",
    "preVerificationGas": "0xc350",
    "maxFeePerGas": "0x3b9aca000",
    "maxPriorityFeePerGas": "0x3b9aca00",
    "signature": "0x" + "ab" * 65,
}
GAS = {"preVerificationGas": "0xc350", "verificationGasLimit": "0x186a0", "callGasLimit": "0x13880"}


def _keccak(data: bytes) -> bytes:
    return bytes(sha3.keccak_256(data).digest())


def hash_v07(operation: Mapping[str, Any], *, chain_id: int = 1, entry_point: str = EP07) -> str:
    """The hash of an operation without factory and paymaster, by an ABI encoder that the service does not use."""
    number = {name: int(value, 16) for name, value in operation.items() if name not in ("sender", "callData")}
    packed = eth_abi.encode(
        ["address", "uint256", "bytes32", "bytes32", "uint128", "uint128", "uint256", "uint128", "uint128", "bytes32"],
        [
            operation["sender"], number["nonce"], _keccak(b""), _keccak(bytes.fromhex(operation["callData"][2:])),
            0, 0, number["preVerificationGas"], 0, 0, _keccak(b""),
        ],
    )  # fmt: skip
    limits = number["verificationGasLimit"] << 128 | number["callGasLimit"]
    fees = number["maxPriorityFeePerGas"] << 128 | number["maxFeePerGas"]
    words = [packed[at : at + 32] for at in range(0, len(packed), 32)]
    fields = [*words[:4], limits.to_bytes(32, "big"), words[6], fees.to_bytes(32, "big"), words[9]]
    whole = eth_abi.encode(["bytes32", "address", "uint256"], [_keccak(b"".join(fields)), entry_point, chain_id])
    return "0x" + _keccak(whole).hex()


HASH = hash_v07(OPERATION)


class ScriptedBundler(ScriptedUpstream):
    """A bundler that accepts every operation, and returns its 0.7 hash."""

    def _eth_sendUserOperation(self, params: list[Any]) -> str:
        return hash_v07(params[0])

    def _eth_estimateUserOperationGas(self, params: list[Any]) -> dict[str, str]:
        return GAS

    def _eth_getUserOperationByHash(self, params: list[Any]) -> None:
        return None

    _eth_getUserOperationReceipt = _eth_getUserOperationByHash

    def _eth_supportedEntryPoints(self, params: list[Any]) -> list[str]:
        return [*ENTRY_POINTS.values()]


class BundlerHarness:
    def __init__(self, running: Worker, bundlers: list[ScriptedBundler], chain: ScriptedUpstream, url: str) -> None:
        self.worker = running
        self.bundlers = bundlers
        self.chain = chain
        self.proxies: list[FaultProxy] = []
        self._url = url

    async def raw(self, data: bytes) -> Reply:
        async with await self.worker.connect() as client:
            return await client.send(data)

    def request(self, body: bytes, *, key: str = "main", **headers: str) -> bytes:
        return request("POST", f"/v1/bundler/{LIVE}", body, key=self.worker.keys[key], **headers)

    async def call(self, method: str, *params: Any, key: str = "main", **headers: str) -> Reply:
        return await self.raw(self.request(rpc(method, params), key=key, **headers))

    async def send(self, operation: Any = None, entry_point: Any = EP07, **options: Any) -> Reply:
        return await self.call(SEND, OPERATION if operation is None else operation, entry_point, **options)

    async def batch(self, *calls: tuple[str, list[Any]], key: str = "main") -> Reply:
        body = [{"jsonrpc": "2.0", "id": n, "method": m, "params": p} for n, (m, p) in enumerate(calls)]
        return await self.raw(self.request(orjson.dumps(body), key=key))

    def sends(self) -> int:
        """How often an operation was sent, whether or not it reached a bundler."""
        return sum(each.methods[SEND] for each in self.proxies) or sum(each.count(SEND) for each in self.bundlers)

    async def record(self, name: str = HASH) -> asyncpg.Record | None:
        """The recorded operation."""
        async with connected(self._url) as connection:
            query = "select * from operations where hash = $1"
            return await connection.fetchrow(query, bytes.fromhex(name[2:]))


@asynccontextmanager
async def bundler_harness(
    database: str, count: int = 1, *, faults: bool = False, **sections: Any
) -> AsyncIterator[BundlerHarness]:
    """A worker with `count` bundlers for a live network on a scripted chain; with `faults`, each behind a fault proxy."""
    async with AsyncExitStack() as stack:
        (chain,) = await stack.enter_async_context(scripted(1, Chain()))
        bundlers = await stack.enter_async_context(scripted(count, Chain(), ScriptedBundler))
        proxies = [await stack.enter_async_context(fault_proxy(each.port)) for each in bundlers] if faults else []
        given = [{"network": LIVE, "url": each.url} for each in proxies or bundlers]
        settings = {"url": database, "acquire_timeout_s": 5.0}
        running = await stack.enter_async_context(
            running_worker({LIVE: [chain.url]}, database=settings, bundlers=given, **sections)
        )
        await running.app.pool.open()
        harness = BundlerHarness(running, bundlers, chain, database)  # type: ignore[arg-type]
        harness.proxies = proxies
        yield harness
