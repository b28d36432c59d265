"""Starknet on a real node: starknet-devnet, whose blocks are made, aborted and made again. `make starknet` builds it.

Every result is compared with that of the node itself, byte for byte.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import aiohttp
import msgspec
import orjson
import pytest

from proxy.dev.chain import free_port
from proxy.dev.child import die_with_parent
from tests import node_programs
from tests.client_scripts import run_script
from tests.http_client import RawReply, Reply
from tests.random_reads import RandomReads, reads_or
from tests.rpc_harness import NetworkHarness
from tests.service import until
from tests.web.worker import on_uvloop, running_worker

# The devnet says that it is this network.
NETWORK, CHAIN = "starknet/sepolia", "0x534e5f5345504f4c4941"
STRK = "0x4718f5a0fc34cc1af16a1cdee98ffb20c31f5cd61d6ab07201858f4287c938d"
BALANCE_OF = "0x2e4263afad30923c891518314c3c95dbe830a16874e8abc5777a9a20b54c76e"
# Blocks that are never aborted: below them, the service may keep results.
BASE = 12


class Devnet:
    def __init__(self, port: int, session: aiohttp.ClientSession) -> None:
        self.url = f"http://127.0.0.1:{port}/rpc"
        self._session = session

    def __repr__(self) -> str:
        return f"<Devnet at {self.url}>"

    async def reply(self, method: str, params: Any) -> RawReply:
        call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        async with self._session.post(self.url, json=call) as response:
            return msgspec.json.decode(await response.read(), type=RawReply)

    async def ask(self, method: str, **params: Any) -> Any:
        reply = await self.reply(method, params)
        assert reply.error is None, (method, params, reply.error)
        return orjson.loads(bytes(reply.result))

    async def is_there(self) -> bool:
        with suppress(aiohttp.ClientError):
            return bool(await self.ask("starknet_chainId"))
        return False

    async def make(self, amount: int) -> str:
        """A block with one transaction. Returns its name."""
        made = await self.ask("devnet_mint", address=hex(amount), amount=amount, unit="FRI")
        return str(made["tx_hash"])


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    program, found = node_programs.require("starknet-devnet", "Rust", made_by="starknet"), free_port()
    argv = [str(program), "--host", "127.0.0.1", "--port", str(found), "--seed", "0", "--accounts", "2"]
    argv += ["--state-archive-capacity", "full"]
    quiet = subprocess.DEVNULL
    end_too = partial(die_with_parent, signal.SIGTERM)
    process = subprocess.Popen(argv, stdout=quiet, stderr=quiet, preexec_fn=end_too)
    try:
        yield found
    finally:
        node_programs.end([process])


@asynccontextmanager
async def devnet_harness(port: int) -> AsyncIterator[tuple[NetworkHarness, Devnet]]:
    async with aiohttp.ClientSession() as session:
        devnet = Devnet(port, session)
        await until(devnet.is_there, within_s=60)
        async with running_worker({NETWORK: [devnet.url]}) as running:
            harness = NetworkHarness(running, NETWORK)
            harness.tracker.withhold()
            await harness.look()
            await harness.shows("up")
            yield harness, devnet


class DevnetReads(RandomReads):
    def __init__(self, harness: NetworkHarness, devnet: Devnet) -> None:
        super().__init__(harness, "starknet-devnet")
        self._devnet = devnet
        self._head = 0
        # Hashes of blocks that are never aborted.
        self._hashes: list[str] = []
        # Transactions of the last blocks, also of aborted ones.
        self._transactions: deque[str] = deque(maxlen=12)

    async def begin(self) -> None:
        self._head = await self._devnet.ask("starknet_blockNumber")
        await self._make(max(0, BASE - self._head))
        for number in range(BASE):
            found = await self._devnet.ask("starknet_getBlockWithTxHashes", block_id={"block_number": number})
            self._hashes.append(found["block_hash"])

    async def step(self) -> None:
        """New blocks, or up to three that are aborted, and others in their places. The head is always a higher one, because the
        hash of a block is that of its number: nobody can know that it was replaced by another."""
        depth = min(self.chance.choice([0, 0, 0, 1, 2, 3]), self._head - BASE)
        if depth > 0:
            await self._devnet.ask("devnet_abortBlocks", starting_block_id={"block_number": self._head - depth + 1})
            self._head -= depth
        await self._make(depth + self.chance.randint(1, 2))

    async def _make(self, count: int) -> None:
        for _ in range(count):
            self._transactions.append(await self._devnet.make(self.chance.randrange(1, 1 << 60)))
            self._head += 1

    def random_call(self) -> tuple[str, Any]:
        chance = self.chance
        number = chance.randint(max(0, self._head - 8), self._head)
        block = chance.choice(["latest", {"block_number": number}])
        if chance.random() < 0.2:
            block = {"block_hash": chance.choice(self._hashes)}
        called = {"contract_address": STRK, "entry_point_selector": BALANCE_OF, "calldata": ["0x1"]}
        span = {"from_block": {"block_number": number}, "to_block": {"block_number": self._head}, "chunk_size": 100}
        calls: list[tuple[str, dict[str, Any]]] = [
            ("starknet_blockNumber", {}),
            ("starknet_getBlockWithTxHashes", {"block_id": block}),
            ("starknet_getBlockWithTxs", {"block_id": block}),
            ("starknet_getBlockWithReceipts", {"block_id": block}),
            ("starknet_getBlockTransactionCount", {"block_id": block}),
            ("starknet_getStateUpdate", {"block_id": block}),
            ("starknet_getStorageAt", {"contract_address": STRK, "key": "0x1", "block_id": block}),
            ("starknet_getNonce", {"block_id": block, "contract_address": STRK}),
            ("starknet_getClassHashAt", {"block_id": block, "contract_address": STRK}),
            ("starknet_call", {"request": called, "block_id": block}),
            ("starknet_getTransactionReceipt", {"transaction_hash": chance.choice(self._transactions)}),
            ("starknet_getTransactionByHash", {"transaction_hash": chance.choice(self._transactions)}),
            ("starknet_getEvents", {"filter": {**span, "address": STRK, "keys": []}}),
        ]
        method, named = chance.choice(calls)
        # The order of the members is that of the specification, so the values alone are the same call.
        return method, named if chance.random() < 0.5 else [*named.values()]

    async def expected(self, method: str, params: Any) -> dict[str, Any]:
        reply = await self._devnet.reply(method, params)
        return {"error": reply.error} if reply.error else {"result": bytes(reply.result)}

    def result_of(self, reply: Reply) -> Any:
        return bytes(msgspec.json.decode(reply.body, type=RawReply).result)


@on_uvloop
async def test_every_read_is_that_of_the_node_while_blocks_are_made_and_aborted(port: int) -> None:
    async with devnet_harness(port) as (harness, devnet):
        reads = DevnetReads(harness, devnet)
        await reads.begin()
        await harness.look()
        await reads.run(reads_or(600))
        print(reads)
        assert reads.wrong == []
        assert reads.counts["right"] > 0.5 * reads.counts.total()


@on_uvloop
async def test_pages_of_events_are_those_of_the_node(port: int) -> None:
    """Tokens are others: ours name the upstream, too."""
    async with devnet_harness(port) as (harness, devnet):
        for amount in range(1, 8):
            await devnet.make(amount)
        await harness.look()
        wanted = {"from_block": {"block_number": 0}, "to_block": "latest", "chunk_size": 3, "address": STRK, "keys": []}
        ours: dict[str, str] = {}
        theirs: dict[str, str] = {}
        for _ in range(3):
            found = await harness.result("starknet_getEvents", {"filter": {**wanted, **ours}})
            expected = await devnet.ask("starknet_getEvents", filter={**wanted, **theirs})
            assert found["events"] == expected["events"]
            ours, theirs = ({"continuation_token": each["continuation_token"]} for each in (found, expected))
            assert ours != theirs


@on_uvloop
async def test_starknet_js_transfers_on_a_real_node(port: int) -> None:
    """It reads, signs, sends, and waits for the receipt."""
    async with devnet_harness(port) as (harness, devnet):
        await devnet.make(77)
        await harness.look()
        harness.watch()
        head = await devnet.ask("starknet_blockHashAndNumber")
        (funded, *_) = await devnet.ask("devnet_getPredeployedAccounts")
        account = {"address": funded["address"], "key": funded["private_key"]}
        url = f"http://127.0.0.1:{harness.worker.port}/v1/rpc/{NETWORK}"
        task = {"url": url, "key": harness.worker.keys["main"], "account": account, "token": STRK, "amount": "1234"}
        seen = await asyncio.to_thread(run_script, "starknet_devnet.mjs", {**task, "to": "0x1234567"}, within_s=90)
        assert (seen["chain"], seen["number"], seen["hash"]) == (CHAIN, head["block_number"], head["block_hash"])
        assert seen["status"] == "SUCCEEDED"
        assert int(seen["after"], 0) - int(seen["before"], 0) == 1234
        receipt = await devnet.ask("starknet_getTransactionReceipt", transaction_hash=seen["sent"])
        assert receipt["execution_status"] == "SUCCEEDED"
