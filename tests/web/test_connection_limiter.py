"""The connection limiter: limits per worker, per address and per connection, and the replies to refused clients."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from proxy.memory_budget import MemoryBudget
from proxy.settings import ServerSettings, load
from proxy.turn_queue import TurnQueue
from proxy.web.front.connection_limiter import ConnectionLimiter
from proxy.web.front.handler_connection import MAX_LINE_BYTES
from tests.http_client import request
from tests.web.worker import PEPPER, on_uvloop, running_worker

NOWHERE = "http://127.0.0.1:1/"
DATABASE = {"database": {"url": "postgresql://nobody@127.0.0.1:1/nothing"}, "keys": {"pepper": PEPPER}}


def limits(*trusted: str) -> ServerSettings:
    return load(environ={}, overrides={**DATABASE, "server": {"trusted_proxies": list(trusted)}}).server


@on_uvloop
async def test_full_worker_refuses_connections_without_blaming_the_address() -> None:
    async with running_worker(NOWHERE, server={"max_connections": 2}) as worker:
        clients = [await worker.connect() for _ in range(2)]
        assert (await clients[0].send(request("GET", "/healthz"))).status == 200
        async with await worker.connect() as one_more:
            reply = await one_more.reply()
            assert "address" not in reply.fault(503)["message"]
            assert int(reply.headers["retry-after"]) >= 1
            assert await one_more.is_closed()
        for client in clients:
            assert (await client.send(request("GET", "/healthz"))).status == 200
            await client.close()


@pytest.mark.parametrize("target", ["/healthz", "/v1/wallets?page=0", "/v1/nope"])
@on_uvloop
async def test_requests_of_a_handed_over_connection_are_limited_too(target: str) -> None:
    async with running_worker(NOWHERE, server={"keepalive_requests": 3}) as worker, await worker.connect() as client:
        replies = [await client.send(request("GET", target, key=worker.keys["main"])) for _ in range(3)]
        assert [each.closes for each in replies] == [False, False, True]
        assert await client.is_closed()


@on_uvloop
async def test_error_about_a_long_header_line_does_not_repeat_it() -> None:
    async with running_worker(NOWHERE) as worker, await worker.connect() as client:
        reply = await client.send(request("GET", "/healthz", X_A="canary" * MAX_LINE_BYTES))
        assert str(MAX_LINE_BYTES) in reply.fault(431)["message"]
        assert b"canary" not in reply.body


class OneOfMany:
    """A connection that notes whether it was refused."""

    transport = None

    def __init__(self) -> None:
        self.is_refused = False

    def check(self, now: float) -> None: ...

    def close_if_quiet(self, now: float, quiet_s: float) -> None: ...

    def force_close(self) -> None:
        self.is_refused = True


def limiter_of(settings: ServerSettings) -> ConnectionLimiter:
    return ConnectionLimiter(settings, TurnQueue(asyncio.get_running_loop()), MemoryBudget(1 << 20).of("bodies"))


async def test_connections_of_one_ipv6_network_are_limited_together() -> None:
    limiter = limiter_of(dataclasses.replace(limits(), connections_per_address=2))
    addresses = ["2001:db8::1", "2001:db8::2", "2001:db8::3", "2001:db8:0:1::1"]
    found = [OneOfMany() for _ in addresses]
    for connection, address in zip(found, addresses, strict=True):
        limiter.add(connection, address)
    assert [each.is_refused for each in found] == [False, False, True, False]
    for connection, address in zip(found[:3], addresses[:3], strict=True):
        limiter.remove(connection, address)
    limiter.add(again := OneOfMany(), "2001:db8::4")
    assert not again.is_refused


@on_uvloop
async def test_failed_authentications_of_one_ipv6_network_are_limited_together() -> None:
    keys, server = {"auth_failures_per_minute": 3}, {"trusted_proxies": ["127.0.0.1/32"]}
    async with running_worker(NOWHERE, keys=keys, server=server) as worker, await worker.connect() as client:
        addresses = [f"2001:db8::{n}" for n in range(1, 5)] + ["2001:db8:0:1::1"]
        asked = [request("GET", "/v1/wallets", X_Forwarded_For=address) for address in addresses]
        assert [(await client.send(each)).status for each in asked] == [401, 401, 401, 429, 401]


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("10.0.0.1", ["203.0.113.7"], "203.0.113.7"),
        ("::ffff:10.0.0.1", ["203.0.113.7"], "203.0.113.7"),
        ("::ffff:10.0.0.1", ["198.51.100.1, 203.0.113.7", "::ffff:10.0.0.2"], "203.0.113.7"),
        ("203.0.113.1", ["203.0.113.7"], "203.0.113.1"),
        ("::ffff:203.0.113.1", ["203.0.113.7"], "::ffff:203.0.113.1"),
        ("10.0.0.1", [], "10.0.0.1"),
    ],
)
async def test_forwarded_address_of_a_trusted_proxy_is_used(peer: str, forwarded: list[str], client: str) -> None:
    assert limiter_of(limits("10.0.0.0/8")).client_address(peer, forwarded) == client


async def test_forwarded_address_of_an_unlisted_proxy_is_ignored() -> None:
    assert limiter_of(limits()).client_address("10.0.0.1", ["203.0.113.7"]) == "10.0.0.1"
    assert not limiter_of(limits("10.0.0.0/8")).trusts("nonsense")
