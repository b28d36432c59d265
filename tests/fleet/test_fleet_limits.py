"""Limits over three hosts that share a Redis, also while it is away."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter

import pytest
from aiohttp import web

from tests.fleet.gateways import LIMITED, SEPOLIA, UPSTREAM_RATE, Fleet
from tests.flows.production import Production
from tests.http_client import HttpClient, fresh_call, post, rpc
from tests.service import until

# Limits of the free plan.
RATE = 10
ROUNDS = 4
_serial = itertools.count(1)


async def test_key_gets_its_limit_once_over_all_hosts(fleet: Fleet) -> None:
    for _ in range(ROUNDS):
        await _holds(fleet, RATE)
    await until(lambda: _is_one_limit(fleet))


async def test_own_limit_of_a_key_holds_over_all_hosts(fleet: Fleet) -> None:
    for _ in range(ROUNDS):
        await _holds(fleet, 5, own_rate=5)


async def _holds(fleet: Fleet, rate: int, *, own_rate: int = 0) -> None:
    """A new key that asks all hosts for more than its limit never gets more. While Redis is late on a busy machine, each host
    has a part of the limit, rounded up: that is the only slack."""
    key = await fleet.key("growth" if own_rate else "free", own_rate)
    began = time.monotonic()
    statuses = Counter(status for host in await fleet.volley(key, rate + 5) for status in host)
    assert set(statuses) == {200, 429}
    assert rate // 2 <= statuses[200] <= rate * (1 + time.monotonic() - began) + len(fleet.gateways.hosts)


async def test_calls_of_one_host_get_the_whole_limit(fleet: Fleet) -> None:
    key = await fleet.key("free")

    async def gets_all() -> bool:
        statuses = await fleet.calls(fleet.gateways.hosts[0], key, RATE)
        return statuses.count(200) == RATE

    await until(gets_all, every_s=1.2)


async def test_batches_at_one_host_follow_each_other(fleet: Fleet) -> None:
    """Balancers send a key's calls to one gateway. Each of these batches can be answered with a Free key, but not both at once.
    They are sent as ethers does, which repeats a request that got a 429, and not a single call of a batch."""
    key = await fleet.key("free")

    async def repeated() -> list[bool]:
        body = b"[" + b",".join(fresh_call() for _ in range(60)) + b"]"
        async with await HttpClient.open(fleet.gateways.hosts[0].port) as client:
            for _ in range(12):
                reply = await client.send(post(body, key=key, network=SEPOLIA))
                if reply.status != 429:
                    return ["result" in item for item in reply.json]
        raise AssertionError("twelve attempts")

    assert [*await asyncio.gather(repeated(), repeated())] == [[True] * 60] * 2


async def test_one_host_gets_the_whole_limit_of_an_upstream(fleet: Fleet) -> None:
    key = await fleet.key("enterprise")

    async def gets_all() -> bool:
        before = fleet.limited.calls
        statuses = await fleet.calls(fleet.gateways.hosts[0], key, UPSTREAM_RATE, LIMITED)
        assert statuses.count(200) == fleet.limited.calls - before
        return statuses.count(200) == UPSTREAM_RATE

    # An equal part for each host would be a third of that.
    await until(gets_all, every_s=1.2)


async def test_limit_of_an_upstream_holds_over_all_hosts(fleet: Fleet) -> None:
    key = await fleet.key("enterprise")
    most = 0
    for _ in range(ROUNDS):
        await asyncio.sleep(1.0)  # The bucket is full again.
        before, began = fleet.limited.calls, time.monotonic()
        statuses = await fleet.volley(key, UPSTREAM_RATE, LIMITED)
        assert {status for host in statuses for status in host} == {200, 503}
        sent = fleet.limited.calls - before
        assert sent <= UPSTREAM_RATE * (1 + time.monotonic() - began) + len(fleet.gateways.hosts)
        most = max(most, sent)
    assert most >= UPSTREAM_RATE // 2


async def test_learnt_limit_of_a_method_holds_over_all_hosts(fleet: Fleet) -> None:
    """The provider allows fewer calls of the method than the settings say. Each host learns that, and they share the rest."""
    key, allowed = await fleet.key("enterprise"), 6
    served, refused = list[float](), list[float]()
    echo = fleet.limited.act

    async def act(call: dict[str, object]) -> web.StreamResponse:
        now = time.monotonic()
        if call["method"] != "eth_getCode":
            return await echo(call)
        is_above = sum(at > now - 1.0 for at in served) >= allowed
        (refused if is_above else served).append(now)
        return web.Response(status=429, headers={"Retry-After": "1"}) if is_above else await echo(call)

    def code() -> bytes:
        return rpc("eth_getCode", [f"0x{next(_serial):040x}", "latest"])

    async def demand(host: Production) -> None:
        while time.monotonic() < end:
            await fleet.calls(host, key, 2, LIMITED, call=code)

    fleet.limited.act = act
    try:
        began = time.monotonic()
        end = began + 12.0
        async with asyncio.TaskGroup() as tasks:
            for host in fleet.gateways.hosts:
                tasks.create_task(demand(host))
    finally:
        fleet.limited.act = echo
    late = [at for at in refused if at > end - 6.0]
    assert served
    assert refused, "the limit has to be found"
    assert len(late) <= 15, "hosts that shared nothing would send the declared 20 calls of each second"
    assert len([at for at in served if at > end - 6.0]) >= 6 * allowed // 3
    statuses = await fleet.calls(fleet.gateways.hosts[0], key, 2, LIMITED)
    assert statuses == [200, 200], "other methods are not limited"


@pytest.mark.parametrize("fault", ["frozen", "stopped"])
async def test_without_redis_calls_go_on_with_a_share_of_the_limit(fleet: Fleet, fault: str) -> None:
    key = await fleet.key("free")
    await fleet.volley(key, 2)
    await asyncio.sleep(0.5)  # The hosts learn of each other's share.
    if fault == "frozen":
        fleet.redis.freeze()
    else:
        await fleet.redis.stop()
    try:
        began = time.monotonic()
        found: Counter[int] = Counter()
        for _ in range(4):
            found.update(status for host in await fleet.volley(key, 10) for status in host)
            await asyncio.sleep(0.25)
        took_s = time.monotonic() - began
    finally:
        if fault == "frozen":
            fleet.redis.thaw()
        else:
            await fleet.redis.start()
    assert set(found) == {200, 429}
    # Each host has a share, far below the whole limit, and may have had tokens.
    assert 0 < found[200] <= RATE * (2 + 1.5 * took_s)
    await until(lambda: _is_one_limit(fleet))


async def _is_one_limit(fleet: Fleet) -> bool:
    """Whether the hosts lease from Redis again."""
    key = await fleet.key("free")
    statuses = await fleet.calls(fleet.gateways.hosts[1], key, RATE)
    return statuses.count(200) == RATE
