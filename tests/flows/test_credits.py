"""The counted cost of calls equals that which providers bill: every attempt, at the price of its outcome."""

from __future__ import annotations

from proxy.core.directives import USUAL
from tests.http_client import rpc
from tests.metered_calls import ADDRESS, metered, mixed_calls
from tests.rpc_harness import rpc_harness
from tests.service import until
from tests.web.worker import on_uvloop

CALLS = 2080


@on_uvloop
async def test_credits_of_mixed_calls_equal_what_the_providers_bill() -> None:
    async with mixed_calls(CALLS) as harness:
        assert sum(each.billed_calls for each in harness.stubs) > 1.2 * CALLS
        # Each takes part. How often it is chosen depends on the latencies.
        assert all(each.billed_calls > 200 for each in harness.stubs), [each.billed_calls for each in harness.stubs]


@on_uvloop
async def test_calls_that_were_not_sent_cost_nothing() -> None:
    async with metered("alchemy") as harness:
        await harness.rpc.result("eth_call", [{"to": ADDRESS}, "latest"])
        await harness.agrees()
        await harness.stubs[0].close()
        before = harness.counted
        reply = await harness.rpc.call("eth_call", [{"to": ADDRESS, "data": "0x01"}, "latest"])
        assert reply.status >= 500
        await until(lambda: harness.is_idle)
        assert harness.counted == before


@on_uvloop
async def test_copied_reads_cost_what_the_candidate_bills() -> None:
    """Reads of old state cost more than others."""
    candidate = {"shadow": 1.0, "requests_per_second": 10_000}
    async with metered("alchemy", "chainstack", candidate=candidate, cache={"enabled": False}) as harness:
        for block in ("latest", hex(harness.rpc.chain.head - 500)):
            for number in range(5):
                await harness.rpc.result("eth_getBalance", [f"0x{number:040x}", block])
        (shadow,) = harness.rpc.route.shadows
        await until(lambda: shadow.trial.total.reads == 10)
        await harness.agrees()
        candidate_stub = harness.stubs[1]
        assert candidate_stub.billed_by_method["eth_getBalance"] == 5 * 1 + 5 * 2
        candidate_stub.refuses = candidate_stub.fails = candidate_stub.lacks = 0.2
        for number in range(60):
            await harness.rpc.result("eth_getBalance", [f"0x{number + 9:040x}", "latest"])
        await until(lambda: shadow.trial.total.reads == 70)
        await harness.agrees()
        assert all(shadow.trial.total.outcomes[outcome] for outcome in ("same", "missing", "error"))


@on_uvloop
async def test_costs_are_those_of_the_key_that_made_the_call() -> None:
    async with metered("alchemy") as harness:
        worker = harness.rpc.worker
        own = worker.app.keyring.find(worker.keys["main"], 0.0)
        other = worker.add_key("other")
        await harness.rpc.result("eth_call", [{"to": ADDRESS}, "latest"])
        await harness.rpc.result("eth_getBalance", [ADDRESS, "latest"], key="other")
        assert own is not None
        spent = harness.spent
        assert spent["eth_call", own.account.id, own.id] == 26
        assert spent["eth_getBalance", other.account.id, other.id] == 20
        polls = {method for method, account, _ in spent if not account}
        assert polls == {"eth_getBlockByNumber"}


@on_uvloop
async def test_joined_and_cached_calls_cost_nothing() -> None:
    async with metered("alchemy") as harness:
        params = [ADDRESS, hex(harness.rpc.chain.head - 200)]
        await harness.rpc.result("eth_getBalance", params)
        before = harness.counted
        await harness.rpc.result("eth_getBalance", params)
        assert harness.counted == before
        await harness.agrees()


@on_uvloop
async def test_own_nodes_cost_nothing_and_keep_the_short_path() -> None:
    async with rpc_harness(1) as harness:
        await harness.result("eth_call", [{"to": ADDRESS}, "latest"])
        assert harness.worker.app.networks.meters() == []
        assert harness.route.upstreams[0].health.free


@on_uvloop
async def test_batch_is_priced_call_by_call() -> None:
    async with metered("infura") as harness:
        worker = harness.rpc.worker
        before = harness.counted[0]
        body = rpc("eth_gasPrice").replace(b'"id":1', b'"id":2')
        reply = await worker.send(b"[" + rpc("eth_getBalance", [ADDRESS, "latest"]) + b"," + body + b"]")
        assert reply.status == 200
        assert harness.counted[0] - before == 160
        await harness.agrees()


# aiohttp serves requests of web pages, the front all others.
SERVED_BY: tuple[dict[str, str], ...] = ({}, {"Origin": "https://app.example.com"})
PRICED = {"cost": "alchemy", "credit_price": "0.40"}


@on_uvloop
async def test_reply_shows_its_cost_to_keys_that_may_see_it() -> None:
    async with rpc_harness(1, options=[PRICED]) as harness:
        harness.worker.add_key("dear", directives=USUAL | {"cost"})
        for number, more in enumerate(SERVED_BY):
            call = ("eth_call", [{"to": ADDRESS, "data": hex(number)}, "latest"])
            refused = await harness.call(*call, X_Cost="1", **more)
            assert (refused.status, "X-Cost" in refused.json["error"]["message"]) == (403, True)
            assert "x-cost" not in (await harness.call("eth_gasPrice", key="dear", **more)).headers
            costs = [(await harness.call(*call, key="dear", X_Cost="1", **more)).headers["x-cost"] for _ in range(2)]
            assert costs == ["0.000010400", "0.000000000"], "the second reply is cached"


@on_uvloop
async def test_cost_has_all_attempts_of_a_call() -> None:
    async with rpc_harness(3, options=[PRICED] * 3) as harness:
        harness.worker.add_key("dear", directives=USUAL | {"cost"})
        call = ("eth_getBalance", [ADDRESS, "latest"])
        reply = await harness.call(*call, key="dear", X_Cost="1", X_Verify="quorum 3/3")
        assert (reply.status, reply.headers["x-cost"]) == (200, "0.000024000")


@on_uvloop
async def test_upstreams_that_cost_more_than_the_request_allows_are_left_out() -> None:
    async with rpc_harness(2, options=[PRICED, {"tier": 1}]) as harness:
        dear, own = harness.upstreams
        for number, more in enumerate(SERVED_BY):
            for most, asked in (("0.0000104", dear), ("0.0000103", own), ("0", own)):
                before = asked.count("eth_call")
                call = ("eth_call", [{"to": ADDRESS, "data": f"0x{number}{most[2:]}"}, "latest"])
                assert (await harness.call(*call, X_Max_Cost=most, **more)).status == 200
                assert asked.count("eth_call") == before + 1, (most, more)
            wrong = await harness.call("eth_gasPrice", X_Max_Cost="much", **more)
            assert (wrong.status, wrong.json["error"]["param"]) == (400, "X-Max-Cost")


@on_uvloop
async def test_call_that_no_upstream_makes_at_the_cost_is_refused() -> None:
    async with rpc_harness(1, options=[PRICED]) as harness:
        for more in SERVED_BY:
            reply = await harness.call("eth_call", [{"to": ADDRESS}, "latest"], X_Max_Cost="0", **more)
            assert reply.status == 503
            assert "at the cost of X-Max-Cost" in reply.json["error"]["message"]
