"""Cosmos chains on real nodes: a validator and a full node of CometBFT with its key-value application.

Every result below the head is compared with that of the node itself, byte for byte.
"""

from __future__ import annotations

import base64
import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson
import pytest

from proxy.dev.chain import free_port
from proxy.dev.child import die_with_parent
from proxy.settings import load_tables
from tests.rpc_harness import NetworkHarness
from tests.service import until
from tests.web import worker as worker_module
from tests.web.worker import on_uvloop, running_worker

READS = 1500
CHAIN = """name = "kv"
family = "cosmos"
native = { symbol = "KV", decimals = 6 }

[networks.mainnet]
genesis = "kv-1"
block_time_s = 1.0
"""


class _Reply(msgspec.Struct):
    result: msgspec.Raw = msgspec.Raw()
    error: Any = None


class CosmosNode:
    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.port = port
        self.process = process
        self.session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"<CosmosNode :{self.port}>"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    async def raw(self, method: str, params: Any = None) -> tuple[bytes, Any]:
        assert self.session is not None
        call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params or {}}
        async with self.session.post(self.url, json=call) as response:
            reply = msgspec.json.decode(await response.read(), type=_Reply)
        return bytes(reply.result), reply.error

    async def height(self) -> int:
        with suppress(aiohttp.ClientError, OSError):
            result, error = await self.raw("status")
            return 0 if error else int(orjson.loads(result)["sync_info"]["latest_block_height"])
        return 0


def cometbft() -> Path:
    built = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "cometbft"
    if path := shutil.which("cometbft") or (str(built) if built.exists() else ""):
        return Path(path)
    pytest.skip("cometbft is not installed: build it with `make cometbft`, which needs Go")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[CosmosNode]]:
    """A validator, and a full node that follows it."""
    binary, found = str(cometbft()), list[CosmosNode]()
    homes, peer_port, peer = [tmp_path / "a", tmp_path / "b"], free_port(), ""
    for home in homes:
        subprocess.run([binary, "init", "--home", str(home)], check=True, capture_output=True)
    genesis = homes[0] / "config" / "genesis.json"
    genesis.write_text(re.sub(r'"chain_id": "[^"]*"', '"chain_id": "kv-1"', genesis.read_text()))
    shutil.copy(genesis, homes[1] / "config" / "genesis.json")
    try:
        for index, home in enumerate(homes):
            port, own = free_port(), peer_port if index == 0 else free_port()
            argv = [binary, "node", "--home", str(home), "--proxy_app=kvstore", f"--rpc.laddr=tcp://127.0.0.1:{port}"]
            argv += [f"--p2p.laddr=tcp://127.0.0.1:{own}", "--p2p.pex=false", "--rpc.pprof_laddr="]
            argv += [f"--p2p.persistent_peers={peer}"] if peer else []
            output = subprocess.DEVNULL
            end_too = partial(die_with_parent, signal.SIGTERM)
            found.append(CosmosNode(port, subprocess.Popen(argv, stdout=output, stderr=output, preexec_fn=end_too)))
            named = subprocess.run([binary, "show-node-id", "--home", str(home)], check=True, capture_output=True)
            peer = f"{named.stdout.decode().strip()}@127.0.0.1:{peer_port}"
        yield found
    finally:
        for node in found:
            node.process.terminate()
        for node in found:
            with suppress(subprocess.TimeoutExpired):
                node.process.wait(20)
            node.process.kill()


@pytest.fixture
def own_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain of the nodes, as `chains add --family cosmos` writes it."""
    (tmp_path / "own" / "chains").mkdir(parents=True)
    (tmp_path / "own" / "chains" / "kv.toml").write_text(CHAIN)
    monkeypatch.setattr(worker_module, "TABLES", load_tables(own=str(tmp_path / "own")))


@asynccontextmanager
async def cosmos_harness(nodes: list[CosmosNode], height: int = 6) -> AsyncIterator[NetworkHarness]:
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        for node in nodes:
            node.session = session

            async def is_there(node: CosmosNode = node) -> bool:
                return await node.height() >= height

            await until(is_there, within_s=60)
        running = await stack.enter_async_context(running_worker({"kv/mainnet": [each.url for each in nodes]}))
        harness = NetworkHarness(running, "kv/mainnet")
        harness.tracker.withhold()
        await harness.look()
        harness.watch()
        yield harness


async def ask(harness: NetworkHarness, method: str, params: Any) -> tuple[bytes, Any]:
    body = orjson.dumps({"jsonrpc": "2.0", "id": 7, "method": method, "params": params})
    reply = await harness.worker.send(body, network=harness.network)
    assert reply.status == 200, (method, params, reply)
    found = msgspec.json.decode(reply.body, type=_Reply)
    return bytes(found.result), found.error


@on_uvloop
async def test_every_result_is_that_of_the_node_while_blocks_are_made(nodes: list[CosmosNode], own_chain: None) -> None:
    rng = random.Random(3)
    async with cosmos_harness(nodes) as harness:
        compared, height = 0, 0
        for number in range(READS):
            if number % 100 == 0:
                height = await nodes[0].height()
            at = str(rng.randint(1, height - 2))
            method = rng.choice(["block", "header", "block_results", "commit", "validators", "consensus_params"])
            params: Any = rng.choice([{"height": at}, [at], {"height": str(height + 500)}])
            expected, refusal = await nodes[0].raw(method, params)
            result, error = await ask(harness, method, params)
            assert bool(error) == bool(refusal), (method, params, error, refusal)
            assert error or result == expected, (method, params)
            compared += not error
        assert compared > READS // 2
        assert harness.states == ["up", "up"]


@on_uvloop
async def test_transaction_is_sent_once_and_a_repeat_is_a_success(nodes: list[CosmosNode], own_chain: None) -> None:
    async with cosmos_harness(nodes) as harness:
        raw = b"name=penstock"
        params = {"tx": base64.b64encode(raw).decode()}
        name = hashlib.sha256(raw).hexdigest().upper()
        for _ in range(3):
            result, error = await ask(harness, "broadcast_tx_sync", params)
            assert error is None
            assert orjson.loads(result)["hash"] == name

        async def is_found() -> bool:
            query = {"path": "/store", "data": b"name".hex(), "height": "0", "prove": False}
            result, error = await ask(harness, "abci_query", query)
            value = None if error else orjson.loads(result)["response"].get("value")
            return value == base64.b64encode(b"penstock").decode()

        await until(is_found)


@on_uvloop
async def test_dangerous_methods_are_refused(nodes: list[CosmosNode], own_chain: None) -> None:
    async with cosmos_harness(nodes, 2) as harness:
        for method in ("unsafe_flush_mempool", "dial_seeds", "net_info", "subscribe", "broadcast_tx_commit"):
            _, error = await ask(harness, method, {})
            assert error["code"] == -32601
            assert "not available" in error["message"]
