"""Upstreams on trial: reads that they get too, how their replies are compared, and what clients do not notice."""

from __future__ import annotations

import asyncio
import html
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import REGISTRY

from proxy.__main__ import main
from proxy.core.trials import Trial
from proxy.services.rpc.shadow import MOST_WAITING
from proxy.wire.upstream import MAX_REPLY_BYTES
from tests.node_stubs import StarknetStub, running_stub
from tests.planted_differences import planted_reads
from tests.real_harness import BASE
from tests.real_nodes import RealNode, geth_nodes
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import Chain, Refused, scripted
from tests.service import node_session, until
from tests.web.worker import LIVE, on_uvloop, running_worker

NO_CACHE = {"enabled": False}
CONFIG = """
database.url = "postgresql://nobody@127.0.0.1:1/nothing"
keys.pepper = "a pepper that no attacker can guess"
"""
CLIENT = "0x" + 40 * "1"
TRIED = {"shadow": 1.0, "requests_per_second": 10_000, "name": "new"}


@asynccontextmanager
async def shadowed(count: int = 2, **more: Any) -> AsyncIterator[tuple[RpcHarness, Trial]]:
    """A worker whose last upstream is on trial."""
    options: list[dict[str, Any]] = [{}] * (count - 1) + [{**TRIED, **more}]
    async with rpc_harness(count, cache=NO_CACHE, options=options) as harness:
        (shadow,) = harness.route.shadows
        yield harness, shadow.trial


async def outcomes(trial: Trial, reads: int) -> dict[str, int]:
    await until(lambda: trial.total.reads + trial.skipped >= reads)
    return {name: count for name, count in trial.total.outcomes.items() if count}


def reverted(data: str) -> Callable[[list[Any]], Any]:
    def revert(params: list[Any]) -> Any:
        raise Refused(3, "execution reverted", data=data)

    return revert


@on_uvloop
async def test_candidate_gets_reads_and_is_never_chosen() -> None:
    async with shadowed() as (harness, trial):
        assert [each.label for each in harness.route.upstreams] == ["ethereum/mainnet#1"]
        for number in range(20):
            await harness.result("eth_getBalance", [CLIENT, hex(900 + number)])
        assert await outcomes(trial, 20) == {"same": 20}
        await harness.call("eth_sendRawTransaction", ["0x01"])
        await harness.result("eth_blockNumber")
        assert harness.upstreams[1].counts == {"eth_getBalance": 20}


@on_uvloop
async def test_each_read_is_counted_once_in_the_metrics() -> None:
    """Metrics are brought up to date with each report."""

    def counted() -> float:
        labels = {"upstream": "ethereum/mainnet#new", "outcome": "same"}
        return REGISTRY.get_sample_value("penstock_shadow_reads_total", labels) or 0.0

    before = counted()
    async with shadowed() as (harness, trial):
        (shadow,) = harness.route.shadows
        for number in (900, 901, 902):
            await harness.result("eth_getBalance", [CLIENT, hex(number)])
            await outcomes(trial, number - 899)
            shadow.report()
        shadow.report()
    assert counted() - before == 3


@pytest.mark.parametrize("share", [0.1, 0.5])
@on_uvloop
async def test_share_of_the_reads_is_exact(share: float) -> None:
    async with shadowed(shadow=share) as (harness, trial):
        for number in range(100):
            await harness.result("eth_getBalance", [CLIENT, hex(800 + number)])
        assert await outcomes(trial, int(100 * share)) == {"same": int(100 * share)}


@on_uvloop
async def test_differences_lag_errors_and_missing_methods_are_told_apart() -> None:
    async with shadowed() as (harness, trial):
        second = harness.upstreams[1]
        for each in harness.upstreams:
            each.answers["eth_call"] = reverted("0xab")
        second.answers["eth_getCode"] = lambda _: "0xbad"

        def missing(_: list[Any]) -> Any:
            raise Refused(-32601, "the method does not exist/is not available")

        def broken(_: list[Any]) -> Any:
            raise Refused(-32603, "internal error")

        second.answers |= {"eth_getProof": missing, "eth_getStorageAt": broken}
        await harness.call("eth_call", [{"to": CLIENT}, hex(900)])
        await harness.call("eth_getCode", [CLIENT, hex(900)])
        await harness.call("eth_getProof", [CLIENT, [], hex(900)])
        await harness.call("eth_getStorageAt", [CLIENT, "0x0", hex(900)])
        assert await outcomes(trial, 4) == {"same": 1, "different": 1, "missing": 1, "error": 1}
        second.behind = 3
        await harness.call("eth_getBlockByNumber", [hex(harness.chain.head), False])
        assert (await outcomes(trial, 5))["behind"] == 1
        assert trial.verdict.startswith("do not promote: 1 of 5 reads differ, most of eth_getCode (the whole result)")


@on_uvloop
async def test_errors_of_a_candidate_mean_what_its_family_says() -> None:
    good, late = StarknetStub(), StarknetStub()
    late.head = 490
    async with running_stub(good), running_stub(late):
        given: list[dict[str, Any]] = [{"url": good.url}, {**TRIED, "url": late.url}]
        async with running_worker({good.network: given}, cache=NO_CACHE) as worker:
            harness = RpcHarness(worker, None, [], good.network)  # type: ignore[arg-type]
            await harness.look()
            (shadow,) = harness.route.shadows
            await harness.result("starknet_getBlockWithTxHashes", [{"block_number": 499}])
            assert await outcomes(shadow.trial, 1) == {"behind": 1}


@on_uvloop
async def test_candidate_that_hangs_costs_clients_nothing() -> None:
    async with shadowed() as (harness, trial):
        harness.upstreams[1].held.add("eth_getBalance")
        for number in range(MOST_WAITING + 20):
            await harness.result("eth_getBalance", [CLIENT, hex(800 + number)])
        assert trial.skipped >= 18
        assert harness.upstreams[1].count("eth_getBalance") == 1


@pytest.mark.parametrize("kind", ["long", "deep", "endless"])
@on_uvloop
async def test_candidate_that_floods_costs_clients_nothing(kind: str) -> None:
    """Its replies are long, nested, or do not end. They are not decoded while clients wait."""
    sent = 0

    async def flood(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        call = await request.json()
        if call["method"] != "eth_getBalance":
            return web.json_response({"jsonrpc": "2.0", "id": call["id"], "result": "0x3e8"})
        start, end = b'{"jsonrpc":"2.0","id":%d,"result":' % call["id"], b"}"
        if kind == "deep":
            return web.Response(body=start + b"[" * 60_000 + b"]" * 60_000 + end, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(start + b"[1")
        while kind == "endless" or sent < 20 << 20:
            await response.write(b",1" * 50_000)
            sent += 100_000
        await response.write(b"]" + end)
        return response

    application = web.Application()
    application.router.add_post("/", flood)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        async with scripted(1, Chain()) as (good,):
            given: list[dict[str, Any]] = [{"url": good.url}, {**TRIED, "url": url}]
            async with running_worker({LIVE: given}, cache=NO_CACHE) as worker:
                harness = RpcHarness(worker, None, [good], LIVE)  # type: ignore[arg-type]
                await harness.look()
                (shadow,) = harness.route.shadows
                longest_s = 0.0
                await harness.result("eth_getBalance", [CLIENT, "0x320"])
                while not shadow.trial.total.reads:
                    began = time.monotonic()
                    await harness.result("eth_chainId")
                    longest_s = max(longest_s, time.monotonic() - began)
                assert shadow.trial.total.outcomes["same"] == 0
                assert longest_s < 1.0
                assert sent <= 2 * MAX_REPLY_BYTES
    finally:
        await runner.cleanup()


@on_uvloop
async def test_limits_of_the_candidate_are_respected() -> None:
    more: dict[str, Any] = {"cost": "alchemy", "budget": {"credits": 1, "per": "day"}}
    async with shadowed(**more) as (harness, trial):
        for number in range(10):
            await harness.result("eth_getBalance", [CLIENT, hex(800 + number)])
        await until(lambda: trial.skipped == 10)
        assert harness.upstreams[1].count("eth_getBalance") == 0


# Two real nodes


@pytest.fixture(scope="module")
def geth(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealNode]]:
    with geth_nodes(2, tmp_path_factory.mktemp("shadow")) as nodes:
        yield nodes


@on_uvloop
async def test_all_planted_differences_between_two_geth_nodes_are_reported(geth: list[RealNode]) -> None:
    found = await planted_reads(geth, 200)
    assert found.planted > 20
    assert (found.skipped, found.missed, found.false) == (0, 0, 0), found


@pytest.mark.parametrize("is_right", [True, False])
@on_uvloop
async def test_certify_compares_a_candidate_that_is_not_in_use(
    geth: list[RealNode], is_right: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with node_session() as session:
        for node in geth:
            node.session = session
            await node.follow(BASE)
        if not is_right:
            await geth[1].follow((*BASE[:10], *(2,) * (len(BASE) - 10)))
        file, page = tmp_path / "penstock.toml", tmp_path / "report.html"
        file.write_text(f'{CONFIG}[[upstreams]]\nnetwork = "dev/mainnet"\nurl = "{geth[0].url}"\nname = "old"\n')
        words = ["upstreams", "certify", geth[1].url, "--against", "old", "--reads", "1200", "--html", str(page)]
        code = await asyncio.to_thread(main, [*words, "--config", str(file)])
        printed = capsys.readouterr().out
        for node in geth:
            await node.follow(BASE)
    assert code == (0 if is_right else 1), printed
    assert ("safe to promote: " if is_right else "do not promote: ") in printed
    report = html.unescape(page.read_text())
    assert f'<p class="verdict{" safe" * is_right}">{printed.splitlines()[-1].partition(": ")[2]}</p>' in report
    assert ("<td class=bad>" in report) is not is_right


def test_certify_names_what_to_compare_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(f'{CONFIG}[[upstreams]]\nnetwork = "ethereum/mainnet"\nurl = "http://127.0.0.1:1"\nname = "old"\n')
    words = ["upstreams", "certify", "http://127.0.0.1:2", "--config", str(file)]
    assert main([*words, "--against", "other"]) == 2
    assert "use --against with one of: old" in capsys.readouterr().err
    assert main([*words, "--reads", "0"]) != 0
    assert "--reads must be between 1 and 100000" in capsys.readouterr().err
    assert main(words) == 2
    assert "does not answer" in capsys.readouterr().err
