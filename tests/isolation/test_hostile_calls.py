"""Random malformed, extreme and hostile calls of one key fail no call of another: 10,000 good calls over all cases here."""

from __future__ import annotations

import itertools
import os
import random
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.dev.funded_accounts import FUNDED
from proxy.services.rpc.tracker import Tracker
from tests.bundler_harness import ENTRY_POINTS, ENTRY_POINTS_METHOD, ScriptedBundler
from tests.flows.test_feed_devchain import DEV, dev_chain
from tests.http_client import request, rpc
from tests.isolation.attack import GoodCall, beside, good_traffic
from tests.isolation.upstreams import KINDS, HostileAwareUpstream, StrictUpstream
from tests.rpc_harness import rpc_harness
from tests.rpc_upstreams import Chain, scripted
from tests.sockets import bare
from tests.web.worker import LIVE, on_uvloop, running_worker

# Good calls in each of the 26 cases: together 10,400, or more with PENSTOCK_HOSTILE_CALLS.
CALLS = int(os.environ.get("PENSTOCK_HOSTILE_CALLS", "400"))
HOSTILE_METHODS = (
    "eth_chainId", "eth_call", "eth_getBalance", "eth_getLogs", "eth_getBlockByNumber", "eth_blockNumber", "eth_gasPrice",
    "eth_sendRawTransaction", "eth_newFilter", "eth_getFilterChanges", "debug_traceTransaction", "net_version",
)  # fmt: skip
HOSTILE_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1e300, 2**63, "", "0x", "latest", "0x" + "f" * 400, "rate limit", "unauthorized", "internal error",
    "\ud7ff", [], {}, {"to": 1}, {"fromBlock": "0x0", "toBlock": "0x" + "f" * 15}, [[[[[[]]]]]], "api key", "too many requests",
)  # fmt: skip


def hostile_call(rng: random.Random, *, well_formed: bool = False) -> bytes:
    """Never an `eth_call` that the upstreams would take for a good one."""
    params: Any = [rng.choice(HOSTILE_VALUES) for _ in range(rng.randrange(1, 4))]
    if not well_formed and rng.random() < 0.4:
        params = rng.choice(({}, {"a": 1}, 1, "text", True))
    body: dict[str, Any] = {"jsonrpc": "2.0", "method": rng.choice(HOSTILE_METHODS), "params": params}
    if rng.random() < 0.9:
        body["id"] = rng.choice((1, 2**62, "x" * 60, -5))
    return orjson.dumps(body)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@on_uvloop
async def test_hostile_calls_of_one_key_fail_no_call_of_another(kind: type[HostileAwareUpstream], count: int) -> None:
    rng = random.Random(f"{kind.__name__} {count}")
    async with rpc_harness(count, kind=kind) as harness:
        harness.worker.add_key("attacker")

        async def attack() -> None:
            async with await harness.worker.connect() as client:
                for _ in range(20):
                    await client.send(harness.worker.post(hostile_call(rng), key="attacker"))

        async with beside(attack, at_once=2):
            await good_traffic(harness.worker, CALLS)
        if count == 1:
            assert (
                harness.route.upstreams[0].health.allows_fallback(0.0) or not harness.route.upstreams[0].health.pause_s
            )


@pytest.mark.parametrize("kind", KINDS)
@on_uvloop
async def test_hostile_batches_of_one_key_fail_no_call_of_another(kind: type[HostileAwareUpstream]) -> None:
    rng = random.Random(kind.__name__)
    async with rpc_harness(2, kind=kind, options=[{"batch": 20}] * 2) as harness:
        harness.worker.add_key("attacker")

        async def attack() -> None:
            async with await harness.worker.connect() as client:
                for _ in range(5):
                    items = b",".join(hostile_call(rng) for _ in range(20))
                    await client.send(harness.worker.post(b"[" + items + b"]", key="attacker"))

        async with beside(attack, at_once=2):
            await good_traffic(harness.worker, CALLS)


@pytest.mark.parametrize("kind", KINDS)
@on_uvloop
async def test_hostile_calls_on_a_socket_fail_no_call_of_another(kind: type[HostileAwareUpstream]) -> None:
    rng = random.Random(kind.__name__)
    async with rpc_harness(1, kind=kind) as harness:
        harness.worker.add_key("attacker")

        async def attack() -> None:
            async with bare(harness.worker, key="attacker") as socket:
                for _ in range(20):
                    call = orjson.loads(hostile_call(rng))
                    socket.write(orjson.dumps({**call, "id": 1}))
                    await socket.json()

        async with beside(attack, at_once=2):
            await good_traffic(harness.worker, CALLS)


class StrictBundler(StrictUpstream, ScriptedBundler):
    pass


@on_uvloop
async def test_hostile_calls_to_a_bundler_fail_no_call_of_another() -> None:
    rng = random.Random(16)
    async with AsyncExitStack() as stack:
        (chain,) = await stack.enter_async_context(scripted(1, Chain()))
        (bundler,) = await stack.enter_async_context(scripted(1, Chain(), StrictBundler))
        bundlers = [{"network": LIVE, "url": bundler.url}]
        running = await stack.enter_async_context(running_worker({LIVE: [chain.url]}, bundlers=bundlers))
        running.add_key("attacker")
        methods = (ENTRY_POINTS_METHOD, "eth_getUserOperationReceipt", "eth_estimateUserOperationGas")

        def post(body: bytes, key: str) -> bytes:
            return request("POST", f"/v1/bundler/{LIVE}", body, key=running.keys[key])

        async def attack() -> None:
            async with await running.connect() as client:
                for _ in range(20):
                    call = {**orjson.loads(hostile_call(rng)), "method": rng.choice(methods)}
                    await client.send(post(orjson.dumps(call), "attacker"))

        def entry_points() -> GoodCall:
            return {"method": ENTRY_POINTS_METHOD, "params": []}, list(ENTRY_POINTS.values())

        async with beside(attack, at_once=2):
            await good_traffic(running, CALLS, make=entry_points, path=f"/v1/bundler/{LIVE}")


@on_uvloop
async def test_hostile_calls_to_a_real_node_fail_no_call_of_another(tmp_path: Path) -> None:
    rng = random.Random(17)
    async with dev_chain(tmp_path) as chain, running_worker({DEV: [chain.url]}) as running:
        running.add_key("attacker")
        await chain.send(to=FUNDED.address)
        await Tracker(running.app.networks.routes[DEV].state).look()
        numbers = itertools.count(1 << 100)

        def balance() -> GoodCall:
            return {"method": "eth_getBalance", "params": [f"0x{next(numbers):040x}", "latest"]}, "0x0"

        async def attack() -> None:
            async with await running.connect() as client:
                for _ in range(20):
                    await client.send(running.post(hostile_call(rng), key="attacker", network=DEV))
                items = b",".join(hostile_call(rng) for _ in range(20))
                await client.send(running.post(b"[" + items + b"]", key="attacker", network=DEV))

        async with beside(attack, at_once=2):
            await good_traffic(running, CALLS, make=balance, path=f"/v1/rpc/{DEV}")


@pytest.mark.parametrize("params", ["{}", '{"a":1}', "1", '"x"', "true"])
@on_uvloop
async def test_params_that_are_no_array_are_refused_before_anything_is_sent(params: str) -> None:
    call = f'{{"jsonrpc":"2.0","id":7,"method":"eth_chainId","params":{params}}}'.encode()
    async with rpc_harness(1) as harness:
        asked = harness.asked
        single = await harness.worker.send(call)
        assert single.fault(400)["details"] == {"rpc_code": -32600}
        (item,) = (await harness.worker.send(b"[" + call + b"]")).json
        assert (item["id"], item["error"]["code"]) == (7, -32600)
        async with bare(harness.worker) as socket:
            socket.write(call)
            reply = await socket.json()
            assert (reply["id"], reply["error"]["code"]) == (7, -32600)
        assert harness.asked == asked


REPEATED = (
    '{"jsonrpc":"2.0","id":6,"id":7,"method":"eth_chainId","params":[]}',
    '{"jsonrpc": "2.0", "id": 6, "method": "eth_chainId", "method": "eth_call", "params": []}',
    '{"jsonrpc":"2.0","id":6,"method":"eth_chainId","params":[],"\\u0070arams":[1]}',
)


@pytest.mark.parametrize("text", REPEATED)
@on_uvloop
async def test_repeated_members_are_refused_before_anything_is_sent(text: str) -> None:
    call = text.encode()
    large = call.replace(b"[]", b'["%b"]' % (b"ab" * 20_000))
    async with rpc_harness(1) as harness:
        asked = harness.asked
        for body in (call, large):
            assert (await harness.worker.send(body)).fault(400)["details"] == {"rpc_code": -32600}
            (item,) = (await harness.worker.send(b"[" + body + b"]")).json
            assert (item["id"], item["error"]["code"]) == (None, -32600)
            async with bare(harness.worker) as socket:
                socket.write(body)
                assert (await socket.json())["error"]["code"] == -32600
        assert harness.asked == asked


@on_uvloop
async def test_null_params_are_sent_as_an_empty_array() -> None:
    async with rpc_harness(1) as harness:
        reply = await harness.worker.send(b'{"jsonrpc":"2.0","id":7,"method":"net_version","params":null}')
        assert reply.status == 200
        assert [call.params for call in harness.upstreams[0].calls if call.method == "net_version"][-1] == []


@on_uvloop
async def test_error_without_an_id_reaches_the_caller_under_the_callers_id() -> None:
    async with rpc_harness(1, kind=StrictUpstream) as harness:
        reply = await harness.worker.send(rpc("eth_getBalance", [1]))
        assert reply.json["error"] == {"code": -32600, "message": "the upstream rejected the call as invalid"}
        assert reply.json["id"] == 1
        assert not harness.route.upstreams[0].health.bad
