"""Solana topics that are polled: those of one account delay no other's, and the accounts that listen pay for the polls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from solders.pubkey import Pubkey

from proxy.core.access import Key, Limits
from proxy.services.feed import svm_poller
from tests.feed_upstreams import FeedHarness, feed_harness
from tests.flows.test_solana_polling import BASE64, SOLANA, Polled, SlotUpstream
from tests.service import until
from tests.sockets import SocketClient, connected
from tests.svm_upstreams import PAYEE, SvmChain
from tests.web.worker import on_uvloop

FREE = Limits(10, 200, 100_000)
# The list prices of polls, from config/methods.
PRICES = {"getProgramAccounts": 20, "getMultipleAccounts": 3, "getSignatureStatuses": 2, "getSignaturesForAddress": 4}


class SlowPrograms(SlotUpstream):
    """Scans of programs hang until `go` is set."""

    go: asyncio.Event | None = None

    async def _reply(self, call: dict[str, Any]) -> dict[str, Any]:
        if self.go is not None and call["method"] == "getProgramAccounts":
            await self.go.wait()
        return await super()._reply(call)


@asynccontextmanager
async def polled() -> AsyncIterator[Polled]:
    chain = SvmChain(lands_ahead=True, lead=4)
    async with (
        feed_harness(["http"], kind=SlowPrograms, chain=chain, network=SOLANA) as harness,
        asyncio.TaskGroup() as group,
    ):
        polling = Polled(harness, chain)
        task = group.create_task(polling.keep_going())
        try:
            yield polling
        finally:
            task.cancel()


def add_key(harness: FeedHarness, name: str) -> Key:
    return harness.worker.add_key(name, limits=FREE)


async def watch_programs(client: SocketClient, count: int) -> None:
    """Subscribe to so many programs, each when the rate limit allows it, without a wait for the confirmations."""
    for number in range(count):
        program = str(Pubkey(bytes([7, number % 256]) + bytes(30)))
        call = {"jsonrpc": "2.0", "id": number, "method": "programSubscribe", "params": [program, BASE64]}
        await client.send(call)
        await asyncio.sleep(0.1)


@on_uvloop
async def test_slow_polls_of_one_account_do_not_delay_those_of_another() -> None:
    async with polled() as polling:
        harness = polling.harness
        add_key(harness, "free")
        upstream = harness.upstreams[0]
        assert isinstance(upstream, SlowPrograms)
        upstream.go = asyncio.Event()
        try:
            async with (
                connected(harness.worker, key="free", network=SOLANA) as attacker,
                connected(harness.worker, network=SOLANA) as good,
            ):
                await watch_programs(attacker, 25)
                await good.result("accountSubscribe", str(PAYEE), BASE64)
                await polling.send(2_000_000)
                async with asyncio.timeout(45):
                    assert (await good.event())["result"]["value"]["lamports"] == 2_000_000
        finally:
            upstream.go.set()


def list_price(harness: FeedHarness) -> int:
    return sum(harness.count(method) * price for method, price in PRICES.items())


@on_uvloop
async def test_polls_are_paid_for_as_they_are_made() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(svm_poller, "PROGRAM_POLL_S", 0.05)
        async with polled() as polling:
            harness = polling.harness
            key = add_key(harness, "free")
            async with connected(harness.worker, key="free", network=SOLANA) as attacker:
                began = time.monotonic()
                await watch_programs(attacker, 20)
                while (took_s := time.monotonic() - began) < 6:
                    await asyncio.sleep(0.1)
                    assert list_price(harness) <= FREE.units_per_second * (took_s + 2)
                charged = sum(tally.units for tally in key.tallies.values())
                assert charged >= list_price(harness) - FREE.units_per_second


@on_uvloop
async def test_accounts_that_listen_to_the_same_topic_pay_in_turn() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(svm_poller, "PROGRAM_POLL_S", 0.05)
        async with polled() as polling:
            harness = polling.harness
            keys = [add_key(harness, name) for name in ("one", "two")]
            async with (
                connected(harness.worker, key="one", network=SOLANA) as one,
                connected(harness.worker, key="two", network=SOLANA) as two,
            ):
                await one.result("programSubscribe", str(PAYEE), BASE64)
                await two.result("programSubscribe", str(PAYEE), BASE64)
                start = harness.count("getProgramAccounts")
                await until(lambda: harness.count("getProgramAccounts") >= start + 10)
                tally = harness.worker.app.networks.routes[SOLANA].policies["getProgramAccounts"].tally
                paid = [key.tallies[tally].units for key in keys]
                assert min(paid) >= 4 * PRICES["getProgramAccounts"]
                assert sum(paid) <= (harness.count("getProgramAccounts") + 1) * PRICES["getProgramAccounts"]
