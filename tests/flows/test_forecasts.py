"""Recorded calls, priced as at another provider, compared with its bill for the same calls."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import orjson
import pytest

from proxy.__main__ import main
from tests.budget_hosts import hosts
from tests.database import MIGRATED, Server
from tests.metered_calls import one_of
from tests.metering_upstream import MeteringUpstream, billing_by
from tests.rpc_harness import RpcHarness
from tests.rpc_upstreams import Chain, scripted
from tests.service import until
from tests.web.worker import LIVE, Worker

CALLS = 600


async def load(worker: Worker, chain: Chain, stub: MeteringUpstream) -> int:
    """The same mixed load each time. Returns what the provider bills for it."""
    harness, draw = RpcHarness(worker, chain, [stub], LIVE), random.Random(39)
    for _ in range(CALLS):
        await one_of(harness, draw)
        chain.head += draw.random() < 0.02
    await until(lambda: not any(each.health.inflight for each in harness.route.upstreams))
    return stub.billed


@pytest.mark.parametrize("provider", ["infura", "quicknode", "drpc"])
async def test_forecast_of_another_provider_is_what_it_bills(
    server: Server, provider: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    billed, forecast = 0, 0
    for name in (provider, "alchemy"):
        chain = Chain()
        database = await server.create(MIGRATED)
        async with scripted(1, chain, billing_by(name)) as (stub,):
            assert isinstance(stub, MeteringUpstream)
            async with hosts(server, 1, [{"url": stub.url, "cost": name}], name=database) as (worker,):
                spent = await load(worker, chain, stub)
                if name == provider:
                    billed = spent
                    continue
                await worker.app.spending.flush()
                file = tmp_path / "penstock.toml"
                file.write_text(f'database.url = "{server.url(database)}"\nkeys.pepper = "{"p" * 40}"\n')
                words = ["cost", "--as", provider, "--price", "1", "--days", "1", "--json", "--config", str(file)]
                assert await asyncio.to_thread(main, words) == 0
                (whole,) = [each for each in orjson.loads(capsys.readouterr().out) if each["network"] == "all"]
                forecast = whole["credits"]
    assert billed > 10_000
    assert forecast == pytest.approx(billed, rel=0.02)
