"""REST operations pay for the upstream calls that they make, beyond those that their price covers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from proxy.chains.evm.address import checksum
from proxy.core.access import Limits
from tests.contract_upstreams import Machine
from tests.http_client import Reply, request
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import Refused
from tests.service import until
from tests.shipped_tables import TABLES
from tests.web.worker import LIVE, on_uvloop

PRICE = TABLES.prices.rest["read_token_metadata"]
CALL = TABLES.methods["evm"]["eth_call"].price
FREE = Limits(10, 200, 100_000)
# The calls that the metadata of a token takes without Multicall3.
CALLS = 5


def token(number: int) -> bytes:
    return (0xC000 + number).to_bytes(20, "big")


@asynccontextmanager
async def one_by_one() -> AsyncIterator[tuple[RpcHarness, Machine]]:
    """A network whose contracts have to be read one by one."""
    machine = Machine()

    def call(params: list[dict[str, str]]) -> object:
        if params[0]["to"].lower().startswith("0xca11bde0"):
            return "0x"
        return machine.call(params)

    async with rpc_harness(1, network=LIVE) as harness:
        harness.upstreams[0].answers["eth_call"] = call
        harness.worker.add_key("free", limits=FREE)
        yield harness, machine


async def metadata(harness: RpcHarness, number: int, key: str = "main") -> Reply:
    path = f"/v1/tokens/ethereum/metadata/{checksum(token(number))}"
    async with await harness.worker.connect() as client:
        return await client.send(request("GET", path, key=harness.worker.keys[key]))


def counted(harness: RpcHarness) -> int:
    """The units of the operation, as usage counts them."""
    app = harness.worker.app
    keys = [key for text in harness.worker.keys.values() if (key := app.keyring.find(text, time.monotonic()))]
    return sum(app.usage.of_operation(key, LIVE, "read_token_metadata").units for key in keys)


@on_uvloop
async def test_operation_pays_for_the_calls_beyond_its_price() -> None:
    async with one_by_one() as (harness, machine):
        machine.token(token(1), 1, "Coin", "C", 18)
        reply = await metadata(harness, 1)
        assert reply.status == 200, reply
        made = harness.count("eth_call")
        assert made == 1 + CALLS
        assert int(reply.headers["x-compute-units"]) == made * CALL
        assert counted(harness) == made * CALL
        again = await metadata(harness, 1)
        assert int(again.headers["x-compute-units"]) == PRICE  # It is cached, so no call was made.


@on_uvloop
async def test_operations_of_one_account_make_no_more_calls_than_it_pays_for() -> None:
    async with one_by_one() as (harness, machine):
        for n in range(60):
            machine.token(token(n), 1, "Coin", "C", 18)
        began = time.monotonic()
        replies = [reply for n in range(60) if (reply := await metadata(harness, n, "free")).status == 200]
        took_s = time.monotonic() - began
        assert replies
        assert harness.count("eth_call") * CALL <= FREE.units_per_second * (1 + took_s)


@on_uvloop
async def test_failed_operation_keeps_the_price_of_the_calls_that_were_made() -> None:
    def refuse(_: object) -> object:
        raise Refused(-32000, "missing trie node")

    async with one_by_one() as (harness, machine):
        key = harness.worker.add_key("small", limits=Limits(100, 100, 0))
        assert (await metadata(harness, 1, "small")).status == 404  # There is no token.
        assert counted(harness) == harness.count("eth_call") * CALL
        before = harness.count("eth_call"), counted(harness)
        machine.token(token(2), 1, "Coin", "C", 18)
        harness.upstreams[0].answers["eth_call"] = refuse
        await asyncio.sleep(1.0)
        reply = await metadata(harness, 2, "small")
        assert reply.status == 503
        assert counted(harness) - before[1] == (harness.count("eth_call") - before[0]) * CALL
        assert harness.worker.app.admission.charge(key, 0, 100, time.monotonic()) is not None


@on_uvloop
async def test_account_without_units_fails_no_read_of_another() -> None:
    async with one_by_one() as (harness, machine):
        machine.token(token(1), 1, "Coin", "C", 18)
        harness.worker.add_key("poor", limits=Limits(10, 3, 0))
        poor = asyncio.get_running_loop().create_task(metadata(harness, 1, "poor"))
        await until(lambda: harness.count("eth_call") > 0)
        assert (await metadata(harness, 1)).status == 200
        poor.cancel()
