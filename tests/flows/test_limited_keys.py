"""Keys limited by network, method and contract, on every way into the service: calls, batches, sockets, filters, bundlers, the
paymaster and REST."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson

from proxy.chains.evm import abi
from proxy.core.access import AllowedUses
from tests.bundler_harness import EP07, ESTIMATE, OPERATION, RECEIPT, SEND, bundler_harness
from tests.chains.test_paymaster import execute
from tests.flows.test_upstream_writes import DYNAMIC, LEGACY
from tests.http_client import rpc
from tests.rpc_harness import rpc_harness
from tests.web.worker import LIVE, on_uvloop

TO = "0x" + "33" * 20  # the recipient of DYNAMIC
OTHER = "0x" + "22" * 20  # that of LEGACY
TOKEN = AllowedUses(contracts=frozenset({TO}))
ALLOWED: list[tuple[str, list[Any]]] = [
    ("eth_call", [{"to": TO.upper().replace("X", "x")}, "latest"]),
    ("eth_estimateGas", [{"to": TO}]),
    ("eth_getLogs", [{"address": [TO]}]),
    ("eth_getCode", [TO, "latest"]),
    ("eth_sendRawTransaction", [DYNAMIC[0]]),
    ("eth_blockNumber", []),
    ("eth_getTransactionCount", [OTHER, "latest"]),
]
REFUSED: list[tuple[str, list[Any]]] = [
    ("eth_call", [{"to": OTHER}, "latest"]),
    ("eth_call", [{"data": "0x60"}, "latest"]),
    ("eth_estimateGas", [{"to": OTHER}]),
    ("eth_getLogs", [{"address": [TO, OTHER]}]),
    ("eth_getLogs", [{}]),
    ("eth_newFilter", [{"topics": []}]),
    ("eth_getCode", [OTHER, "latest"]),
    ("eth_sendRawTransaction", [LEGACY[0]]),
    ("eth_simulateV1", [{"blockStateCalls": [{"calls": [{"to": TO}]}]}, "latest"]),
    ("debug_traceCall", [{"to": TO}, "latest"]),
    ("trace_call", [{"to": TO}, ["trace"], "latest"]),
    ("eth_getBlockReceipts", ["latest"]),
]


@on_uvloop
async def test_key_limited_to_a_contract_reaches_no_other() -> None:
    async with rpc_harness(1) as harness:
        harness.worker.add_key("token", uses=TOKEN)
        for method, params in ALLOWED:
            reply = await harness.call(method, params, key="token")
            assert (reply.status, "result" in reply.json) == (200, True), (method, reply)
        before = harness.asked
        for method, params in REFUSED:
            reply = await harness.call(method, params, key="token")
            assert (reply.status, reply.json["error"]["reason"]) == (403, "contract"), (method, reply)
        assert harness.asked == before
        assert (await harness.call(*REFUSED[0])).status == 200  # another key


@on_uvloop
async def test_each_item_of_a_batch_is_limited() -> None:
    async with rpc_harness(1) as harness:
        harness.worker.add_key("token", uses=TOKEN)
        replies = (await harness.batch(*ALLOWED[:2], *REFUSED[:2], key="token")).json
        assert ["error" in each for each in replies] == [False, False, True, True]
        assert "contract" in replies[2]["error"]["message"]
        # Plain reads of one upstream are sent in one request.
        reads = [("eth_call", [{"to": to}, "latest"]) for to in (TO, TO, OTHER)]
        replies = (await harness.batch(*reads, key="token")).json
        assert ["error" in each for each in replies] == [False, False, True]


@on_uvloop
async def test_limits_hold_for_messages_and_subscriptions_on_a_socket() -> None:
    async with rpc_harness(1) as harness, aiohttp.ClientSession() as session:
        harness.worker.add_key("token", uses=TOKEN)
        harness.worker.add_key("heads", uses=AllowedUses(methods=frozenset({"eth_subscribe"})))
        for key, method, params, is_refused in (
            ("token", "eth_call", [{"to": TO}, "latest"], False),
            ("token", "eth_call", [{"to": OTHER}, "latest"], True),
            ("token", "eth_subscribe", ["logs", {"address": OTHER}], True),
            ("token", "eth_subscribe", ["logs", {}], True),
            ("heads", "eth_call", [{"to": TO}, "latest"], True),
        ):
            url = f"ws://127.0.0.1:{harness.worker.port}/v1/ws/{LIVE}?apiKey={harness.worker.keys[key]}"
            async with session.ws_connect(url) as socket:
                for message in (rpc(method, params), b"[%b]" % rpc(method, params)):
                    await socket.send_str(message.decode())
                    reply = orjson.loads((await socket.receive(timeout=30)).data)
                    found = reply[0] if isinstance(reply, list) else reply
                    assert ("this API key" in str(found.get("error"))) is is_refused, (method, params, found)


@on_uvloop
async def test_filter_of_another_contract_cannot_be_polled_after_the_key_was_limited() -> None:
    async with rpc_harness(1) as harness:
        harness.upstreams[0].answers["eth_newFilter"] = lambda _: "0x1"
        harness.upstreams[0].answers["eth_getFilterChanges"] = lambda _: []
        key = harness.worker.add_key("free")
        made = await harness.result("eth_newFilter", [{"address": OTHER}], key="free")
        assert await harness.result("eth_getFilterChanges", [made], key="free") == []
        limited = harness.worker.add_key("limited", uses=TOKEN)
        limited.lineage = key.lineage  # the same key, changed
        poll = (await harness.call("eth_getFilterChanges", [made], key="limited")).json
        assert poll["error"]["message"] == "filter not found"
        own = await harness.result("eth_newFilter", [{"address": TO}], key="limited")
        assert await harness.result("eth_getFilterChanges", [own], key="limited") == []


@on_uvloop
async def test_operation_of_a_limited_key_calls_only_allowed_contracts(database: str) -> None:
    to, other = bytes.fromhex(TO[2:]), bytes.fromhex(OTHER[2:])
    async with bundler_harness(database) as harness:
        harness.worker.add_key("token", uses=TOKEN)
        harness.worker.add_key("reader", uses=AllowedUses(methods=frozenset({RECEIPT})))
        good = {**OPERATION, "callData": "0x" + execute(to, 0, b"").hex()}
        for name in ("factory", "factoryData"):
            good.pop(name, None)
        bad = {**good, "callData": "0x" + execute(other, 0, b"").hex()}
        opaque = {**good, "callData": "0x" + abi.selector("run()").hex()}
        made = {**good, "factory": OTHER, "factoryData": "0x"}
        estimate = await harness.call(ESTIMATE, good, EP07, key="token")
        assert "result" in estimate.json, estimate
        for method in (SEND, ESTIMATE):
            for operation in (bad, opaque, made):
                reply = await harness.call(method, operation, EP07, key="token")
                assert (reply.status, reply.json["error"]["reason"]) == (403, "contract"), reply
            assert (await harness.call(method, good, EP07, key="reader")).status == 403
        overridden = await harness.call(ESTIMATE, good, EP07, {TO: {"code": "0x60"}}, key="token")
        assert overridden.status == 403
        assert harness.sends() == 0
