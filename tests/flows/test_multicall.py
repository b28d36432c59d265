"""Multicall: many contracts read in few calls at one block, whatever one of them does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from proxy.chains.evm import abi
from proxy.chains.registry import Network
from proxy.errors import Fault, InternalError, Unavailable
from proxy.services.multicall import MOST, Multicall
from tests.contract_upstreams import CALL_GAS, Machine, Reverted, answering, burning
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import Refused
from tests.shipped_tables import TABLES
from tests.web.worker import on_uvloop

BALANCE = abi.call("balanceOf(address)", b"\x0a" * 20)
ETHEREUM = TABLES.chains.find("ethereum", "mainnet")
assert ETHEREUM is not None


def contract(number: int) -> bytes:
    return number.to_bytes(20, "big")


def calls(count: int, start: int = 1) -> list[tuple[bytes, bytes]]:
    return [(contract(n), BALANCE) for n in range(start, start + count)]


def numbers(found: list[bytes | None]) -> list[int | None]:
    return [abi.uint(each) for each in found]


@asynccontextmanager
async def reading(
    machine: Machine, count: int = 1, **options: Any
) -> AsyncIterator[tuple[RpcHarness, Multicall, Network]]:
    async with rpc_harness(count, **options) as harness:
        for each in harness.upstreams:
            each.answers["eth_call"] = machine.call
        assert ETHEREUM is not None
        yield harness, harness.worker.app.data.multicall, ETHEREUM


def machine_with(count: int) -> Machine:
    machine = Machine()
    for n in range(1, count + 1):
        machine.token(contract(n), n)
    return machine


@on_uvloop
async def test_five_hundred_contracts_are_read_by_one_call_at_one_block() -> None:
    machine = machine_with(500)
    async with reading(machine) as (harness, multicall, network):
        assert numbers(await multicall.read(network, calls(500))) == list(range(1, 501))
        assert (machine.sizes, machine.blocks) == ([500], [hex(harness.chain.head)])


@on_uvloop
async def test_too_many_calls_are_read_in_parts_at_one_block() -> None:
    machine = machine_with(MOST + 10)
    async with reading(machine) as (_, multicall, network):
        assert numbers(await multicall.read(network, calls(MOST + 10), block=7)) == list(range(1, MOST + 11))
        assert (sorted(machine.sizes), machine.blocks) == ([MOST // 2 + 5] * 2, ["0x7"] * 2)


@on_uvloop
async def test_empty_read_takes_no_call() -> None:
    machine = Machine()
    async with reading(machine) as (_, multicall, network):
        assert await multicall.read(network, []) == []
        assert machine.sizes == []


@pytest.mark.parametrize("hostile", [1, 3])
@on_uvloop
async def test_contracts_that_burn_all_gas_do_not_affect_others(hostile: int) -> None:
    machine = machine_with(40)
    for n in range(1, hostile + 1):
        machine.contracts[contract(n)] = burning
    async with reading(machine) as (_, multicall, network):
        found = numbers(await multicall.read(network, calls(40)))
        assert found == [None] * hostile + list(range(hostile + 1, 41))


@on_uvloop
async def test_reverting_and_absent_contracts_are_none_and_do_not_affect_others() -> None:
    machine = machine_with(6)
    machine.contracts[contract(1)] = answering({})
    machine.contracts[contract(2)] = answering({BALANCE[:4]: Reverted(b"no")})
    machine.contracts[contract(3)] = answering({BALANCE[:4]: b"short"})
    del machine.contracts[contract(4)]
    async with reading(machine) as (_, multicall, network):
        assert numbers(await multicall.read(network, calls(6))) == [None, None, None, None, 5, 6]
        # Only the one that failed without return data was retried.
        assert machine.sizes == [6, 1]


@pytest.mark.parametrize("limit", [{"gas": 200 * (CALL_GAS + 1_000)}, {"largest": 20_000}])
@on_uvloop
async def test_calls_that_exceed_a_limit_together_are_read_in_halves(limit: dict[str, int]) -> None:
    machine = machine_with(500)
    for name, value in limit.items():
        setattr(machine, name, value)
    async with reading(machine) as (_, multicall, network):
        assert numbers(await multicall.read(network, calls(500))) == list(range(1, 501))
        assert machine.sizes[:2] == [500, 250]


@on_uvloop
async def test_contract_that_returns_megabytes_fails_alone() -> None:
    machine = machine_with(200)
    machine.contracts[contract(1)] = lambda _: (bytes(1 << 20), CALL_GAS)
    machine.largest = 1 << 19
    async with reading(machine) as (_, multicall, network):
        assert numbers(await multicall.read(network, calls(200))) == [None, *range(2, 201)]


@on_uvloop
async def test_without_multicall_single_calls_are_batched_into_few_requests() -> None:
    machine = machine_with(60)
    machine.has_multicall = False
    async with reading(machine) as (harness, multicall, network):
        assert numbers(await multicall.read(network, calls(60))) == list(range(1, 61))
        before = harness.upstreams[0].requests
        assert numbers(await multicall.read(network, calls(60), block=999)) == list(range(1, 61))
        assert harness.upstreams[0].requests - before == 3  # Multicall3 is not looked for again


def refuse(code: int, message: str) -> Callable[[list[Any]], Any]:
    def act(_: list[Any]) -> Any:
        raise Refused(code, message)

    return act


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (-32000, "header not found"),
        (-32005, "limit exceeded"),
        (-32603, "internal error"),
        (-32601, "the method eth_call does not exist"),
        (-32000, "unauthorized"),
    ],
)
@on_uvloop
async def test_unreadable_network_is_an_error_and_not_an_empty_result(code: int, message: str) -> None:
    machine = machine_with(5)
    async with reading(machine) as (harness, multicall, network):
        harness.upstreams[0].answers["eth_call"] = refuse(code, message)
        for count in (5, MOST + 10):
            with pytest.raises(Unavailable):
                await multicall.read(network, calls(count))
        machine.has_multicall = False
        with pytest.raises(Unavailable):
            await multicall.read(network, calls(5), block=1)


@on_uvloop
async def test_dead_upstream_is_an_error_and_not_an_empty_result() -> None:
    async with reading(Machine(), faults=True) as (harness, multicall, network):
        await harness.proxies[0].switch("dead")
        with pytest.raises(Fault) as raised:
            await multicall.read(network, calls(5))
        assert isinstance(raised.value, InternalError)


@on_uvloop
async def test_upstream_behind_the_block_is_not_used() -> None:
    machine = machine_with(5)
    async with reading(machine, 2) as (harness, multicall, network):
        behind = harness.upstreams[0]
        behind.behind = 1
        behind.answers["eth_call"] = refuse(-32000, "header not found")
        await harness.look()
        for _ in range(4):
            assert numbers(await multicall.read(network, calls(5))) == [1, 2, 3, 4, 5]
