"""One account's calls do not lead to judgements about upstreams that others suffer from: by rules, budgets and trials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import Refused, value_of
from tests.service import until
from tests.web.worker import LIVE, NO_CACHE, on_uvloop

ADDRESS = "0x" + 40 * "1"
TRIED = {"shadow": 1.0, "requests_per_second": 10_000, "name": "new"}


def failing_at(data: str) -> Callable[[list[Any]], Any]:
    """A node with a bug that a client can trigger."""

    def answer(params: list[Any]) -> Any:
        if params[0]["data"].startswith(data):
            raise Refused(-32603, "internal error")
        return value_of("eth_call", params)

    return answer


@on_uvloop
async def test_errors_that_one_account_causes_leave_others_the_upstream_that_a_rule_is_about() -> None:
    rules = [{"network": LIVE, "above": {"error_rate": 0.05}}]
    async with rpc_harness(2, routing=rules, **NO_CACHE) as harness:
        harness.worker.add_key("hostile")
        harness.upstreams[0].answers["eth_call"] = failing_at("0xaa")
        first, second = [each.health for each in harness.route.upstreams]
        for number in range(200):
            await harness.call("eth_call", [{"data": f"0xaa{number:04x}"}, "latest"], key="hostile")
            if first.failing_share > 0.05:
                break
        assert first.failing_share > 0.05, first
        second.cordon(cordoned=True, now=0.0)  # Or it is down.
        for number in range(20):
            await harness.result("eth_getBalance", [ADDRESS, hex(900 + number)])


async def read_at(harness: RpcHarness, key: str, numbers: range) -> None:
    for number in numbers:
        await harness.result("eth_call", [{"data": f"0xcc{number:04x}"}, hex(900)], key=key)


@on_uvloop
async def test_trial_names_the_account_that_alone_reads_what_differs() -> None:
    """Nodes differ in what a call sees of them, such as the gas that is left."""
    options: list[dict[str, Any]] = [{}, TRIED]
    async with rpc_harness(2, options=options, **NO_CACHE) as harness:
        hostile = harness.worker.add_key("hostile").account.id
        (shadow,) = harness.route.shadows
        await read_at(harness, "main", range(60))
        harness.upstreams[1].answers["eth_call"] = lambda _: "0xbad"
        await read_at(harness, "hostile", range(100, 103))
        await until(lambda: shadow.trial.total.reads == 63)
        assert shadow.trial.culprit("different") == hostile
        assert f"3 of 63 reads differ, all of account {hostile}" in shadow.trial.verdict


@on_uvloop
async def test_account_is_left_out_of_a_trial() -> None:
    options: list[dict[str, Any]] = [{}, {**TRIED, "trial_without": ["acc_2"]}]
    async with rpc_harness(2, options=options, **NO_CACHE) as harness:
        hostile = harness.worker.add_key("hostile").account.id
        assert hostile == "acc_2"
        (shadow,) = harness.route.shadows
        harness.upstreams[1].answers["eth_call"] = lambda _: "0xbad"
        await read_at(harness, "hostile", range(100, 103))
        harness.upstreams[1].answers.clear()
        await read_at(harness, "main", range(5))
        await until(lambda: shadow.trial.total.reads >= 5)
        assert shadow.trial.total.outcomes["same"] == shadow.trial.total.reads == 5
