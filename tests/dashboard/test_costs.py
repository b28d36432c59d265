"""Operators see the cost of upstreams, and how those on trial compare."""

from __future__ import annotations

import datetime
import time

from proxy.core.credits import Spent
from proxy.core.trials import ENOUGH_READS, Trial, TrialRead
from proxy.core.usage import UsageSums
from proxy.services.cost_report import Costs
from proxy.store.postgres.fleet import FleetStore
from proxy.store.postgres.spending import SpendingStore
from proxy.store.postgres.usage import UsageStore
from tests.dashboard.service import DashboardService
from tests.service import until
from tests.shapes import conforms

UPSTREAM, NETWORK = "test/costs#alchemy", "test/costs"
MILLION = 1_000_000


async def write_costs(service: DashboardService, account: str) -> None:
    """Today's costs of an account and of the service itself, and the account's usage."""
    today = datetime.datetime.now(datetime.UTC).date()
    spent = {
        (UPSTREAM, NETWORK, ("eth_call", account, "key_1")): Spent(100, 2600, 1_040_000),
        (UPSTREAM, NETWORK, ("eth_getLogs", account, "key_1")): Spent(10, 600, 240_000),
        (UPSTREAM, NETWORK, ("eth_blockNumber", "", "")): Spent(50, 500, 200_000),
    }
    await SpendingStore(service.pool).write(f"costs of {account}", 1, today, spent)
    used = UsageSums(requests=300, units=6000, hits=200, joins=50)
    store, minute = UsageStore(service.pool), int(time.time()) // 60
    await store.write(f"worker of {account}", 1, {((account, "key_1", NETWORK, "eth_call"), minute): used})
    await until(lambda: store.sum_up(0.0))  # Does nothing while the service's own worker sums up.


async def test_operators_see_costs_by_upstream_method_and_account(service: DashboardService) -> None:
    operator, account = await service.operator(), (await service.account(plan="free"))["id"]
    await write_costs(service, account)
    found = conforms((await operator.get("/admin/costs?days=1")).data, "CostReport")
    (upstream,) = [each for each in found["upstreams"] if each["upstream"] == UPSTREAM]
    assert (upstream["calls"], upstream["credits"], upstream["cost_usd"]) == (160, 3700, "0.001480000")
    (call,) = [each for each in found["methods"] if (each["network"], each["method"]) == (NETWORK, "eth_call")]
    assert (call["hits"], call["cost_usd"], call["saved_usd"]) == (200, "0.001040000", "0.002080000")
    assert (call["joins"], call["saved_by_joins_usd"]) == (50, "0.000520000")
    assert float(found["saved_by_joins_usd"]) >= 0.00052
    (mine,) = [each for each in found["accounts"] if each["account_id"] == account]
    assert (mine["requests"], mine["units"], mine["cost_usd"]) == (300, 6000, "0.001280000")
    assert (mine["revenue_usd"], mine["margin_usd"]) == (None, None), "its plan has no price"
    assert float(found["own"]["cost_usd"]) >= 0.0002
    for wrong in ("days=0", "days=367", "days=x"):
        (await operator.get(f"/admin/costs?{wrong}")).fault(400)
    (await (await service.holder()).get("/admin/costs")).fault(401)


async def test_only_operators_set_a_budget_that_exists(service: DashboardService) -> None:
    operator = await service.operator()
    for wrong in ({"name": "x"}, {"name": "x", "credits": 0}, {"name": "x", "credits": 1.5}, {"credits": 1}):
        (await operator.post("/admin/budgets", wrong)).fault(400)
    assert "no upstream has a budget x" in (await operator.post("/admin/budgets", {"name": "x", "credits": 1})).fault(
        404
    )
    (await (await service.holder()).post("/admin/budgets", {"name": "x", "credits": 1})).fault(401)


async def test_margin_is_what_the_plan_pays_less_the_cost(service: DashboardService) -> None:
    account = (await service.account(plan="growth"))["id"]
    await write_costs(service, account)
    costs = Costs(SpendingStore(service.pool), UsageStore(service.pool), [], {"growth": "2.50"})
    (mine,) = [each for each in (await costs.read(1)).accounts if each["id"] == account]
    assert mine["revenue"] == 6000 * 2500
    assert mine["revenue"] - mine["nanos"] == 15 * MILLION - 1_280_000


async def test_operators_see_the_verdict_of_a_trial(service: DashboardService) -> None:
    operator, trial = await service.operator(), Trial("test/trial#new")
    for _ in range(ENOUGH_READS):
        trial.read("eth_call", TrialRead("same", 0.02, 0.01))
    network = {"network": "test/trial", "kind": "upstream", "tip": 0, "upstreams": [], "trials": [trial.as_data]}
    store = FleetStore(service.pool)
    await store.write_view("trial-1", {"networks": [network]})
    try:
        listed = conforms((await operator.get("/admin/trials")).data, "TrialList")["trials"]
        (found,) = [each for each in listed if each["label"] == trial.label]
        assert (found["ready"], found["verdict"]) == (True, trial.verdict)
        assert [(each["method"], each["same"]) for each in found["methods"]] == [
            ("eth_call", ENOUGH_READS),
            ("all", ENOUGH_READS),
        ]
    finally:
        await store.delete_view("trial-1")
    (await (await service.holder()).get("/admin/trials")).fault(401)
