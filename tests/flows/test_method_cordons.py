"""An operator takes one method of an upstream out of use: its other calls stay there."""

from __future__ import annotations

import asyncio

import pytest

from proxy.store.postgres.fleet import FleetStore
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.web.worker import on_uvloop

ADDRESS = "0x" + 40 * "1"


async def asked(harness: RpcHarness, method: str) -> list[int]:
    """How many of calls at the same time each upstream got: one by one, all might go to the faster of two."""
    before = [each.count(method) for each in harness.upstreams]
    await asyncio.gather(*(harness.result(method, [f"0x{number:040x}", hex(900)]) for number in range(40)))
    return [each.count(method) - earlier for each, earlier in zip(harness.upstreams, before, strict=True)]


@pytest.mark.parametrize("count", [1, 2])
def test_calls_of_a_cordoned_method_go_elsewhere(database: str, count: int) -> None:
    @on_uvloop
    async def main() -> None:
        async with rpc_harness(count, cache={"enabled": False}, database={"url": database}) as harness:
            app = harness.worker.app
            await app.pool.open()
            store, cordons = FleetStore(app.pool), app.dashboard.cordons
            health = harness.route.upstreams[0].health
            await store.cordon_method(health.upstream_id, "eth_getCode", label=health.label, reason="", by="ops")
            await cordons.refresh()
            assert (await asked(harness, "eth_getBalance"))[0] > 0
            if count == 1:
                assert (await harness.call("eth_getCode", [ADDRESS, hex(900)])).status == 503
            else:
                assert await asked(harness, "eth_getCode") == [0, 40]
            await store.uncordon_method(health.upstream_id, "eth_getCode")
            await cordons.refresh()
            assert (await asked(harness, "eth_getCode"))[0] > 0
            health.refresh(1e9)
            assert health.free, "the short path is open again"

    main()
