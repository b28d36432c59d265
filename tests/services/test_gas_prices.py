"""GasPrices: one estimate per head, the same in every worker, and served with its true time while the chain is unavailable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from proxy.chains.evm import fees
from proxy.errors import NotFound, Unavailable
from proxy.services.gas import RENEW_S, STALE_S, GasPrices
from proxy.services.rpc.internal_calls import InternalCalls
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import Refused
from tests.service import until
from tests.shipped_tables import TABLES

GWEI = 10**9


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def harness() -> AsyncIterator[RpcHarness]:
    async with rpc_harness(1, cache={"enabled": False, "coalesce": False}) as one:
        one.upstreams[0].answers["eth_feeHistory"] = history
        yield one


@pytest.fixture
def clock() -> Clock:
    return Clock()


def history(params: list[Any]) -> dict[str, Any]:
    """A fee history in which the base fee of a block is its number in gwei."""
    count, newest = int(params[0], 16), int(params[1], 16)
    blocks = range(newest - count + 1, newest + 2)
    return {
        "oldestBlock": hex(blocks[0]),
        "baseFeePerGas": [hex(number * GWEI) for number in blocks],
        "gasUsedRatio": [0.5] * count,
        "reward": [[hex(GWEI), hex(2 * GWEI), hex(3 * GWEI)]] * count,
    }


def prices(one: RpcHarness, clock: Clock) -> GasPrices:
    app = one.worker.app
    return GasPrices(InternalCalls(app.rpc.forwarder, app.networks), clock=clock, wall=clock)


async def test_estimate_is_computed_once_for_each_head(harness: RpcHarness, clock: Clock) -> None:
    gas, network = prices(harness, clock), harness.route.network
    read = await gas.read(network)
    assert (read.fees.block, fees.gwei(read.fees.base_fee_wei), read.at) == (1000, "1001", clock.now)
    clock.now += RENEW_S / 2
    assert await gas.read(network) is read
    assert harness.count("eth_feeHistory") == 1
    harness.chain.head += 1
    await harness.look()
    assert (await gas.read(network)).fees.block == 1001
    assert harness.count("eth_feeHistory") == 2


async def test_estimate_is_renewed_when_the_newest_block_is_replaced(harness: RpcHarness, clock: Clock) -> None:
    gas, network = prices(harness, clock), harness.route.network
    await gas.read(network)
    harness.chain.reorganise(1)
    await harness.look()
    await gas.read(network)
    assert harness.count("eth_feeHistory") == 2


async def test_estimate_is_renewed_after_a_while_if_the_head_does_not_move(harness: RpcHarness, clock: Clock) -> None:
    gas, network = prices(harness, clock), harness.route.network
    await gas.read(network)
    clock.now += RENEW_S
    assert (await gas.read(network)).at == clock.now
    assert harness.count("eth_feeHistory") == 2


async def test_concurrent_requests_share_one_upstream_call(harness: RpcHarness, clock: Clock) -> None:
    gas, network = prices(harness, clock), harness.route.network
    read = await asyncio.gather(*(gas.read(network) for _ in range(50)))
    assert all(each is read[0] for each in read)
    assert harness.count("eth_feeHistory") == 1


async def test_cancelled_request_does_not_fail_the_others(harness: RpcHarness, clock: Clock) -> None:
    gas, network = prices(harness, clock), harness.route.network
    upstream = harness.upstreams[0]
    upstream.held.add("eth_feeHistory")
    async with asyncio.TaskGroup() as group:
        first = group.create_task(gas.read(network))
        others = [group.create_task(gas.read(network)) for _ in range(5)]
        await until(lambda: upstream.count("eth_feeHistory") > 0)
        first.cancel()
        upstream.gate.set()
    assert {task.result().fees.block for task in others} == {1000}


async def test_two_workers_return_the_same_fees(harness: RpcHarness, clock: Clock) -> None:
    one, other = prices(harness, clock), prices(harness, clock)
    first = await one.read(harness.route.network)
    clock.now += 3
    assert (await other.read(harness.route.network)).fees == first.fees


async def test_last_good_estimate_is_served_for_a_minute_with_its_true_time(harness: RpcHarness, clock: Clock) -> None:
    gas, network = prices(harness, clock), harness.route.network

    def fail(params: list[Any]) -> Any:
        raise Refused(-32000, "not now")

    read = await gas.read(network)
    harness.upstreams[0].answers["eth_feeHistory"] = fail
    harness.chain.head += 1
    await harness.look()
    for _ in range(6):
        clock.now += STALE_S / 6
        assert await gas.read(network) is read
    clock.now += 0.1
    with pytest.raises(Unavailable):
        await gas.read(network)
    harness.upstreams[0].answers["eth_feeHistory"] = history
    clock.now += 2
    assert (await gas.read(network)).fees.block == 1001


async def test_failed_read_is_not_repeated_at_once(harness: RpcHarness, clock: Clock) -> None:
    gas, network = prices(harness, clock), harness.route.network
    await gas.read(network)
    harness.upstreams[0].answers["eth_feeHistory"] = lambda params: "nonsense"
    harness.chain.head += 1
    await harness.look()
    for _ in range(20):
        await gas.read(network)
    assert harness.count("eth_feeHistory") == 2


async def test_chain_without_base_fee_uses_its_gas_price(harness: RpcHarness, clock: Clock) -> None:
    known = harness.route.network
    network = replace(known, facts=msgspec.structs.replace(known.facts, legacy_fees=True))
    harness.upstreams[0].answers["eth_gasPrice"] = lambda params: hex(5 * GWEI)
    read = await prices(harness, clock).read(network)
    assert (read.fees.block, read.fees.base_fee_wei) == (1000, 0)
    assert read.fees.estimates["standard"].max_fee_wei == 5 * GWEI
    assert harness.count("eth_feeHistory") == 0


async def test_family_without_gas_has_no_gas_prices(harness: RpcHarness, clock: Clock) -> None:
    network = TABLES.chains.find("solana", "mainnet")
    assert network is not None
    with pytest.raises(NotFound, match="gas"):
        await prices(harness, clock).read(network)
