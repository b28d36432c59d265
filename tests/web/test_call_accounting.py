"""However a call arrives, it ends in the same way: counted and charged once, logged and recorded."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from aiohttp import web

from proxy.telemetry import AccessLines
from tests.http_client import rpc
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import Refused
from tests.sockets import bare
from tests.web.worker import LIVE, NO_CACHE, on_uvloop

RESULT, ERROR, FAULT, UNKNOWN = "eth_gasPrice", "eth_call", "eth_estimateGas", "eth_nothing"
PARAMS: dict[str, list[Any]] = {ERROR: [{"to": "0x" + "11" * 20}, "latest"], FAULT: [{"to": "0x" + "11" * 20}]}
DIRECTIVES: dict[str, Any] = {"X_Retry": "0", "X_Explain": "1"}
BODIES = [
    *(rpc(method, PARAMS.get(method, [])) for method in (RESULT, ERROR, FAULT, UNKNOWN)),
    b"[%b]" % b",".join(rpc(method, PARAMS.get(method, [])) for method in (RESULT, ERROR, FAULT, UNKNOWN)),
]
# aiohttp serves requests of web pages.
HTTP: dict[str, dict[str, str]] = {"front": {}, "aiohttp": {"Origin": "https://app.example.com"}}


def _refuse(params: list[Any]) -> Any:
    raise Refused(3, "execution reverted")


def _break(params: list[Any]) -> Any:
    raise web.HTTPInternalServerError


async def _send_all(harness: RpcHarness, surface: str) -> None:
    if surface in HTTP:
        for body in BODIES:
            await harness.worker.send(body, **DIRECTIVES, **HTTP[surface])
        return
    async with bare(harness.worker, **DIRECTIVES) as socket:
        for body in BODIES:
            socket.write(body)
            await socket.json()


@pytest.mark.parametrize("surface", [*HTTP, "socket"])
def test_call_ends_once_on_every_surface(surface: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(AccessLines, "add", lambda self, line: lines.append(orjson.loads(line)))
    monkeypatch.setattr(AccessLines, "flush", lambda self: None)

    @on_uvloop
    async def main() -> None:
        async with rpc_harness(1, log={"access": True}, **NO_CACHE) as harness:
            harness.upstreams[0].answers[ERROR] = _refuse
            harness.upstreams[0].answers[FAULT] = _break
            await _send_all(harness, surface)
            harness.worker.app.usage.gather()
            policies = {**harness.route.policies, "other": harness.route.unknown}
            costs = {RESULT: policies[RESULT].units, ERROR: policies[ERROR].units, FAULT: 0, "other": 1}
            tallies = [policies[method].tally for method in costs]
            # One of each came alone, and one in a batch.
            outcomes = [(2, 0, 0), (0, 2, 0), (0, 0, 2), (0, 2, 0)]
            assert [(each.results, each.errors, each.faults) for each in tallies] == outcomes
            assert [each.units for each in tallies] == [2 * units for units in costs.values()]
            own = "socket" if surface == "socket" else "http"
            records = [(each.surface, each.method, each.units) for each in harness.worker.app.recorder.waiting]
            assert records[: len(costs)] == [(own, method, units) for method, units in costs.items()]
            assert records[len(costs)] == ("batch", "batch", sum(costs.values()))
            failed = [("item", method, units) for method, units in costs.items() if method != RESULT]
            assert records[len(costs) + 1 :] == failed
            if surface != "aiohttp":  # The middleware logs its requests, with their paths.
                assert [(line["method"], line["units"]) for line in lines[:-1]] == [*costs.items()]
                assert (lines[-1]["network"], lines[-1]["units"]) == (LIVE, sum(costs.values()))

    main()


@pytest.mark.parametrize("surface", [*HTTP, "socket"])
def test_call_that_passes_its_own_deadline_is_counted_as_paid(surface: str) -> None:
    """Upstreams were asked, so it is not refunded: the records, the usage and the bucket say the same."""
    directives: dict[str, Any] = {"X_Timeout_Ms": "100", "X_Explain": "1"}
    bodies = [rpc(RESULT, []), b"[%b]" % rpc(RESULT, [])]

    @on_uvloop
    async def main() -> None:
        async with rpc_harness(1, **NO_CACHE) as harness:
            harness.upstreams[0].held.add(RESULT)
            if surface in HTTP:
                for body in bodies:
                    await harness.worker.send(body, **directives, **HTTP[surface])
            else:
                async with bare(harness.worker, **directives) as socket:
                    for body in bodies:
                        socket.write(body)
                        await socket.json()
            harness.worker.app.usage.gather()
            policy = harness.route.policies[RESULT]
            assert (policy.tally.faults, policy.tally.units) == (2, 2 * policy.units)
            records = harness.worker.app.recorder.waiting
            assert [each.units for each in records] == [policy.units] * len(records)

    main()
