"""The data cache in memory and on a real Redis: shared lookups, separate networks, bounded size."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.core.caching import owner_bucket_of
from proxy.errors import Unavailable
from proxy.store.valkey.cache import ENTRY, LARGEST, BoundedMemory, DataCache
from proxy.tasks import client_of_task
from tests.redis_server import redis_server, require_redis
from tests.service import until

PLENTY = 1 << 24


class Maker:
    """Counts how often it makes a value. It waits until the test releases it."""

    def __init__(self, *values: Any) -> None:
        self.values = list(values)
        self.made = 0
        self.may = asyncio.Event()

    async def __call__(self) -> Any:
        self.made += 1
        value = self.values.pop(0) if len(self.values) > 1 else self.values[0]
        await self.may.wait()
        if isinstance(value, Exception):
            raise value
        return value


def ready(*values: Any) -> Maker:
    maker = Maker(*values)
    maker.may.set()
    return maker


@pytest.fixture(params=["memory", "redis"])
async def kept(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[DataCache]:
    if request.param == "memory":
        yield DataCache(bytes=PLENTY)
        return
    require_redis()
    async with redis_server(tmp_path) as redis:
        found = DataCache(bytes=PLENTY, redis_url=redis.url)
        yield found
        await found.close()


async def test_value_is_made_once_and_cached(kept: DataCache) -> None:
    make = ready({"name": "Coin", "supply": 2**200, "logo": None})
    for _ in range(3):
        found = await kept.once("one/mainnet", "token", "a", make=make, ttl_s=60)
        assert found == {"name": "Coin", "supply": 2**200, "logo": None}
    assert make.made == 1


async def test_none_is_cached_as_a_value(kept: DataCache) -> None:
    make = ready(None)
    for _ in range(2):
        assert await kept.once("one/mainnet", "token", "a", make=make, ttl_s=60) is None
    assert make.made == 1


async def test_networks_kinds_and_names_are_separate(kept: DataCache) -> None:
    places = [
        ("one/mainnet", "token", "a"),
        ("one/testnet", "token", "a"),
        ("one/mainnet", "nft", "a"),
        ("one/mainnet", "token", "b"),
    ]
    for n, name in enumerate(places):
        assert await kept.once(*name, make=ready(n), ttl_s=60) == n
    for n, name in enumerate(places):
        assert await kept.once(*name, make=ready(-1), ttl_s=60) == n


async def test_hundred_concurrent_callers_share_one_lookup(kept: DataCache) -> None:
    make = Maker([1, 2])
    asking = [asyncio.ensure_future(kept.once("n", "k", "x", make=make, ttl_s=60)) for _ in range(100)]  # noqa: TID251
    await until(lambda: make.made)
    make.may.set()
    found = await asyncio.gather(*asking)
    assert found == [[1, 2]] * 100
    assert make.made == 1
    found[0].append(3)  # each caller has a copy
    assert found[1] == [1, 2]


async def test_failure_is_raised_in_every_waiter_and_not_cached(kept: DataCache) -> None:
    make = Maker(Unavailable("away"), "here")
    asking = [asyncio.ensure_future(kept.once("n", "k", "x", make=make, ttl_s=60)) for _ in range(10)]  # noqa: TID251
    await until(lambda: make.made)
    make.may.set()
    assert [str(each) for each in await asyncio.gather(*asking, return_exceptions=True)] == ["away"] * 10
    assert await kept.once("n", "k", "x", make=make, ttl_s=60) == "here"
    assert make.made == 2


async def test_waiter_makes_its_own_lookup_if_that_of_another_client_is_refused(kept: DataCache) -> None:
    make = Maker(Unavailable("overloaded"), "here")

    async def look(client: str) -> Any:
        client_of_task.set(client)
        return await kept.once("n", "k", "x", make=make, ttl_s=60)

    asking = [asyncio.ensure_future(look(client)) for client in ("one", "one", "other")]  # noqa: TID251
    await until(lambda: make.made)
    make.may.set()
    first, same, other = await asyncio.gather(*asking, return_exceptions=True)
    assert (str(first), str(same), other) == ("overloaded", "overloaded", "here")


async def test_waiter_takes_over_when_the_lookup_is_cancelled(kept: DataCache) -> None:
    make = Maker("found")
    first = asyncio.ensure_future(kept.once("n", "k", "x", make=make, ttl_s=60))  # noqa: TID251
    await until(lambda: make.made)
    others = [asyncio.ensure_future(kept.once("n", "k", "x", make=make, ttl_s=60)) for _ in range(5)]  # noqa: TID251
    await until(lambda: repr(kept).endswith("1 lookups in progress>"))
    await asyncio.sleep(0.01)  # wait until the others have joined
    first.cancel()
    make.may.set()
    assert await asyncio.gather(*others) == ["found"] * 5
    assert make.made == 2
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_cancelled_waiter_does_not_stop_the_lookup(kept: DataCache) -> None:
    make = Maker("found")
    first = asyncio.ensure_future(kept.once("n", "k", "x", make=make, ttl_s=60))  # noqa: TID251
    await until(lambda: make.made)
    other = asyncio.ensure_future(kept.once("n", "k", "x", make=make, ttl_s=60))  # noqa: TID251
    await asyncio.sleep(0.01)
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    make.may.set()
    assert await first == "found"
    assert make.made == 1


async def test_fresh_lookup_replaces_the_cached_value(kept: DataCache) -> None:
    make = ready(1, 2)
    assert await kept.once("n", "k", "x", make=make, ttl_s=60) == 1
    assert await kept.once("n", "k", "x", make=make, ttl_s=60, fresh=True) == 2
    assert await kept.once("n", "k", "x", make=ready(3), ttl_s=60) == 2


async def test_fresh_caller_does_not_join_an_ordinary_lookup(kept: DataCache) -> None:
    slow = Maker("old")
    first = asyncio.ensure_future(kept.once("n", "k", "x", make=slow, ttl_s=60))  # noqa: TID251
    await until(lambda: slow.made)
    assert await kept.once("n", "k", "x", make=ready("new"), ttl_s=60, fresh=True) == "new"
    slow.may.set()
    assert await first == "old"


async def test_value_expires_after_a_fixed_or_computed_ttl(kept: DataCache) -> None:
    def ttl_s(value: Any) -> float:
        return 60.0 if value == "good" else 0.02

    assert await kept.once("n", "k", "bad", make=ready("bad"), ttl_s=ttl_s) == "bad"
    assert await kept.once("n", "k", "good", make=ready("good"), ttl_s=ttl_s) == "good"

    async def is_gone() -> bool:
        return await kept.get("n", "k", ["bad", "good"]) == [None, "good"]

    await until(is_gone)


async def test_many_values_are_put_and_found_together(kept: DataCache) -> None:
    await kept.put("n", "k", {str(n): {"n": n} for n in range(500)}, ttl_s=60)
    found = await kept.get("n", "k", [str(n) for n in range(-1, 500)])
    assert found == [None, *({"n": n} for n in range(500))]
    assert await kept.get("n", "k", []) == []
    assert await kept.get("other", "k", ["1"]) == [None]


async def test_large_value_is_returned_and_not_cached(kept: DataCache) -> None:
    make = ready("x" * (LARGEST + 1))
    for _ in range(2):
        assert len(await kept.once("n", "k", "x", make=make, ttl_s=60)) == LARGEST + 1
    assert make.made == 2


# Memory alone


async def test_memory_is_bounded_and_evicts_the_least_recently_used_first() -> None:
    kept = DataCache(bytes=100 * (ENTRY + 20))
    for n in range(1000):
        await kept.put("n", "k", {str(n): n}, ttl_s=3600)
    found = await kept.get("n", "k", [str(n) for n in range(1000)])
    there = [n for n, value in enumerate(found) if value is not None]
    assert there == list(range(1000 - len(there), 1000))
    assert 90 <= len(there) <= 105


def accounts(count: int) -> list[str]:
    """Accounts that are counted apart."""
    by_place = {owner_bucket_of(name): name for name in map(str, range(100))}
    return list(by_place.values())[:count]


async def test_account_with_very_many_entries_evicts_its_own() -> None:
    kept = DataCache(bytes=1000 * (ENTRY + 20))
    good, other, attacker = accounts(3)
    for account, count in ((good, 300), (other, 100), (attacker, 5000), (good, 100), (attacker, 5000)):
        client_of_task.set(account)
        for n in range(count):
            await kept.put("n", account, {str(n): n}, ttl_s=3600)
    for account, count in ((good, 300), (other, 100)):
        assert await kept.get("n", account, [str(n) for n in range(count)]) == list(range(count))
    memory = kept._cache
    assert isinstance(memory, BoundedMemory)
    assert 0.9 * memory._limit < memory.used <= memory._limit


async def test_accounts_that_all_want_more_have_equal_shares() -> None:
    kept = DataCache(bytes=1000 * (ENTRY + 20))
    rng, found = random.Random(1), accounts(4)
    for n in range(10_000):
        client_of_task.set(rng.choice((found[0], found[0], *found)))
        await kept.put("n", client_of_task.get(), {str(n): n}, ttl_s=3600)
    memory = kept._cache
    assert isinstance(memory, BoundedMemory)
    weights = [entries.weight for entries in memory._by_bucket.values()]
    assert sum(weights) == memory.used <= memory._limit
    assert len(memory._buckets) == sum(map(len, memory._by_bucket.values()))
    assert min(weights) > max(weights) / 2


async def test_memory_counts_a_replaced_value_once() -> None:
    kept = DataCache(bytes=PLENTY)
    for _ in range(3):
        await kept.put("n", "k", {"a": "x" * 1000, "b": "y"}, ttl_s=60)
    memory = kept._cache
    assert isinstance(memory, BoundedMemory)
    assert 1000 < memory.used < 1100 + 2 * ENTRY
    assert len(memory._buckets) == 2


async def test_value_larger_than_the_limit_is_not_cached() -> None:
    kept = DataCache(bytes=1000)
    await kept.put("n", "k", {"a": "x" * 2000, "b": "y" * 2000}, ttl_s=60)
    assert await kept.get("n", "k", ["a", "b"]) == [None, None]
    memory = kept._cache
    assert isinstance(memory, BoundedMemory)
    assert memory.used == 0


async def test_disabled_cache_stores_nothing_and_still_shares_lookups() -> None:
    kept = DataCache(bytes=PLENTY, enabled=False)
    make = Maker("x")
    asking = [asyncio.ensure_future(kept.once("n", "k", "x", make=make, ttl_s=60)) for _ in range(10)]  # noqa: TID251
    await until(lambda: make.made)
    make.may.set()
    assert await asyncio.gather(*asking) == ["x"] * 10
    assert make.made == 1
    assert await kept.get("n", "k", ["x"]) == [None]


# Redis


async def test_redis_serves_more_callers_than_connections(tmp_path: Path) -> None:
    require_redis()
    async with redis_server(tmp_path) as redis, two(redis.url) as (kept, _):
        for _ in range(2):
            asked = (kept.once("n", "k", str(n), make=ready(n), ttl_s=60) for n in range(100))
            assert await asyncio.gather(*asked) == list(range(100))
        assert redis.size() > 0


@asynccontextmanager
async def two(url: str) -> AsyncIterator[tuple[DataCache, DataCache]]:
    one, other = DataCache(bytes=PLENTY, redis_url=url), DataCache(bytes=PLENTY, redis_url=url)
    yield one, other
    await one.close()
    await other.close()


async def test_redis_is_shared_between_workers(tmp_path: Path) -> None:
    require_redis()
    async with redis_server(tmp_path) as redis, two(redis.url) as (one, other):
        await one.once("n", "k", "x", make=ready("found"), ttl_s=60)
        assert await other.once("n", "k", "x", make=ready("made again"), ttl_s=60) == "found"


@pytest.mark.parametrize("act", ["stop", "freeze"])
async def test_unreachable_redis_only_costs_a_lookup(tmp_path: Path, act: str) -> None:
    require_redis()
    async with redis_server(tmp_path) as redis, two(redis.url) as (kept, _):
        await kept.once("n", "k", "x", make=ready(1), ttl_s=60)
        await _away(redis, act)
        assert await kept.once("n", "k", "x", make=ready(2), ttl_s=60) == 2
        assert await kept.once("n", "k", "x", make=ready(3), ttl_s=60) == 3


async def _away(redis: Any, act: str) -> None:
    done: Callable[[], Awaitable[None] | None] = getattr(redis, act)
    waits = done()
    if waits is not None:
        await waits


async def test_lookups_of_one_account_leave_connections_to_others(tmp_path: Path) -> None:
    require_redis()
    async with redis_server(tmp_path) as redis:
        cache = DataCache(bytes=PLENTY, redis_url=redis.url)
        await cache.put("one/mainnet", "token", {str(number): "x" * 100_000 for number in range(32)}, ttl_s=60)
        done = 0

        async def look_up(client: str, names: int) -> None:
            nonlocal done
            client_of_task.set(client)
            assert all(await cache.get("one/mainnet", "token", [str(number) for number in range(names)]))
            done += client == "greedy"

        async with asyncio.TaskGroup() as group:
            for _ in range(40):
                group.create_task(look_up("greedy", 10))
            await asyncio.sleep(0)
            await group.create_task(look_up("other", 1))
            assert done < 12
        await cache.close()
