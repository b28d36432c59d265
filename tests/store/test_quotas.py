"""Leases of an account's daily quota: exact under concurrency."""

from __future__ import annotations

import asyncio
import datetime
import random

import pytest

from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.quotas import QuotaStore

DAY = datetime.date(2026, 1, 15)
NEXT = DAY + datetime.timedelta(days=1)


@pytest.fixture
def quotas(pool: Pool) -> QuotaStore:
    return QuotaStore(pool)


@pytest.fixture
async def accounts(pool: Pool) -> list[str]:
    store = KeyStore(pool, pepper="p" * 32, plans={"free": 10})
    return [(await store.create_account(name=f"a{n}", email=f"a{n}@b", plan="free"))["id"] for n in range(40)]


@pytest.fixture
def account(accounts: list[str]) -> str:
    return accounts[0]


async def used(pool: Pool, account: str, day: datetime.date = DAY) -> int:
    async with pool.connection() as connection:
        return int(
            await connection.fetchval(
                "select coalesce(sum(used), 0) from quota_days where account_id = $1 and day = $2", account, day
            )
        )


async def test_lease_is_granted_in_full_while_quota_remains(quotas: QuotaStore, account: str, pool: Pool) -> None:
    assert await quotas.lease(DAY, [(account, 100, 1000)]) == [100]
    assert await quotas.lease(DAY, [(account, 0, 1000)]) == [0]
    assert await quotas.lease(DAY, [(account, 900, 1000)]) == [900]
    assert await quotas.lease(DAY, [(account, 1, 1000)]) == [0]
    assert await used(pool, account) == 1000


async def test_last_lease_grants_the_remainder(quotas: QuotaStore, account: str) -> None:
    assert await quotas.lease(DAY, [(account, 990, 1000)]) == [990]
    assert await quotas.lease(DAY, [(account, 100, 1000)]) == [10]


@pytest.mark.parametrize(("wanted", "limit", "granted"), [(1, 0, 0), (1, 1, 1), (2, 1, 1), (-5, 10, 0)])
async def test_edges_of_the_limit(quotas: QuotaStore, account: str, wanted: int, limit: int, granted: int) -> None:
    assert await quotas.lease(DAY, [(account, wanted, limit)]) == [granted]


async def test_lowered_limit_grants_nothing_and_revokes_nothing(quotas: QuotaStore, account: str, pool: Pool) -> None:
    await quotas.lease(DAY, [(account, 500, 1000)])
    assert await quotas.lease(DAY, [(account, 10, 100)]) == [0]
    assert await used(pool, account) == 500


async def test_each_day_has_its_own_quota(quotas: QuotaStore, account: str) -> None:
    assert await quotas.lease(DAY, [(account, 10, 10)]) == [10]
    assert await quotas.lease(NEXT, [(account, 10, 10)]) == [10]


async def test_grants_are_in_the_order_of_the_requests(quotas: QuotaStore, accounts: list[str]) -> None:
    assert await quotas.lease(DAY, []) == []
    wants = [(account, index + 1, 3) for index, account in enumerate(reversed(accounts[:5]))]
    assert await quotas.lease(DAY, wants) == [1, 2, 3, 3, 3]


async def test_concurrent_leases_never_exceed_the_limit(quotas: QuotaStore, account: str, pool: Pool) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(quotas.lease(DAY, [(account, 7, 500)])) for _ in range(100)]
    granted = [task.result()[0] for task in tasks]
    assert sum(granted) == 500
    assert sorted(set(granted)) == [0, 3, 7]
    assert await used(pool, account) == 500


async def test_returned_quota_can_be_leased_again(quotas: QuotaStore, account: str) -> None:
    await quotas.lease(DAY, [(account, 100, 100)])
    await quotas.give_back(DAY, [(account, 30)])
    assert await quotas.lease(DAY, [(account, 100, 100)]) == [30]


async def test_returning_more_than_used_does_not_raise_the_limit(quotas: QuotaStore, account: str, pool: Pool) -> None:
    await quotas.lease(DAY, [(account, 10, 100)])
    await quotas.give_back(DAY, [(account, 50)])
    assert await used(pool, account) == 0
    await quotas.give_back(NEXT, [(account, 50)])
    await quotas.give_back(DAY, [("acct_0", 50)])
    await quotas.give_back(DAY, [])
    assert await quotas.lease(DAY, [(account, 1000, 100)]) == [100]


async def test_concurrent_leases_and_returns_neither_miscount_nor_deadlock(
    quotas: QuotaStore, accounts: list[str], pool: Pool
) -> None:
    chance = random.Random(7)

    async def worker() -> None:
        for _ in range(15):
            chosen = sorted(chance.sample(accounts, 20))
            granted = await quotas.lease(DAY, [(account, 10, 10_000) for account in chosen])
            await quotas.give_back(DAY, list(zip(reversed(chosen), reversed(granted), strict=True)))

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(worker())
    assert [await used(pool, account) for account in accounts] == [0] * len(accounts)
