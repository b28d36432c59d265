"""An account's daily quota: shared by all workers and all its keys, stored in Postgres."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tests.flows.load import is_over, saturate, spend
from tests.http_client import HttpClient, close_all, post, rpc, to_every_worker
from tests.service import SOON_S, Service

# Requests that a worker may admit over the quota while it waits for the reply that none is left.
CREDIT = 1
# By then a worker uses a new limit. Nothing else shows when it does.
NOTICED_S = 3.0


async def test_daily_quota_is_shared_by_all_workers_and_keys(service: Service, record_property: Any) -> None:
    """Saturate every worker with two keys of one account: the quota is not doubled."""
    account = await service.new_account("growth", "--requests-per-day", "40")
    keys = [(await service.new_key(account["id"]))["key"] for _ in range(2)]
    held = [await to_every_worker(service, at_least=2) for _ in keys]
    async with asyncio.TaskGroup() as group:
        runs = [
            group.create_task(
                saturate(
                    [t for clients in mine.values() for t in clients], post(rpc("eth_chainId"), key=key), for_s=1.0
                )
            )
            for key, mine in zip(keys, held, strict=True)
        ]
    tallies = [run.result() for run in runs]
    admitted = sum(tally.admitted for tally in tallies)
    record_property("admitted of 40", admitted)
    print("admitted of a day of 40:", admitted, tallies)
    assert 40 <= admitted <= 40 + CREDIT * len(service.worker_pids())
    is_over(tallies[0].refused[-1])
    shown = await service.cli_json("accounts", "show", account["id"])
    assert shown["used_today"] == 40
    for mine in held:
        await close_all(mine)


async def test_used_up_quota_is_refused_until_midnight_in_every_worker(service: Service) -> None:
    """A worker may admit one more request before it learns that the quota is used up."""
    account = await service.new_account("free", "--requests-per-day", "5", "--requests-per-second", "1000")
    made = await service.new_key(account["id"])
    held = await to_every_worker(service)
    first, *others = [clients[0] for clients in held.values()]
    assert 5 <= await spend(first, made["key"]) <= 5 + CREDIT
    for client in others:
        assert await spend(client, made["key"]) <= CREDIT
    await close_all(held)


async def test_raised_limit_applies_within_a_second_in_every_worker(service: Service) -> None:
    account = await service.new_account("free", "--requests-per-day", "2")
    made = await service.new_key(account["id"])
    held = await to_every_worker(service)
    for clients in held.values():
        await spend(clients[0], made["key"])
    await service.cli_json("accounts", "set", account["id"], "--requests-per-day", "1000")
    end = time.monotonic() + SOON_S
    for clients in held.values():
        while (await clients[0].call("eth_chainId", key=made["key"])).status != 200:
            assert time.monotonic() < end
            await asyncio.sleep(0.02)
    await close_all(held)


async def test_refused_requests_use_no_quota(service: Service) -> None:
    account = await service.new_account("free", "--requests-per-day", "5")
    made = await service.new_key(account["id"], "--scope", "rpc:read")
    async with await HttpClient.open(service.port) as client:
        for data in (
            post(rpc("eth_sendRawTransaction", ["0x00"]), key=made["key"]),
            post(b"{", key=made["key"]),
            post(rpc("eth_chainId"), key=made["key"], network="dev/nowhere"),
        ):
            for _ in range(4):
                assert (await client.send(data)).status in (400, 403, 404)
        assert await spend(client, made["key"]) >= 5


async def test_daily_limit_of_zero_means_unlimited(service: Service) -> None:
    account = await service.new_account("free", "--requests-per-day", "0")
    made = await service.new_key(account["id"])
    async with await HttpClient.open(service.port) as client:
        for _ in range(8):
            assert (await client.call("eth_chainId", key=made["key"])).status == 200
    assert (await service.cli_json("accounts", "show", account["id"]))["used_today"] == 0


async def test_new_limit_applies_to_an_open_connection(service: Service) -> None:
    """The connection's cached request head allows the fast path; the new limit must close it."""
    account = await service.new_account("enterprise", "--requests-per-day", "0")
    made = await service.new_key(account["id"])
    async with await HttpClient.open(service.port) as client:
        for _ in range(3):
            assert (await client.call("eth_chainId", key=made["key"])).status == 200
        await service.cli_json("accounts", "set", account["id"], "--requests-per-day", "5")
        await asyncio.sleep(NOTICED_S)
        assert 5 <= await spend(client, made["key"]) <= 7
