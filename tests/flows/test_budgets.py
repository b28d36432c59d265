"""A budget holds over all hosts: never above it, and hardly anything unused."""

from __future__ import annotations

import asyncio
import calendar
import datetime
import time
from typing import Any

from aiohttp import web

from proxy.core.credits import CreditMeter
from proxy.core.routing import HEDGE_CEILING_S, HEDGE_FLOOR_S
from proxy.store.postgres.spending import SpendingStore
from tests.budget_hosts import billed_of_budget, hosts, use_up
from tests.database import Server
from tests.http_client import Reply, rpc
from tests.metering_upstream import MeteringUpstream, billing_by
from tests.rpc_harness import rpc_harness
from tests.rpc_upstreams import Chain, ScriptedUpstream, scripted
from tests.service import until
from tests.web.worker import LIVE, Worker

ADDRESS = "0x" + "22" * 20
LIMIT = 10_000


async def test_hard_budget_holds_over_three_hosts(server: Server) -> None:
    assert 0.99 * LIMIT <= await billed_of_budget(server, LIMIT) <= LIMIT


async def test_limit_that_an_operator_sets_holds_on_all_hosts(server: Server) -> None:
    """Raised when it is used up, then lowered below what is used, and reset."""
    chain = Chain()
    async with scripted(1, chain, billing_by("alchemy")) as (stub,):
        assert isinstance(stub, MeteringUpstream)
        given = [{"url": stub.url, "cost": "alchemy", "budget": {"credits": LIMIT // 10}}]
        async with hosts(server, 3, given) as workers:
            store = SpendingStore(workers[0].app.pool)
            (meter,) = workers[0].app.networks.meters()
            assert meter.budget is not None
            await asyncio.gather(*[use_up(worker) for worker in workers])
            assert 0.9 * LIMIT // 10 <= stub.billed <= LIMIT // 10
            await store.set_limit(meter.budget.name, LIMIT // 5, "ops")
            await until(lambda: _limits(workers) == {LIMIT // 5})
            await asyncio.gather(*[use_up(worker) for worker in workers])
            assert 0.9 * LIMIT // 5 <= stub.billed <= LIMIT // 5
            used = stub.billed
            await store.set_limit(meter.budget.name, 1, "ops")
            await until(lambda: _limits(workers) == {1})
            # Nothing more is leased from now on.
            leased = sum([max(0, each.budget.left) for each in _meters(workers) if each.budget is not None])
            await store.set_limit(meter.budget.name, None, "ops")
            await until(lambda: _limits(workers) == {LIMIT // 10})
            for worker in workers:
                await use_up(worker)
            assert stub.billed - used <= leased


def _meters(workers: list[Worker]) -> list[CreditMeter]:
    return [meter for worker in workers for meter in worker.app.networks.meters()]


def _limits(workers: list[Worker]) -> set[int]:
    """The limits that workers know and allow."""
    budgets = [meter.budget for meter in _meters(workers)]
    return {budget.allowance if budget.allowance == budget.limit else -1 for budget in budgets if budget is not None}


async def test_soft_budget_is_chosen_last(server: Server) -> None:
    chain = Chain()
    async with scripted(2, chain, billing_by("alchemy", "alchemy")) as stubs:
        limited, other = stubs
        # The other one has a higher tier: it costs nothing, and would get all calls of the same tier.
        given: list[dict[str, Any]] = [
            {"url": limited.url, "cost": "alchemy", "budget": {"credits": 200, "per": "day", "hard": False}},
            {"url": other.url, "tier": 1},
        ]
        async with hosts(server, 1, given) as (worker,):
            await until(lambda: _is_used_up(worker))
            before = limited.count("eth_call")
            for number in range(100):
                body = rpc("eth_call", [{"to": ADDRESS, "data": hex(1000 + number)}, "latest"])
                assert (await worker.send(body)).status == 200
            assert limited.count("eth_call") == before
            other.held.add("eth_call")
            began = time.monotonic()
            reply = await worker.send(rpc("eth_call", [{"to": ADDRESS, "data": "0xbb"}, "latest"]))
            assert reply.status == 200, "a call that is very late goes to the last resort"
            took_s = time.monotonic() - began
            assert took_s >= 4 * HEDGE_FLOOR_S, "one that is only late does not"
            assert took_s < HEDGE_CEILING_S, "it does not wait until it hangs"
            assert limited.count("eth_call") == before + 1
            await other.close()
            reply = await worker.send(rpc("eth_call", [{"to": ADDRESS, "data": "0xaa"}, "latest"]))
            assert reply.status == 200, "the last resort is still used"


async def _is_used_up(worker: Worker) -> bool:
    """Make a call; return whether the budget of the first upstream is used up now."""
    (meter,) = worker.app.networks.meters()
    body = rpc("eth_call", [{"to": ADDRESS, "data": hex(meter.total.credits)}, "latest"])
    assert (await worker.send(body)).status == 200
    return worker.app.networks.routes[LIVE].upstreams[0].health.is_over_budget


async def test_unused_credits_are_returned_when_a_process_stops(server: Server) -> None:
    chain = Chain()
    async with scripted(1, chain, billing_by("alchemy")) as (stub,):
        given = [{"url": stub.url, "cost": "alchemy", "budget": {"credits": LIMIT, "shared": "team"}}]
        async with hosts(server, 1, given) as (worker,):
            app = worker.app
            (budget,) = [meter.budget for meter in app.networks.meters()]
            assert budget is not None
            await until(lambda: app.networks.meters()[0].total.credits > 0 and budget.wanted == 0)
            await app.tasks.close()
            spent = app.networks.meters()[0].total.credits
            await app.budgets.close()
            used = await app.spending._store.used({"team": budget.period})
            assert used == {"team": spent}


class SpentUpstream(ScriptedUpstream):
    """Refuses calls because the month's capacity is used up, while `is_spent`."""

    is_spent = False

    async def _answer(self, request: web.Request) -> web.Response:
        if not self.is_spent:
            return await super()._answer(request)
        self.requests += 1
        error = {"code": 429, "message": "Monthly capacity limit exceeded. Visit the dashboard to upgrade"}
        return web.json_response({"jsonrpc": "2.0", "id": 1, "error": error}, status=429)


async def test_upstream_whose_monthly_capacity_is_used_up_is_left_out() -> None:
    async with rpc_harness(2, kind=SpentUpstream, cache={"enabled": False}) as harness:
        spent = harness.upstreams[0]
        assert isinstance(spent, SpentUpstream)
        spent.is_spent = True
        health = harness.route.upstreams[0].health

        async def is_out() -> bool:
            await harness.result("eth_call", [{"to": ADDRESS, "data": hex(spent.requests)}, "latest"])
            return health.exhausted_until > 0

        await until(is_out)
        left_s = health.exhausted_until - time.monotonic()
        assert 0 < left_s <= 31 * 86_400
        assert health.withheld
        before = spent.requests
        for number in range(20):
            await harness.result("eth_call", [{"to": ADDRESS, "data": hex(1000 + number)}, "latest"])
        assert spent.requests == before


async def test_paced_budget_allows_the_parts_of_the_days_so_far(server: Server) -> None:
    chain = Chain()
    async with scripted(1, chain, billing_by("alchemy")) as (stub,):
        assert isinstance(stub, MeteringUpstream)
        given = [{"url": stub.url, "cost": "alchemy", "budget": {"credits": LIMIT, "paced": True}}]
        async with hosts(server, 2, given) as workers:
            await asyncio.gather(*[use_up(worker) for worker in workers])
            today = datetime.datetime.now(datetime.UTC).date()
            days = calendar.monthrange(today.year, today.month)[1]
            allowed = LIMIT * today.day // days
            # Each host may have a rest that is too small for a call.
            assert allowed - 2 * 26 < stub.billed <= allowed


async def test_included_credits_are_free_until_they_are_used_up(server: Server) -> None:
    chain = Chain()
    async with scripted(1, chain, billing_by("alchemy")) as (stub,):
        given = [{"url": stub.url, "cost": "alchemy", "credit_price": "0.40", "included_credits": 2000}]
        async with hosts(server, 1, given) as (worker,):
            (meter,) = worker.app.networks.meters()
            assert meter.included is not None

            async def call() -> bool:
                body = rpc("eth_call", [{"to": ADDRESS, "data": hex(meter.total.calls)}, "latest"])
                assert (await worker.send(body)).status == 200
                assert meter.total.nanos == 0 or meter.total.credits >= 2000, "the first ones are free"
                return meter.included is not None and meter.included.is_over

            await until(call)
            before = meter.total.nanos
            assert await call()
            assert meter.total.nanos - before >= 26 * 400
            used = await worker.app.spending._store.used({meter.included.name: meter.included.period})
            assert used == {meter.included.name: 2000}


async def test_upstream_on_trial_has_a_budget_of_its_own(server: Server) -> None:
    chain = Chain()
    async with scripted(2, chain, billing_by("alchemy", "alchemy")) as (own, tried):
        assert isinstance(tried, MeteringUpstream)
        trial = {"name": "new", "shadow": 1.0, "requests_per_second": 10_000}
        given: list[dict[str, Any]] = [
            {"url": own.url},
            {"url": tried.url, "cost": "alchemy", "budget": {"credits": 200}, **trial},
        ]
        async with hosts(server, 1, given) as (worker,):
            (shadow,) = worker.app.networks.shadows
            for number in range(20):
                body = rpc("eth_getBalance", [ADDRESS, hex(chain.head - 200 + number)])
                assert (await worker.send(body)).status == 200
            await until(lambda: shadow.trial.total.reads + shadow.trial.skipped >= 20)
            assert 0 < shadow.trial.total.reads == tried.billed // 20 <= 10


async def test_account_that_has_used_its_share_leaves_the_rest_to_others(server: Server) -> None:
    chain = Chain()
    async with scripted(1, chain, billing_by("alchemy")) as (stub,):
        assert isinstance(stub, MeteringUpstream)
        given = [{"url": stub.url, "cost": "alchemy", "budget": {"credits": LIMIT, "account_share": 0.2}}]
        async with hosts(server, 2, given) as workers:
            for worker in workers:
                worker.app.tasks.start("spending", worker.app.spending.run)
                worker.app.budgets._accounts_s = 0.2
                worker.add_key("greedy")

            async def call(worker: Worker, number: int, key: str) -> Reply:
                body = rpc("eth_call", [{"to": ADDRESS, "data": hex(number)}, "latest"])
                return await worker.send(body, key=key)

            async def is_refused() -> bool:
                """Half of the calls on each host, as slowly as is needed to read what was spent."""
                await asyncio.sleep(0.02)
                replies = [
                    await call(worker, stub.billed * 2 + place, "greedy") for place, worker in enumerate(workers)
                ]
                return all(reply.status == 503 for reply in replies)

            await until(is_refused, within_s=60)
            used = stub.billed
            assert 0.2 * LIMIT <= used <= 0.5 * LIMIT, "what is spent is known a little later"
            reply = await call(workers[0], 1, "greedy")
            assert "your account has used its part of the budget of upstreams" in reply.json["error"]["message"]
            for number in range(100, 120):
                assert (await call(workers[number % 2], number, "main")).status == 200
