"""Routing by labels: rules of the settings, keys and requests; and the clients and methods that upstreams are found to have."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.core.fleet import seen
from proxy.services.fleet import UpstreamWatch
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import Refused, ScriptedUpstream
from tests.web.worker import LIVE, on_uvloop

NO_CACHE = {"enabled": False}
ADDRESS = "0x" + 40 * "1"
EU, US = {"name": "one", "labels": ["region=eu"]}, {"name": "two", "labels": ["region=us"]}


def rule(**given: Any) -> list[dict[str, Any]]:
    return [{"network": LIVE, **given}]


async def counts(
    harness: RpcHarness, method: str = "eth_getCode", calls: int = 20, *, block: str = "latest", **options: Any
) -> list[int]:
    """How many of calls at the same time each upstream got: one by one, all might go to the faster of two."""
    before = [each.count(method) for each in harness.upstreams]
    params = [[f"0x{number:040x}", block] for number in range(1, calls + 1)]
    await asyncio.gather(*(harness.result(method, each, **options) for each in params))
    return [each.count(method) - earlier for each, earlier in zip(harness.upstreams, before, strict=True)]


@pytest.mark.parametrize(
    "given",
    [
        {"require": ["region=eu"]},
        {"require": ["name=one", "region=eu"]},
        {"prefer": ["region=eu"]},
        {"avoid": ["region=us"]},
        {"avoid": ["name=two"], "methods": ["eth_*"]},
    ],
)
@on_uvloop
async def test_rule_chooses_upstreams_by_label(given: dict[str, Any]) -> None:
    async with rpc_harness(2, cache=NO_CACHE, options=[EU, US], routing=rule(**given)) as harness:
        assert await counts(harness) == [20, 0]
        reply = await harness.batch(*[("eth_getCode", [ADDRESS, hex(n)]) for n in (999, 998, 997)])
        assert [each["id"] for each in reply.json] == [0, 1, 2]
        assert harness.upstreams[1].count("eth_getCode") == 0


@on_uvloop
async def test_preferred_upstream_is_a_wish_and_required_one_is_not() -> None:
    rules = rule(prefer=["region=eu"], methods=["eth_getCode"]) + rule(
        require=["region=eu"], methods=["eth_getBalance"]
    )
    async with rpc_harness(2, faults=True, cache=NO_CACHE, options=[EU, US], routing=rules) as harness:
        harness.route.upstreams[0].health.cordon(cordoned=True, now=0.0)
        assert await counts(harness) == [0, 20]
        reply = await harness.call("eth_getBalance", [ADDRESS, "latest"])
        assert reply.status == 503
        assert "with the labels region=eu accepts calls" in reply.json["error"]["message"]
        assert harness.upstreams[1].count("eth_getBalance") == 0


@on_uvloop
async def test_rule_for_a_key_leaves_other_keys_alone() -> None:
    rules = rule(require=["region=eu"], keys=["key_of_nobody"])
    async with rpc_harness(2, cache=NO_CACHE, options=[EU, US], routing=rules) as harness:
        assert min(await counts(harness, calls=60)) > 0


@on_uvloop
async def test_paid_upstreams_are_avoided_by_a_word() -> None:
    options = [{"cost": "alchemy"}, {}]
    async with rpc_harness(2, cache=NO_CACHE, options=options, routing=rule(avoid=["paid"])) as harness:
        assert await counts(harness) == [0, 20]


@on_uvloop
async def test_request_requires_a_label_with_x_upstream() -> None:
    async with rpc_harness(2, cache=NO_CACHE, options=[EU, US]) as harness:
        harness.worker.add_key("operator", directives=frozenset(("upstream",)))
        assert await counts(harness, key="operator", X_Upstream="region=us") == [0, 20]


# Clients and methods


def client(name: str, *modules: str) -> dict[str, Any]:
    return {"web3_clientVersion": lambda _: name, "rpc_modules": lambda _: dict.fromkeys(modules, "1.0")}


def missing(_: list[Any]) -> Any:
    raise Refused(-32601, "the method does not exist/is not available")


def asked(upstream: ScriptedUpstream) -> int:
    return upstream.count("web3_clientVersion") + upstream.count("rpc_modules")


@on_uvloop
async def test_methods_that_an_upstream_does_not_have_go_elsewhere_without_an_attempt() -> None:
    async with rpc_harness(2, cache=NO_CACHE) as harness:
        first, second = harness.upstreams
        first.answers |= client("Geth/v1.16.3-stable/linux", "eth", "net", "web3") | {"eth_simulateV1": missing}
        second.answers |= client("erigon/3.0", "eth", "net", "web3", "trace", "debug")
        first.answers |= dict.fromkeys(("trace_block", "debug_traceCall"), missing)
        second.answers |= {"trace_block": lambda _: [], "eth_simulateV1": lambda _: []}
        await harness.tracker.find_methods()
        await harness.tracker.find_methods()
        assert [asked(each) for each in harness.upstreams] == [2, 2]  # The next time is an hour away.
        healths = [each.health for each in harness.route.upstreams]
        assert [each.client for each in healths] == ["Geth/v1.16.3-stable/linux", "erigon/3.0"]
        assert "client=geth" in healths[0].words
        for _ in range(10):
            await harness.result("trace_block", ["latest"])
            await harness.result("eth_simulateV1", [{"blockStateCalls": []}, "latest"])
        assert first.count("trace_block") == 0
        assert first.count("eth_simulateV1") == 1  # When it was tried.


@on_uvloop
async def test_operators_word_wins_over_what_was_found() -> None:
    allowed = {"allow": ["eth_call", "trace_block"]}
    async with rpc_harness(1, cache=NO_CACHE, options=[allowed]) as harness:
        harness.upstreams[0].answers |= client("Geth/v1", "eth")
        await harness.tracker.find_methods()
        health = harness.route.upstreams[0].health
        assert not health.lacks("trace_block", 0.0)
        assert health.lacks("trace_call", 0.0)


@on_uvloop
async def test_upstream_that_says_nothing_keeps_all_methods() -> None:
    async with rpc_harness(1, cache=NO_CACHE) as harness:
        harness.upstreams[0].answers |= dict.fromkeys(("web3_clientVersion", "rpc_modules"), missing)
        await harness.tracker.find_methods()
        health = harness.route.upstreams[0].health
        assert health.client == ""
        assert not health.lacks("trace_block", 0.0)


@on_uvloop
async def test_upstream_above_a_limit_is_excluded_and_the_error_names_the_rule() -> None:
    rules = rule(avoid=["name=three"]) + rule(above={"lag_blocks": 1}, methods=["eth_getCode"])
    async with rpc_harness(2, cache=NO_CACHE, options=[EU, US], routing=rules, rpc={"lag_s": 600}) as harness:
        harness.upstreams[1].behind = 3
        await harness.look()
        assert await counts(harness, block=hex(900)) == [20, 0]
        others = await counts(harness, "eth_getBalance", 200, block=hex(900))
        assert min(others) > 0, "the rule is not for this method"
        harness.route.upstreams[0].health.cordon(cordoned=True, now=0.0)
        reply = await harness.call("eth_getCode", [ADDRESS, hex(900)])
        assert reply.status == 503
        assert "excluded by rule 2: 3 blocks behind" in reply.json["error"]["message"]


@on_uvloop
async def test_limit_of_a_dry_run_is_reported_and_changes_nothing() -> None:
    rules = rule(above={"lag_blocks": 1}, dry_run=True)
    async with rpc_harness(2, cache=NO_CACHE, options=[EU, US], routing=rules, rpc={"lag_s": 600}) as harness:
        harness.upstreams[1].behind = 3
        await harness.look()
        assert min(await counts(harness, calls=200, block=hex(900))) > 0
        UpstreamWatch([harness.worker.app.networks]).observe()
        first, second = [seen(each.health, 0.0)["exclusions"] for each in harness.route.upstreams]
        assert (first, second) == ((), ("would be excluded by rule 1: 3 blocks behind",))
