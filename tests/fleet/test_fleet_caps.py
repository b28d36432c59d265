"""Numbers of sockets and failed authentications over three hosts that share a Redis."""

from __future__ import annotations

import itertools
from contextlib import AsyncExitStack

from tests.fleet.gateways import FAILURES, SEPOLIA, Fleet, open_socket
from tests.http_client import HttpClient, fresh_call, post
from tests.service import until

# Limits of the free plan.
SOCKETS = 20


async def test_sockets_of_an_account_are_counted_over_all_hosts(fleet: Fleet) -> None:
    key = await fleet.key("free")
    refused = 0
    async with AsyncExitStack() as opened:
        for number in range(2 * SOCKETS):
            client = await HttpClient.open(fleet.gateways.hosts[number % 3].port)
            await opened.enter_async_context(client)
            refused += (await open_socket(client, key)).status == 429
        # While Redis is late on a busy machine, each host has a third of the limit, rounded up.
        assert SOCKETS - 1 <= 2 * SOCKETS - refused <= SOCKETS + 3

    async def opens() -> bool:
        async with await HttpClient.open(fleet.gateways.hosts[0].port) as client:
            return (await open_socket(client, key)).status == 101

    await until(opens)


async def test_failed_authentications_on_one_host_count_on_the_others(fleet: Fleet) -> None:
    wrong = post(fresh_call(), key="svc_live_wrong", network=SEPOLIA)
    async with AsyncExitStack() as opened:
        first, *others = [
            await opened.enter_async_context(await HttpClient.open(host.port)) for host in fleet.gateways.hosts
        ]
        for _ in range(FAILURES):
            await first.send(wrong)

        tries = itertools.count(1)

        async def is_refused() -> int:
            number = next(tries)
            return number if [(await client.send(wrong)).status for client in others] == [429, 429] else 0

        # The tries come faster than the allowance of a minute grows back while a slow machine makes the failures. A host that
        # knows nothing of the others' failures would allow all of them.
        assert await until(is_refused, every_s=0.05) < FAILURES // 2
