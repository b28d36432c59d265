"""Upstreams that do not have a method: they are passed over for it, and only for it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from aiohttp import web

from tests.feed_upstreams import feed_harness
from tests.http_client import Reply, rpc
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import Refused
from tests.svm_upstreams import SvmChain, SvmFeedUpstream, signed_transfer
from tests.web.worker import on_uvloop

SOLANA = "solana/mainnet"
ADDRESS = "0x" + "ab" * 20
PROOF = "eth_getProof"


class PubSub(SvmFeedUpstream):
    """Like a validator: calls on its WebSocket port get an error, quickly."""

    async def _answer_on(self, socket: web.WebSocketResponse, call: dict[str, Any]) -> None:
        if not call["method"].endswith("ubscribe"):
            error = {"code": -32601, "message": "Method not found"}
            await socket.send_json({"jsonrpc": "2.0", "id": call["id"], "error": error})
            return
        await super()._answer_on(socket, call)


def refused(code: int, message: str) -> Any:
    def refuse(_: list[Any]) -> Any:
        raise Refused(code, message)

    return refuse


def lacking(*_: Any) -> Any:
    raise Refused(-32601, "the method does not exist/is not available")


async def proof(harness: RpcHarness, number: int) -> Reply:
    return await harness.call(PROOF, [ADDRESS, [], hex(number)])


@on_uvloop
async def test_calls_and_sends_never_go_to_a_websocket_upstream_of_solana() -> None:
    chain = SvmChain()
    async with feed_harness(["ws", "http"], kind=PubSub, chain=chain, network=SOLANA) as harness:
        for n in range(30):
            raw = signed_transfer(str(chain.machine.latest_blockhash()), 1_000_000 + n)
            reply = await harness.worker.send(rpc("sendTransaction", [raw, {"encoding": "base64"}]), network=SOLANA)
            assert "result" in reply.json, reply.json
            assert (await harness.worker.send(rpc("getSlot", []), network=SOLANA)).json["result"] == chain.head
        assert [each.count("sendTransaction") for each in harness.upstreams] == [0, 30]
        route = harness.worker.app.networks.routes[SOLANA]
        assert [each.label for each in route.streams] == [f"{SOLANA}#1"]
        assert [each.label for each in route.upstreams] == [f"{SOLANA}#2"]


@on_uvloop
async def test_upstream_without_a_method_is_asked_once_and_not_favoured() -> None:
    async with rpc_harness(2) as harness:
        harness.upstreams[0].answers[PROOF] = lacking
        health = harness.route.upstreams[0].health
        before = health.latency_s, health.good
        for n in range(40):
            assert "result" in (await proof(harness, n)).json
        assert harness.upstreams[0].count(PROOF) == 1
        assert (health.latency_s, health.good, health.bad) == (*before, 0)
        for n in range(40):
            await harness.look()  # Otherwise its latency stays as it was at the start, above that of the other.
            await harness.result("eth_getBalance", [ADDRESS, hex(n)])
        assert harness.upstreams[0].count("eth_getBalance") > 0


@on_uvloop
async def test_method_that_every_upstream_lacks_is_an_error_each_time() -> None:
    async with rpc_harness(2) as harness:
        for each in harness.upstreams:
            each.answers[PROOF] = lacking
        for n in range(4):
            assert (await proof(harness, n)).json["error"]["code"] == -32601
        harness.upstreams[1].answers.clear()
        assert "result" in (await proof(harness, 5)).json


@pytest.mark.parametrize("count", [1, 2])
@on_uvloop
async def test_error_that_may_be_about_the_params_is_passed_on_each_time(count: int) -> None:
    async with rpc_harness(count) as harness:
        for each in harness.upstreams:
            each.answers[PROOF] = refused(-32004, f"Method {PROOF} is not supported")
        for n in range(3):
            assert (await proof(harness, n)).json["error"]["code"] == -32601


@pytest.mark.parametrize("is_known", [True, False])
@on_uvloop
async def test_method_that_no_upstream_in_use_has_does_not_exist(is_known: bool) -> None:
    async with rpc_harness(2) as harness:
        harness.upstreams[0].answers[PROOF] = lacking
        has_it = harness.route.upstreams[1].health
        while is_known and not harness.upstreams[0].count(PROOF):
            assert "result" in (await proof(harness, harness.count(PROOF))).json
        has_it.open(time.monotonic() + 60.0)
        assert (await proof(harness, 1000)).json["error"]["code"] == -32601
        has_it.cordon(cordoned=True, now=time.monotonic())
        assert (await proof(harness, 1001)).json["error"]["code"] == -32601


@pytest.mark.parametrize(
    ("method", "params"),
    [("eth_sendRawTransaction", ["0x01"]), ("eth_sendPrivateTransaction", [{"tx": "0x01"}]), ("eth_newFilter", [{}])],
)
@on_uvloop
async def test_write_that_an_upstream_does_not_know_goes_to_another(method: str, params: list[Any]) -> None:
    async with rpc_harness(3) as harness:
        for each in harness.upstreams[:2]:
            each.answers[method] = lacking
        assert "result" in (await harness.call(method, params)).json
        assert harness.upstreams[2].count(method) == 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize(
    ("useful", "other"),
    [
        ((-32004, "Block not available for slot 5"), (-32601, "Method not found")),
        ((-32004, "Block not available for slot 5"), (-32603, "Internal error")),
        ((-32603, "Internal error"), (-32601, "Method not found")),
    ],
)
@on_uvloop
async def test_most_useful_error_is_passed_on(
    useful: tuple[int, str], other: tuple[int, str], order: tuple[int, int]
) -> None:
    options = [{"tier": tier} for tier in order]
    async with rpc_harness(2, network=SOLANA, chain=SvmChain(), kind=SvmFeedUpstream, options=options) as harness:
        harness.upstreams[0].answers["getBlock"] = refused(*useful)
        harness.upstreams[1].answers["getBlock"] = refused(*other)
        reply = await harness.call("getBlock", [5])
        assert (reply.json["error"]["code"], reply.json["error"]["message"]) == useful
        assert [each.count("getBlock") for each in harness.upstreams] == [1, 1]
