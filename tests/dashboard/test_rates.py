"""Requests with a session are limited for each person, account and address; another person is not affected."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest
from aiohttp import web

from proxy.core.access import client_prefix_of
from proxy.errors import RateLimited
from proxy.services.accounts.session_rates import HOLDS_S, SHARED, SessionRates
from proxy.store.postgres.keys import LimitChange
from proxy.store.shared_memory import host_memory
from proxy.store.shared_memory.host_memory import HostMemory
from tests.dashboard.service import Client, DashboardService
from tests.flows.upstream import echo, reply
from tests.service import until

AT_ONCE = 64
PER_SECOND = 20.0
BURST = int(PER_SECOND * HOLDS_S)


@pytest.fixture
def rates() -> SessionRates:
    return SessionRates(PER_SECOND, HostMemory(host_memory.create()).addresses)


def admitted(rates: SessionRates, people: list[tuple[str, str]], now: float, *, reads: int = 1) -> int:
    """How many requests of these people, with their accounts, in turn, are admitted at this moment."""
    for count, (person, account) in enumerate(itertools.cycle(people)):
        try:
            rates.charge_person(person, account, now, reads=reads)
        except RateLimited:
            return count
    raise AssertionError


def test_person_has_a_burst_and_then_the_rate(rates: SessionRates) -> None:
    assert admitted(rates, [("a", "acc")], 1000.0) == BURST
    assert admitted(rates, [("a", "acc")], 1001.0) == PER_SECOND
    assert admitted(rates, [("b", "other")], 1001.0) == BURST


def test_each_part_of_a_page_counts(rates: SessionRates) -> None:
    assert admitted(rates, [("a", "acc")], 1000.0, reads=10) == BURST // 10
    # A page with more parts than a bucket holds is still possible.
    assert admitted(rates, [("b", "other")], 1000.0, reads=10 * BURST) == 1


def test_people_of_an_account_share_its_rate(rates: SessionRates) -> None:
    people = [(f"person {number}", "acc") for number in range(50)]
    assert admitted(rates, people, 1000.0) == SHARED * BURST


def test_address_is_charged_before_its_session_is_known(rates: SessionRates) -> None:
    for number in range(SHARED * BURST):
        rates.charge_address(f"2001:db8::{number:x}", 1000.0)
    with pytest.raises(RateLimited):
        rates.charge_address("2001:db8::ffff", 1000.0)
    assert client_prefix_of("2001:db8:0:1::1") != client_prefix_of("2001:db8::1")
    rates.charge_address("2001:db8:0:1::1", 1000.0)


async def test_flood_of_one_person_is_refused_and_another_person_is_served(service: DashboardService) -> None:
    flooding, other = await service.holder(), await service.holder()

    async def read(client: Client) -> int:
        reply = await client.get("/account/reads?paths=/keys,/usage,/keys,/keys")
        if reply.status == 429:
            assert int(reply.headers["Retry-After"]) >= 1
        return reply.status

    statuses, began_s = [], time.monotonic()
    for _ in range(3):
        statuses += await asyncio.gather(*(read(flooding) for _ in range(AT_ONCE)))
        assert await read(other) == 200
    assert set(statuses) == {200, 429}
    # Each request reads four parts.
    assert 4 * statuses.count(200) <= BURST + PER_SECOND * (time.monotonic() - began_s) + 4


async def test_account_pays_for_the_upstream_calls_of_a_back_test_with_a_session(service: DashboardService) -> None:
    """The reading of logs costs 8 units, which an account with 5 a second can never pay for."""
    account = await service.account(plan="free")
    holder = await service.holder(account)
    config = {"contracts": ["0x" + "ab" * 20]}
    body = {
        "chain": "ethereum-sepolia",
        "event_type": "token_transfer",
        "config": config,
        "from_block": 0,
        "to_block": 1,
    }
    for upstream in service.upstreams:
        upstream.act = no_logs
    try:
        paid = await holder.post("/account/webhooks/backtest", body)
        assert (paid.status, paid.data["events"]) == (200, 0)
        await service.keys.update_account(account["id"], own=LimitChange(units_per_second=5))
        refused = await holder.post("/account/webhooks/backtest", body)
        assert "compute units can never fit the limit" in refused.fault(400)
    finally:
        for upstream in service.upstreams:
            upstream.act = echo
    # It is in the account's usage, as units without a request.
    await until(lambda: is_in_usage(holder, paid=8), every_s=0.2)
    # What calls no upstream costs nothing.
    for _ in range(10):
        assert (await holder.get("/account/webhooks")).status == 200


async def is_in_usage(holder: Client, *, paid: int) -> bool:
    totals = (await holder.get("/account/usage?by=method")).data["totals"]
    return bool(totals["units"] >= paid and totals["requests"] == 0)


async def no_logs(call: dict[str, object]) -> web.StreamResponse:
    return reply(call, result=[])
