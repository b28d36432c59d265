"""`doctor` measures an upstream with limits, and the development chain, with a bounded number of calls."""

from __future__ import annotations

import asyncio
import subprocess
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import WSMsgType, web
from aiohttp.test_utils import TestServer

from proxy.commands.doctor import MOST_CALLS
from tests.fault_stubs import BeaconNodeStub, BitcoinStub, CometStub, LcdStub
from tests.node_stubs import NodeStub, StarknetStub, running_stub
from tests.service import Service, command_here

KEY = "Top5ecretKey_9f"
HEAD = 50_000
METHOD_MISSING = {"code": -32601, "message": "the method does not exist"}


class LimitedNode:
    """A node of chain 1284 with batches of 20, ranges of 1,000 blocks, state of 1,000 blocks, and no traces."""

    def __init__(self) -> None:
        self.calls = 0
        self.paths: set[str] = set()
        self.socket = True
        self.status = 200

    async def serve(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Upgrade") == "websocket":
            return await self._socket(request)
        self.paths.add(request.path)
        body = orjson.loads(await request.read())
        headers = {"X-RateLimit-Limit": "25"}
        if self.status == 307:
            raise web.HTTPTemporaryRedirect("/elsewhere")
        if self.status != 200:
            return web.json_response({"message": "no"}, status=self.status)
        if isinstance(body, list):
            self.calls += len(body)
            if len(body) > 20:
                return web.json_response({"error": {"code": -32005, "message": "batch too large"}}, status=400)
            return web.json_response([self._reply(call) for call in body], headers=headers)
        self.calls += 1
        return web.json_response(self._reply(body), headers=headers)

    async def _socket(self, request: web.Request) -> web.StreamResponse:
        if not self.socket:
            raise web.HTTPNotFound
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            if message.type == WSMsgType.TEXT:
                await socket.send_json({"jsonrpc": "2.0", "id": orjson.loads(message.data)["id"], "result": "0x1"})
        return socket

    def _reply(self, call: dict[str, Any]) -> dict[str, Any]:
        found = self._result(call["method"], call["params"])
        return {"jsonrpc": "2.0", "id": call["id"], **found}

    def _result(self, method: str, params: list[Any]) -> dict[str, Any]:
        match method:
            case "eth_chainId":
                return {"result": hex(1284)}
            case "eth_blockNumber":
                return {"result": hex(HEAD)}
            case "eth_getBlockByNumber":
                return {"result": {"number": hex(HEAD), "timestamp": hex(1_700_000_000)}}
            case "eth_getLogs":
                blocks = int(params[0]["toBlock"], 16) - int(params[0]["fromBlock"], 16) + 1
                return {"result": []} if blocks <= 1000 else {"error": {"code": -32614, "message": "range too wide"}}
            case "eth_getBalance":
                is_kept = HEAD - int(params[1], 16) <= 1000
                return {"result": "0x0"} if is_kept else {"error": {"code": -32000, "message": "missing trie node"}}
            case _ if method.startswith(("trace_", "debug_")):
                return {"error": METHOD_MISSING}
            case _:
                return {"result": "0x1"}


@pytest.fixture
async def node() -> AsyncIterator[tuple[LimitedNode, str]]:
    node, app = LimitedNode(), web.Application()
    app.router.add_route("*", "/{path:.*}", node.serve)
    async with TestServer(app, host="127.0.0.1") as server:
        yield node, str(server.make_url(f"/v2/{KEY}"))


async def doctor(*words: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(command_here, "doctor", *words)


async def test_limits_of_an_upstream_become_its_settings(tmp_path: Path, node: tuple[LimitedNode, str]) -> None:
    stub, url = node
    file = tmp_path / "penstock.toml"
    done = await doctor(url, "--write", str(file), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert KEY not in done.stdout
    checks = {each["check"]: each for each in orjson.loads(done.stdout)["checks"]}
    assert (checks["chain"]["result"], checks["chain"]["note"]) == ("1284", "moonbeam/mainnet")
    assert checks["log range"]["result"] == "1000 blocks"
    assert "range too wide" in checks["log range"]["note"]
    assert (checks["archive"]["result"], checks["archive"]["note"]) == ("no", "state of the newest 1001 blocks")
    assert checks["batch"]["result"] == "20 calls"
    assert checks["rate limit"]["result"] == "25 per second"
    missing = ["debug_traceTransaction", "debug_traceCall", "trace_block", "trace_transaction"]
    assert tomllib.loads(file.read_text())["upstreams"] == [
        {
            "network": "moonbeam/mainnet",
            "url": url,
            "deny": missing,
            "bounds": {"state": -1001},
            "batch": 20,
            "requests_per_second": 25.0,
        },
        {"network": "moonbeam/mainnet", "url": url.replace("http", "ws", 1)},
    ]
    assert stub.calls <= checks["calls"]["result"] <= MOST_CALLS


async def test_block_is_added_to_a_file_that_check_accepts(tmp_path: Path, node: tuple[LimitedNode, str]) -> None:
    stub, url = node
    stub.socket = False
    file = tmp_path / "penstock.toml"
    assert command_here("init", str(file)).returncode == 0
    done = await doctor(url, "--write", str(file), "--key", KEY, "--header", "X-Team=one")
    assert (done.returncode, done.stderr) == (0, "")
    assert KEY not in done.stdout
    assert "WebSocket   no" in done.stdout
    (block,) = tomllib.loads(file.read_text())["upstreams"]
    assert (block["bearer"], block["headers"]) == (KEY, {"X-Team": "one"})
    checked = await asyncio.to_thread(command_here, "check", "--offline", "--config", str(file))
    assert (checked.returncode, checked.stderr, KEY in checked.stdout) == (0, "", False)


async def test_wrong_network_url_and_status_are_errors_without_the_key(node: tuple[LimitedNode, str]) -> None:
    stub, url = node
    wrong = await doctor(url, "--network", "base/mainnet")
    assert (wrong.returncode, wrong.stderr) == (1, "penstock: the upstream serves moonbeam/mainnet, not base/mainnet\n")
    stub.status = 403
    refused = await doctor(url)
    assert refused.returncode == 1
    assert "HTTP status 403: check the URL and the key" in refused.stderr
    assert KEY not in refused.stdout + refused.stderr
    stub.status = 307
    elsewhere = await doctor(url, "--header", f"X-Key={KEY}")
    assert (elsewhere.returncode, "a redirect: name the URL" in elsewhere.stderr) == (1, True), elsewhere.stderr
    assert "/elsewhere" not in stub.paths
    for words, fault in (
        (("ftp://x",), "--network NAME is required with a provider"),
        (("x",), "URL: must be an http or https URL"),
        ((f"alchemi://{KEY}", "--network", "base/mainnet"), "URL: there is no provider alchemi"),
        ((url, "--network", "basse/mainnet"), "did you mean base/mainnet?"),
        ((url, "--header", "x"), "--header: write NAME=VALUE"),
    ):
        done = await doctor(*words)
        assert (done.returncode, fault in done.stderr, KEY in done.stderr) == (2, True, False)
    silent = await doctor("http://127.0.0.1:1/")
    assert (silent.returncode, "does not reply" in silent.stderr) == (1, True)


@pytest.mark.parametrize(
    ("stub", "checks"),
    [
        (BitcoinStub(), {"head": 500, "syncing": "no", "batch": "100 calls"}),
        (CometStub(), {"head": 500, "syncing": "no", "lowest block": "1", "batch": "100 calls"}),
        (LcdStub(), {"head": 500, "syncing": "no"}),
        (BeaconNodeStub(), {"head": 500, "syncing": "no"}),
        (StarknetStub(), {"head": 500, "batch": "100 calls"}),
    ],
    ids=lambda each: each.network if isinstance(each, NodeStub) else "",
)
async def test_upstream_of_any_family_is_measured_as_its_file_says(stub: NodeStub, checks: dict[str, Any]) -> None:
    async with running_stub(stub):
        done = await doctor(stub.url, "--network", stub.network, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        found = orjson.loads(done.stdout)
        results = {each["check"]: each["result"] for each in found["checks"]}
        assert results.pop("calls") <= MOST_CALLS
        chain = (results.pop("chain"), results.pop("rate limit"))
        assert chain == (stub.chain, "not stated")
        assert results.pop("latency").endswith(" ms")
        assert results == checks
        assert (found["settings"][0]["network"], stub.writes) == (stub.network, [])
        stub.chain = "another"
        wrong = await doctor(stub.url, "--network", stub.network)
        assert (wrong.returncode, f"serves another chain, not {stub.network}" in wrong.stderr) == (1, True), wrong
        unnamed = await doctor(stub.url)
        assert (unnamed.returncode, "--network" in unnamed.stderr) == (1, True)


async def test_development_chain_is_measured(service: Service) -> None:
    done = await doctor(service.ready["upstream_url"], "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = orjson.loads(done.stdout)
    checks = {each["check"]: each["result"] for each in found["checks"]}
    assert checks["chain"] == "31337"
    assert checks["archive"] == "yes"
    assert checks["WebSocket"] == "yes"
    assert checks["calls"] <= MOST_CALLS
    assert found["settings"][0]["network"] == "dev/mainnet"
