"""REST resources that call upstreams: one account's flood of them takes no upstream from another account's reads."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.contract_upstreams import Machine
from tests.http_client import HttpClient, Reply, request
from tests.isolation.limited_upstream import CAPACITY, LimitedUpstream
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.service import until
from tests.web.worker import on_uvloop

# The attacker sends four times as many requests as the upstream can answer, each of which makes one call.
SERVICE_S = 0.5
FLOOD = 16 * CAPACITY
EVERY_S = 2.0
READS = 10

_serial = itertools.count(1)


async def read_metadata(harness: RpcHarness, client: HttpClient, key: str = "main") -> Reply:
    """Read the metadata of a contract that does not exist, and was never asked for before."""
    path = f"/v1/tokens/ethereum/metadata/0x{next(_serial):040x}"
    return await client.send(request("GET", path, key=harness.worker.keys[key]))


@asynccontextmanager
async def flood_of(harness: RpcHarness, key: str) -> AsyncIterator[Counter[int]]:
    statuses: Counter[int] = Counter()
    ended = asyncio.Event()

    async def flood() -> None:
        async with await harness.worker.connect() as client:
            while not ended.is_set():
                statuses[(await read_metadata(harness, client, key)).status] += 1
                await asyncio.sleep(EVERY_S)

    async with asyncio.TaskGroup() as group:
        for _ in range(FLOOD):
            group.create_task(flood())
        yield statuses
        ended.set()


@on_uvloop
async def test_flood_of_rest_reads_of_one_account_fails_no_read_of_another() -> None:
    async with (
        rpc_harness(1, kind=LimitedUpstream, options=[{"connections": CAPACITY}]) as harness,
        await harness.worker.connect() as client,
    ):
        upstream = harness.upstreams[0]
        assert isinstance(upstream, LimitedUpstream)
        upstream.service_s = SERVICE_S
        upstream.answers["eth_call"] = Machine().call
        harness.worker.add_key("flooding")
        async with flood_of(harness, "flooding") as statuses:
            await until(lambda: statuses[503] > 0, within_s=20.0)
            seen = Counter([(await read_metadata(harness, client)).status for _ in range(READS)])
        assert seen == {404: READS}, (seen, statuses)
