"""Failing upstreams, through a fault-injecting proxy: reads go on with right results and few extra requests."""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate
from typing import Any

import pytest
from aiohttp import web

from proxy.core.access import Limits
from proxy.core.batch_sizes import SMALLER_S
from proxy.core.routing import HEDGE_CEILING_S
from proxy.core.upstream_health import FAILURES_IN_A_ROW
from proxy.errors import Unavailable
from proxy.services.feed.blocks import BlockSource
from proxy.services.rpc.probe import Probe
from proxy.services.rpc.probing import result_of
from proxy.wire.upstream import MAX_REPLY_BYTES
from tests.faults import Mode
from tests.http_client import Reply
from tests.rpc_harness import Load, RpcHarness, rpc_harness
from tests.rpc_upstreams import Refused, ScriptedUpstream, value_of
from tests.service import until
from tests.web.worker import on_uvloop

HEALTHY, FAULTY = 1000, 2000
# Less than any timeout of a call or a connection, and enough for a busy machine.
AT_ONCE_S = 2.0
FAULTS: tuple[Mode, ...] = ("dead", "black_hole", "slow", "reset", "garbage", "half", "high_head", "low_head")
ADDRESS = "0x" + "ab" * 20


def requests(harness: RpcHarness) -> int:
    """Reads that were sent to upstreams, with those that never got through."""
    return sum(proxy.methods["eth_call"] for proxy in harness.proxies)


async def trouble(mode: Mode) -> tuple[Load, float, int]:
    """A load during which the first of three upstreams fails; the requests sent upstream per call of it; and the calls sent to
    the failing upstream from then on."""
    async with rpc_harness(3, faults=True) as harness:
        await harness.load(HEALTHY)
        before = requests(harness)
        async with asyncio.TaskGroup() as group:
            loading = group.create_task(harness.load(FAULTY))
            await until(lambda: requests(harness) - before > FAULTY // 20, every_s=0.001)
            await harness.proxies[0].switch(mode)
            since = harness.proxies[0].methods["eth_call"]
            await harness.look()
        load = loading.result()
        # A dead upstream refuses connections: calls to it never leave the worker and are not counted.
        return load, (requests(harness) - before) / FAULTY, harness.proxies[0].methods["eth_call"] - since


@pytest.mark.parametrize("mode", FAULTS)
@on_uvloop
async def test_reads_go_on_while_one_of_three_upstreams_fails(mode: Mode) -> None:
    load, offered, wasted = await trouble(mode)
    assert load.calls == FAULTY
    assert not load.failed
    assert not load.wrong
    assert offered <= 1.2
    # It gets what was on its way when it failed, what it takes to see that, and a few trials: under one in a hundred.
    if mode not in ("high_head", "low_head"):
        assert wasted < FAULTY / 100


@pytest.mark.parametrize("mode", ["dead", "black_hole", "reset", "garbage"])
@on_uvloop
async def test_upstream_that_is_well_again_is_used_again(mode: Mode) -> None:
    async with rpc_harness(3, faults=True) as harness:
        await harness.load(100)
        await harness.proxies[0].switch(mode)
        await harness.load(200)
        assert harness.route.upstreams[0].health.pause_s
        await harness.proxies[0].switch("pass")
        before = harness.upstreams[0].count("eth_call")

        async def is_back() -> bool:
            await harness.look()
            load = await harness.load(20, at_once=4)
            assert not load.failed
            return harness.upstreams[0].count("eth_call") > before + 20

        await until(is_back)


@on_uvloop
async def test_two_of_three_that_are_silent_are_passed_by_within_one_call() -> None:
    # In the order of their tiers, so that the two are asked before the third.
    async with rpc_harness(3, faults=True, options=[{"tier": tier} for tier in range(3)]) as harness:
        await harness.load(100)
        for proxy in harness.proxies[:2]:
            await proxy.switch("black_hole")
        load = await harness.load(40, at_once=1)
        assert not load.failed
        assert not load.wrong
        assert load.calls == 40
        assert all(proxy.methods["eth_call"] for proxy in harness.proxies)
        assert max(load.took_s) < 2 * HEDGE_CEILING_S


# All of them


def check_refusals(replies: list[Reply], took_s: list[float]) -> None:
    for reply in replies:
        error = reply.fault(reply.status)
        assert reply.status in (500, 503)
        assert "127.0.0.1" not in error["message"]
        assert "x-compute-units" not in reply.headers
    print(f"\nall dead: {len(replies)} refused, slowest {max(took_s) * 1000:.1f} ms")
    assert max(took_s) < AT_ONCE_S


@on_uvloop
async def test_all_dead_is_answered_at_once_costs_nothing_and_heals() -> None:
    async with rpc_harness(3, faults=True) as harness:
        # Fewer units and requests than what follows would cost, if it cost anything.
        harness.worker.add_key("small", limits=Limits(20, 200, 0))
        await harness.load(50)
        for proxy in harness.proxies:
            await proxy.switch("dead")
        await harness.load(3 * FAILURES_IN_A_ROW)
        replies, took_s = [], []
        for _ in range(200):
            began = time.monotonic()
            replies.append(await harness.call("eth_call", [{"to": ADDRESS}, "latest"], key="small"))
            took_s.append(time.monotonic() - began)
        check_refusals(replies, took_s)
        # Failed calls of free methods do not use up the request limit either.
        free = [await harness.call("eth_chainId", key="small") for _ in range(60)]
        assert {reply.status for reply in free} <= {500, 503}
        for proxy in harness.proxies:
            await proxy.switch("pass")

        async def is_well() -> bool:
            await harness.look()
            return (await harness.call("eth_call", [{"to": ADDRESS}, "latest"], key="small")).status == 200

        await until(is_well)


@on_uvloop
async def test_all_dead_inside_a_batch_is_an_error_for_each_item_and_costs_nothing() -> None:
    async with rpc_harness(2, faults=True) as harness:
        harness.worker.add_key("small", limits=Limits(1000, 200, 0))
        for proxy in harness.proxies:
            await proxy.switch("dead")
        for _ in range(20):
            reply = await harness.batch(*[("eth_getBalance", [ADDRESS, "latest"])] * 20, key="small")
            assert reply.status == 200
            assert [item["error"]["code"] for item in reply.json] == [-32603] * 20
            assert reply.headers["x-compute-units"] == "0"


@on_uvloop
async def test_silence_of_all_is_answered_when_the_time_is_up_and_then_at_once() -> None:
    async with rpc_harness(2, faults=True, rpc={"call_timeout_s": 0.3}) as harness:
        harness.worker.add_key("small", limits=Limits(1000, 200, 0))
        for proxy in harness.proxies:
            await proxy.switch("black_hole")
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(harness.call("eth_call", [{"data": hex(n)}, "latest"], key="small"))
                for n in range(20)
            ]
        assert {task.result().status for task in asked} == {504}
        # Calls of one client alone close no upstream to the others: that takes a probe that fails too.
        await harness.look()
        # A call that waits for an upstream gets a 504.
        reply = await harness.call("eth_call", [{}, "latest"], key="small")
        assert reply.status == 503
        assert reply.headers["retry-after"] == "1"


@on_uvloop
async def test_calls_that_time_out_on_every_upstream_open_no_circuit_breaker() -> None:
    async with rpc_harness(2, rpc={"call_timeout_s": 0.5}) as harness:
        for upstream in harness.upstreams:
            upstream.held = {"debug_traceTransaction"}
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(harness.call("debug_traceTransaction", [f"0x{n:064x}"])) for n in range(20)]
            await until(lambda: harness.count("debug_traceTransaction") >= 20)
            await harness.look()
        assert {task.result().status for task in asked} == {504}
        params = [{}, "latest"]
        assert await harness.result("eth_call", params) == value_of("eth_call", params)


# A single upstream


@pytest.mark.parametrize("mode", ["reset", "half", "garbage"])
@pytest.mark.parametrize("short", [False, True])
@on_uvloop
async def test_read_on_the_only_upstream_is_sent_again_when_its_connection_breaks(mode: Mode, short: bool) -> None:
    """An idle connection may be closed at the moment it is used, and there is no other upstream to fall back to."""

    cache = {"enabled": not short, "coalesce": not short}
    async with rpc_harness(1, faults=True, cache=cache) as harness:
        harness.proxies[0].reset_after = 0
        for n in range(10):
            params = [{"data": hex(n)}, "latest"]
            await harness.proxies[0].switch(mode, times=1)
            assert await harness.result("eth_call", params) == value_of("eth_call", params)
        assert requests(harness) == 20


@on_uvloop
async def test_retries_on_the_only_upstream_stay_within_the_budget() -> None:
    async with rpc_harness(1, faults=True) as harness:
        await harness.proxies[0].switch("reset")
        await harness.look()
        load = await harness.load(500)
        assert len(load.failed) == 500
        assert requests(harness) < 3 * FAILURES_IN_A_ROW + 16 * 3


# Limits and errors that upstreams report


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("together", [False, True])
@on_uvloop
async def test_upstream_gets_no_calls_until_its_retry_after_has_passed(together: bool, status: int) -> None:
    # In the order of their tiers, so that the limited one is asked first, however fast the other is.
    async with rpc_harness(2, options=[{"tier": tier} for tier in range(2)]) as harness:
        limited = harness.upstreams[0]
        limited.limited, limited.limited_by = 1_000_000, status
        limited.retry_after = "30" if together else formatdate(time.time() + 30, usegmt=True)
        asked = limited.requests
        for n in range(0, 80, 2):
            calls = [("eth_call", [{"data": hex(n + more)}, "latest"]) for more in range(2)]
            if together:
                assert all("result" in item for item in (await harness.batch(*calls)).json)
            else:
                await harness.result(*calls[0])
        assert limited.requests <= asked + 1
        health = harness.route.upstreams[0].health
        assert (health.bad, health.pause_s) == (0, 0.0)
        assert health.rests_until - time.monotonic() > 25.0
        await harness.look()
        assert limited.requests <= asked + 1


@on_uvloop
async def test_own_limit_of_an_upstream_is_kept() -> None:
    async with rpc_harness(2, options=[{"requests_per_second": 10.0}]) as harness:
        began = time.monotonic()
        load = await harness.load(400)
        assert not load.failed
        assert 0 < harness.upstreams[0].count("eth_call") <= 10 + 10 * (time.monotonic() - began) + 1


@on_uvloop
async def test_own_limit_of_a_method_is_kept() -> None:
    limits = {"method_rates": {"eth_getB*": 10.0, "eth_call": 1000.0}}
    async with rpc_harness(2, options=[limits, {}]) as harness:
        began = time.monotonic()
        for number in range(100):
            await harness.result("eth_getBalance", [ADDRESS, hex(number)])
            await harness.result("eth_getBlockTransactionCountByNumber", [hex(number)])
        limited, free = harness.upstreams
        took_s = time.monotonic() - began
        counts = {name: limited.count(name) for name in ("eth_getBalance", "eth_getBlockTransactionCountByNumber")}
        assert 0 < sum(counts.values()) <= 10 + 10 * took_s + 1, counts
        assert free.count("eth_getBalance") + counts["eth_getBalance"] == 100


@on_uvloop
async def test_limit_of_a_method_holds_for_batches_and_the_only_upstream() -> None:
    async with rpc_harness(1, options=[{"method_rates": {"eth_getBalance": 5.0}}]) as harness:
        began = time.monotonic()
        calls = [("eth_getBalance", [ADDRESS, hex(number)]) for number in range(20)]
        others = [("eth_getCode", [ADDRESS, hex(number)]) for number in range(20)]
        replies = (await harness.batch(*calls, *others)).json
        assert all("result" in reply for reply in replies[20:]), "other methods are free"
        good = sum("result" in reply for reply in replies[:20])
        assert 0 < good == harness.upstreams[0].count("eth_getBalance") <= 5 + 5 * (time.monotonic() - began) + 1


@on_uvloop
async def test_limit_of_a_method_is_learnt_from_refusals_while_other_methods_go_on() -> None:
    """The provider allows fewer calls of a method than the settings say."""
    allowed, served = 10, list[float]()

    def limited(_: list[Any]) -> Any:
        now = time.monotonic()
        if sum(at > now - 1.0 for at in served) >= allowed:
            raise Refused(-32005, "too many requests per second")
        served.append(now)
        return "0x1"

    async with rpc_harness(1, options=[{"method_rates": {"eth_getBalance": 200.0}}]) as harness:
        only, health = harness.upstreams[0], harness.route.upstreams[0].health
        only.answers["eth_getBalance"] = limited
        began, good = time.monotonic(), 0
        for number in range(60):
            good += "result" in (await harness.call("eth_getBalance", [ADDRESS, hex(number)])).json
            assert await harness.result("eth_getCode", [ADDRESS, hex(number)])
            assert not health.is_limited("eth_getCode", time.monotonic())
            await harness.look()
        took_s = time.monotonic() - began
        assert good >= 55, "calls wait for the limit, as they do for that of the whole upstream"
        assert took_s > 60 / allowed - 2.0
        assert only.count("eth_getBalance") - len(served) <= 2 * took_s + 3, "few calls were refused"


@pytest.mark.parametrize(
    ("code", "message", "blamed"),
    [(-32000, "missing trie node 00ff", False), (-32601, "the method is not available", False), (-32603, "oops", True)],
)
@on_uvloop
async def test_error_that_is_specific_to_an_upstream_is_retried_on_another(
    code: int, message: str, blamed: bool
) -> None:
    def refuse(_: list[Any]) -> Any:
        raise Refused(code, message)

    async with rpc_harness(2) as harness:
        harness.upstreams[0].answers["eth_getProof"] = refuse
        for n in range(20):
            assert await harness.result("eth_getProof", [ADDRESS, [], hex(n)])
        assert (harness.route.upstreams[0].health.bad > 0) is blamed


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("code", "message"), [(-32000, "execution aborted (timeout = 5s)"), (-32603, "Internal error")]
)
@on_uvloop
async def test_call_that_no_upstream_can_answer_takes_none_from_other_callers(
    code: int, message: str, count: int
) -> None:
    def refuse(_: list[Any]) -> Any:
        raise Refused(code, message)

    async with rpc_harness(count) as harness:
        for upstream in harness.upstreams:
            upstream.answers["eth_call"] = refuse
        for n in range(30):
            assert (await harness.call("eth_call", [{"data": hex(n)}, "latest"])).json["error"]["message"] == message
        assert await harness.result("eth_getBalance", [ADDRESS, "latest"])
        assert not any(each.health.pause_s for each in harness.route.upstreams)


class Picky(ScriptedUpstream):
    """An upstream behind a firewall that blocks certain words."""

    async def _answer(self, request: web.Request) -> web.Response:
        if b"select 1" in await request.read():
            return web.Response(status=413, text="<html>no</html>", content_type="text/html")
        return await super()._answer(request)


@pytest.mark.parametrize("together", [False, True])
@on_uvloop
async def test_request_that_every_upstream_refuses_takes_none_from_other_callers(together: bool) -> None:
    async with rpc_harness(3, kind=Picky) as harness:
        for n in range(0, 40, 2):
            calls = [("eth_call", [{"data": f"select 1 {n + more}"}, "latest"]) for more in range(2)]
            if together:
                assert all("error" in item for item in (await harness.batch(*calls)).json)
            else:
                (await harness.call(*calls[0])).fault(500)
        assert await harness.result("eth_getBalance", [ADDRESS, "latest"])
        assert not any(each.health.pause_s for each in harness.route.upstreams)


@pytest.mark.parametrize("together", [False, True])
@on_uvloop
async def test_result_that_is_too_large_takes_no_upstream_from_other_callers(together: bool) -> None:
    whole = "0x" + "ab" * (MAX_REPLY_BYTES // 2)

    async with rpc_harness(2) as harness:
        for upstream in harness.upstreams:
            upstream.answers["eth_getTransactionReceipt"] = lambda _: whole
        for n in range(3 if together else 6):
            # A result that names a block is read before it is passed on, and so is held whole.
            numbers = range(0, 20 if together else 10, 10)
            calls = [("eth_getTransactionReceipt", [f"0x{n + more:064x}"]) for more in numbers]
            assert all("error" in item for item in (await harness.batch(*calls)).json)
        assert await harness.result("eth_getBalance", [ADDRESS, "latest"])
        assert not any(each.health.pause_s for each in harness.route.upstreams)


@on_uvloop
async def test_upstream_that_alone_has_trouble_with_every_call_is_left_alone() -> None:
    def refuse(_: list[Any]) -> Any:
        raise Refused(-32603, "Internal error")

    async with rpc_harness(3) as harness:
        harness.upstreams[0].answers["eth_call"] = refuse
        load = await harness.load(200)
        assert not load.failed
        health = harness.route.upstreams[0].health
        assert health.pause_s
        assert harness.upstreams[0].count("eth_call") == health.bad < 30


@on_uvloop
async def test_error_from_one_upstream_is_returned_when_the_others_fail() -> None:
    """An upstream's error reply is more useful than an error about failed connections."""

    def refuse(_: list[Any]) -> Any:
        raise Refused(-32000, "missing trie node 00ff")

    async with rpc_harness(2, faults=True) as harness:
        harness.upstreams[0].answers["eth_getProof"] = refuse
        await harness.proxies[1].switch("reset")
        for n in range(3):
            reply = await harness.call("eth_getProof", [ADDRESS, [], hex(n)])
            assert reply.status == 200
            assert reply.json["error"] == {"code": -32000, "message": "missing trie node 00ff"}


@pytest.mark.parametrize("is_one_out", [False, True])
@on_uvloop
async def test_method_that_no_upstream_has_does_not_exist_from_the_first_call_on(is_one_out: bool) -> None:
    def lacking(_: list[Any]) -> Any:
        raise Refused(-32601, "the method debug_traceCall does not exist/is not available")

    async with rpc_harness(4, faults=True) as harness:
        for upstream in harness.upstreams:
            upstream.answers["eth_getProof"] = lacking
        if is_one_out:
            await harness.proxies[2].switch("dead")
        for n in range(5):
            reply = await harness.call("eth_getProof", [ADDRESS, [], hex(n)])
            assert (reply.status, reply.json["error"]["code"]) == (200, -32601)
        asked = sum(upstream.count("eth_getProof") for upstream in harness.upstreams)
        # Each is asked once, and then one of them for each call.
        assert asked <= 4 + 4


# Several calls in one request


@on_uvloop
async def test_batch_goes_out_as_one_request_and_each_item_has_its_own_answer() -> None:
    async with rpc_harness(2) as harness:
        before = sum(each.requests for each in harness.upstreams)
        calls = [("eth_getBalance", [ADDRESS, hex(n)]) for n in range(20)]
        reply = await harness.batch(*calls)
        assert [item["id"] for item in reply.json] == list(range(20))
        hashes = [harness.chain.hash_of(n) for n in range(20)]
        assert [item["result"] for item in reply.json] == [value_of("balance", ADDRESS, each) for each in hashes]
        assert sum(each.requests for each in harness.upstreams) - before == 20  # old state: each as an archive read
        recent = [("eth_getBalance", [ADDRESS, hex(harness.chain.head - n)]) for n in range(20)]
        reply = await harness.batch(*recent)
        assert all("result" in item for item in reply.json)
        assert sum(each.requests for each in harness.upstreams) - before == 21


@pytest.mark.parametrize(("takes", "left"), [(0, 1), (3, 3)])
@on_uvloop
async def test_upstream_that_refuses_a_batch_is_not_blamed_and_gets_smaller_ones(takes: int, left: int) -> None:
    async with rpc_harness(1) as harness:
        harness.upstreams[0].batch = takes
        for turn in range(6):
            calls = [("eth_call", [{"data": hex(turn * 100 + n)}, "latest"]) for n in range(12)]
            reply = await harness.batch(*calls)
            assert [item["result"] for item in reply.json] == [value_of("eth_call", each) for _, each in calls]
        upstream = harness.route.upstreams[0]
        assert upstream.batches.of("acc_1") == left
        assert upstream.health.bad == 0
        # Larger batches are tried again later.
        upstream.tick(time.monotonic() + SMALLER_S + 1.0)
        assert upstream.batches.of("acc_1") == 20


@on_uvloop
async def test_batch_respects_the_deny_list_of_each_upstream() -> None:
    async with rpc_harness(2, options=[{"deny": ["eth_getBalance"]}, {"deny": ["eth_call"]}]) as harness:
        for n in range(20):
            reply = await harness.batch(
                *(("eth_call", [{"data": hex(n * 10 + k)}, "latest"]) for k in range(3)),
                *(("eth_getBalance", [ADDRESS, hex(harness.chain.head - k)]) for k in range(3)),
            )
            assert all("result" in item for item in reply.json)
        assert harness.upstreams[0].count("eth_getBalance") == 0
        assert harness.upstreams[1].count("eth_call") == 0


@pytest.mark.parametrize("mode", ["black_hole", "reset", "garbage", "half"])
@on_uvloop
async def test_items_of_a_broken_batch_are_retried_one_by_one_on_another_upstream(mode: Mode) -> None:
    async with rpc_harness(2, faults=True) as harness:
        await harness.load(100)
        await harness.proxies[0].switch(mode)
        for turn in range(8):
            calls = [("eth_call", [{"data": hex(turn * 100 + n), "to": mode}, "latest"]) for n in range(10)]
            reply = await harness.batch(*calls)
            assert [item.get("result") for item in reply.json] == [value_of("eth_call", each) for _, each in calls]


@pytest.mark.parametrize("count", [1, 2])
@on_uvloop
async def test_call_that_hangs_on_all_upstreams_is_sent_again_when_one_is_back(count: int) -> None:
    async with rpc_harness(count, faults=True) as harness, asyncio.TaskGroup() as group:
        for proxy in harness.proxies:
            await proxy.switch("black_hole")
        asked = group.create_task(harness.call("eth_estimateGas", [{"to": ADDRESS}]))
        await until(lambda: all(proxy.methods["eth_estimateGas"] for proxy in harness.proxies))
        await harness.look()
        await harness.proxies[-1].switch("pass")
        await harness.look()
        assert (await asked).status == 200


@on_uvloop
async def test_calls_wait_for_the_trial_of_the_only_upstream_after_an_outage() -> None:
    """One call is the trial. The others come at the same moment, and the upstream answers polls."""
    async with rpc_harness(1, cache={"enabled": False}) as harness:
        await harness.load(10)
        harness.route.upstreams[0].health.open(time.monotonic() - 60.0)
        calls = [harness.call("eth_estimateGas", [{"to": ADDRESS, "value": hex(n)}]) for n in range(10)]
        assert [reply.status for reply in await asyncio.gather(*calls)] == [200] * 10


@pytest.mark.parametrize("reply", [None, True, 12, "", "0x", "0x-1", "12", {"result": "0x1"}, "0x" + 65 * "1"])
@on_uvloop
async def test_number_for_us_that_is_none_is_a_fault_of_the_upstream(reply: Any) -> None:
    async with rpc_harness(1, cache={"enabled": False}) as harness:
        harness.upstreams[0].answers["eth_getBalance"] = lambda _: reply
        calls = harness.worker.app.internal_calls
        with pytest.raises(Unavailable, match="ethereum/mainnet does not answer eth_getBalance with a number"):
            await calls.quantity(harness.route.network, "eth_getBalance", "0x" + 40 * "1", "latest")


@on_uvloop
async def test_cancelled_look_at_an_upstream_that_hangs_holds_no_connection() -> None:
    """One look uses a free connection of calls, the next one that of looks, and both are cancelled."""
    async with rpc_harness(1) as harness:
        (scripted,), (upstream,) = harness.upstreams, harness.route.upstreams
        scripted.held.add("eth_getBalance")
        for number in range(3):
            async with asyncio.TaskGroup() as group:
                look = group.create_task(result_of(Probe(upstream, "eth_getBalance", b'["%d"]' % number), 60.0))
                await until(lambda: scripted.count("eth_getBalance") > number, every_s=0.001)  # noqa: B023
                look.cancel()
            assert await result_of(Probe(upstream, "eth_chainId"), AT_ONCE_S) is not None


@on_uvloop
async def test_upstream_that_announced_a_block_and_is_silent_is_not_waited_for() -> None:
    async with rpc_harness(2) as harness:
        source = harness.route.upstreams[0]
        harness.upstreams[0].held.add("eth_getBlockByNumber")
        for _ in range(FAILURES_IN_A_ROW):
            source.health.failed(time.monotonic(), by_call=True)
        source.health.head_poll_failed(time.monotonic())
        async with asyncio.timeout(AT_ONCE_S):
            block = await BlockSource(harness.route).by_number(harness.chain.head - 5, source)
        assert block.number == harness.chain.head - 5
