"""Cosmos chains on real nodes: a validator and a full node of CometBFT with its key-value application.

Every result below the head is compared with that of the node itself, byte for byte.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
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
from yarl import URL

from proxy.dev.chain import free_port
from proxy.dev.child import die_with_parent
from proxy.settings import load_tables
from tests import node_programs
from tests.client_scripts import run_script
from tests.http_client import RawReply, Reply
from tests.new_network import new_network
from tests.random_reads import reads_or
from tests.rpc_harness import NetworkHarness
from tests.service import until
from tests.web import worker as worker_module
from tests.web.worker import on_uvloop, running_worker

READS = reads_or(1500)
CHAIN = """name = "kv"
family = "cosmos"
native = { symbol = "KV", decimals = 6 }

[networks.mainnet]
genesis = "kv-1"
block_time_s = 1.0
"""


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

    @property
    def socket_url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/websocket"

    async def raw(self, method: str, params: Any = None) -> tuple[bytes, Any]:
        assert self.session is not None
        call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params or {}}
        async with self.session.post(self.url, json=call) as response:
            reply = msgspec.json.decode(await response.read(), type=RawReply)
        return bytes(reply.result), reply.error

    async def height(self) -> int:
        with suppress(aiohttp.ClientError, OSError):
            result, error = await self.raw("status")
            return 0 if error else int(orjson.loads(result)["sync_info"]["latest_block_height"])
        return 0


def cometbft() -> Path:
    return node_programs.require("cometbft")


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
        node_programs.end(node.process for node in found)


@pytest.fixture
def own_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain of the nodes, as `chains add --family cosmos` writes it."""
    (tmp_path / "own" / "chains").mkdir(parents=True)
    (tmp_path / "own" / "chains" / "kv.toml").write_text(CHAIN)
    monkeypatch.setattr(worker_module, "TABLES", load_tables(own=str(tmp_path / "own")))


@asynccontextmanager
async def cosmos_harness(
    nodes: list[CosmosNode], height: int = 6, *, streams: bool = False
) -> AsyncIterator[NetworkHarness]:
    """`streams`: with WebSockets of the nodes, for subscriptions."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        for node in nodes:
            node.session = session

            async def is_there(node: CosmosNode = node) -> bool:
                return await node.height() >= height

            await until(is_there, within_s=60)
        urls = [each.url for each in nodes] + [each.socket_url for each in nodes if streams]
        running = await stack.enter_async_context(running_worker({"kv/mainnet": urls}))
        harness = NetworkHarness(running, "kv/mainnet")
        harness.tracker.withhold()
        await harness.look()
        harness.watch()
        yield harness


async def ask(harness: NetworkHarness, method: str, params: Any) -> tuple[bytes, Any]:
    body = orjson.dumps({"jsonrpc": "2.0", "id": 7, "method": method, "params": params})
    reply = await harness.worker.send(body, network=harness.network)
    assert reply.status == 200, (method, params, reply)
    found = msgspec.json.decode(reply.body, type=RawReply)
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


async def by_url(harness: NetworkHarness, path: str) -> Reply:
    head = (
        f"GET /v1/rest/{harness.network}{path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {harness.worker.keys['main']}\r\n\r\n"
    )
    async with await harness.worker.connect() as client:
        return await client.send(head.encode())


@on_uvloop
async def test_calls_by_url_are_answered_as_by_the_node(nodes: list[CosmosNode], own_chain: None) -> None:
    rng = random.Random(4)
    async with cosmos_harness(nodes) as harness:
        height = await nodes[0].height()
        found, _ = await nodes[0].raw("block", {"height": "2"})
        name = orjson.loads(found)["block_id"]["hash"]
        fixed = [
            f"/block_by_hash?hash=0x{name}",
            f"/header_by_hash?hash=0x{name}",
            "/health",
            "/consensus_params?height=1",
        ]
        fixed += [
            "/abci_query?path=%22/store%22&data=0x6e616d65&height=2",
            "/abci_query?data=%22name%22&prove=false&height=2",
        ]
        fixed += ["/validators?height=%222%22&page=1&per_page=5", f"/block?height={height + 500}"]
        fixed += [f"/blockchain?minHeight=1&maxHeight={height - 2}", "/tx?hash=0x" + "ab" * 32]
        fixed += ["/tx_search?query=%22tx.height=1%22&page=1&order_by=%22asc%22", "/genesis"]
        heights = [rng.randint(1, height - 2) for _ in range(40)]
        for path in [*fixed, *(f"/{rng.choice(['block', 'commit', 'block_results'])}?height={at}" for at in heights)]:
            assert nodes[0].session is not None
            async with nodes[0].session.get(URL(nodes[0].url.rstrip("/") + path, encoded=True)) as response:
                expected = await response.read()
            reply = await by_url(harness, path)
            if response.status == 200:
                assert (reply.status, reply.body) == (200, expected), path
            else:
                assert (reply.status, reply.json["id"]) == (500, -1), path
                assert reply.json["error"]["code"] == orjson.loads(expected)["error"]["code"], path


@on_uvloop
async def test_calls_by_url_are_checked_and_charged(nodes: list[CosmosNode], own_chain: None) -> None:
    async with cosmos_harness(nodes, 2) as harness:
        raw = b"url=penstock"
        reply = await by_url(harness, f"/broadcast_tx_sync?tx=0x{raw.hex()}")
        assert reply.json["result"]["hash"] == hashlib.sha256(raw).hexdigest().upper()
        for path, status in (
            ("/block?height=x", 400),
            ("/block?depth=1", 400),
            ("/unsafe_flush_mempool", 404),
            ("/block/5", 404),
            ("/blok?height=1", 404),
            ("/%2e%2e/status", 400),
            ("/status/", 400),
        ):
            refused = await by_url(harness, path)
            assert (refused.status, refused.headers["x-compute-units"]) == (status, "1"), path
        assert "did you mean block?" in (await by_url(harness, "/blok")).json["error"]["message"]


# Subscriptions

NEW_BLOCK = "tm.event='NewBlock'"


@asynccontextmanager
async def opened(url: str, key: str = "") -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    headers = {"X-API-Key": key} if key else {}
    async with aiohttp.ClientSession() as session, session.ws_connect(url, headers=headers, max_msg_size=0) as socket:
        yield socket


async def asked(socket: aiohttp.ClientWebSocketResponse, id_: int, method: str, params: Any) -> dict[str, Any]:
    """The next message after this call."""
    await socket.send_json({"jsonrpc": "2.0", "id": id_, "method": method, "params": params})
    return orjson.loads((await socket.receive(15)).data)  # type: ignore[no-any-return]


def height_in(message: Any) -> int:
    return int(message["result"]["data"]["value"]["block"]["header"]["height"])


@on_uvloop
async def test_events_of_a_query_are_those_of_the_node(nodes: list[CosmosNode], own_chain: None) -> None:
    async with cosmos_harness(nodes, streams=True) as harness, AsyncExitStack() as stack:
        url = f"ws://127.0.0.1:{harness.worker.port}/v1/ws/kv/mainnet/websocket"
        node = await stack.enter_async_context(opened(nodes[0].socket_url))
        sockets = [await stack.enter_async_context(opened(url, harness.worker.keys["main"])) for _ in range(10)]
        assert (await asked(node, 7, "subscribe", {"query": NEW_BLOCK}))["result"] == {}
        for number, socket in enumerate(sockets):
            params = {"query": NEW_BLOCK} if number % 2 else [NEW_BLOCK]
            assert await asked(socket, number, "subscribe", params) == {"jsonrpc": "2.0", "id": number, "result": {}}
        # One upstream stream serves all of them: a node accepts few.
        assert "1 streams" in repr(harness.worker.app.feeds.find("kv/mainnet"))
        own = [orjson.loads((await node.receive(15)).data) for _ in range(6)]
        expected = {height_in(message): message["result"] for message in own}
        for number, socket in enumerate(sockets):
            heights = []
            for _ in range(3):
                message = orjson.loads((await socket.receive(15)).data)
                assert message["id"] == number
                heights.append(height_in(message))
                if heights[-1] in expected:
                    assert message["result"] == expected[heights[-1]]
            assert heights == [*range(heights[0], heights[0] + 3)]


@on_uvloop
async def test_query_ends_by_its_text_and_is_there_once(nodes: list[CosmosNode], own_chain: None) -> None:
    async with cosmos_harness(nodes, 2, streams=True) as harness:
        url = f"ws://127.0.0.1:{harness.worker.port}/v1/ws/kv/mainnet"
        async with opened(url, harness.worker.keys["main"]) as socket:
            query = {"query": "tm.event='Tx' AND app.key='none'"}
            assert (await asked(socket, 1, "subscribe", query))["result"] == {}
            assert (await asked(socket, 2, "subscribe", query))["error"]["data"] == "already subscribed"
            assert (await asked(socket, 3, "unsubscribe", query))["result"] == {}
            assert "error" in await asked(socket, 4, "unsubscribe", query)
            assert (await asked(socket, 5, "subscribe", query))["result"] == {}
            assert (await asked(socket, 6, "unsubscribe_all", {}))["result"] == {}
            assert (await asked(socket, 7, "subscribe", query))["result"] == {}
            for params in ({}, {"query": ""}, {"query": "x" * 600}, {"query": 5}, [1, 2], {"query": "a", "b": 1}):
                assert (await asked(socket, 8, "subscribe", params))["error"]["code"] == -32602, params
            assert "error" in await asked(socket, 9, "subscribe", {"query": "no query"})
            # Calls go on beside subscriptions.
            assert "result" in await asked(socket, 10, "status", {})


@on_uvloop
async def test_client_of_cosmjs_subscribes(nodes: list[CosmosNode], own_chain: None) -> None:
    async with cosmos_harness(nodes, streams=True) as harness:
        harness.worker.add_key("in url", allow_in_url=True)
        stem = f"127.0.0.1:{harness.worker.port}/v1"
        key = harness.worker.keys["in url"]
        task = {"url": f"http://{stem}/rpc/kv/mainnet/{key}", "socket": f"ws://{stem}/ws/kv/mainnet/{key}", "blocks": 3}
        seen = await asyncio.to_thread(run_script, "cosmjs.mjs", task, within_s=90)
        assert seen["chain"] == "kv-1"
        assert seen["heights"] == [*range(seen["heights"][0], seen["heights"][0] + 3)]
        assert (seen["height"], seen["found"], seen["absent"]) == (2, True, True)


@on_uvloop
async def test_new_network_works_within_a_minute(
    nodes: list[CosmosNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with aiohttp.ClientSession() as session:
        nodes[0].session = session
        await until(lambda: nodes[0].height(), within_s=60)
        async with new_network("cosmos", nodes[0].url, tmp_path, monkeypatch) as harness:
            result, error = await ask(harness, "block", {"height": "1"})
            assert (result, error) == await nodes[0].raw("block", {"height": "1"})


@on_uvloop
async def test_dangerous_methods_are_refused(nodes: list[CosmosNode], own_chain: None) -> None:
    async with cosmos_harness(nodes, 2) as harness:
        for method in ("unsafe_flush_mempool", "dial_seeds", "net_info", "broadcast_tx_commit"):
            _, error = await ask(harness, method, {})
            assert error["code"] == -32601
            assert "not available" in error["message"]
