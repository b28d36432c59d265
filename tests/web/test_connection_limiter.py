"""The connection limiter: limits per worker, per address and per connection, and the replies to refused clients."""

from __future__ import annotations

import pytest

from proxy.settings import ServerSettings, load
from proxy.web.front.connection_limiter import MAX_LINE_BYTES, ConnectionLimiter
from tests.flows.talk import request
from tests.web.worker import PEPPER, on_uvloop, worker

NOWHERE = "http://127.0.0.1:1/"
DATABASE = {"database": {"url": "postgresql://nobody@127.0.0.1:1/nothing"}, "keys": {"pepper": PEPPER}}


def limits(*trusted: str) -> ServerSettings:
    return load(environ={}, overrides={**DATABASE, "server": {"trusted_proxies": list(trusted)}}).server


@on_uvloop
async def test_full_worker_refuses_connections_without_blaming_the_address() -> None:
    async with worker(NOWHERE, server={"max_connections": 2}) as found:
        talks = [await found.talk() for _ in range(2)]
        assert (await talks[0].ask(request("GET", "/healthz"))).status == 200
        async with await found.talk() as one_more:
            reply = await one_more.reply(5)
            assert "address" not in reply.fault(503)["message"]
            assert int(reply.headers["retry-after"]) >= 1
            assert await one_more.is_closed(5)
        for talk in talks:
            assert (await talk.ask(request("GET", "/healthz"))).status == 200
            await talk.close()


@pytest.mark.parametrize("target", ["/healthz", "/v1/wallets?page=0", "/v1/nope"])
@on_uvloop
async def test_requests_of_a_handed_over_connection_are_limited_too(target: str) -> None:
    async with worker(NOWHERE, server={"keepalive_requests": 3}) as found, await found.talk() as talk:
        replies = [await talk.ask(request("GET", target, key=found.keys["main"])) for _ in range(3)]
        assert [each.closes for each in replies] == [False, False, True]
        assert await talk.is_closed(5)


@on_uvloop
async def test_error_about_a_long_header_line_does_not_repeat_it() -> None:
    async with worker(NOWHERE) as found, await found.talk() as talk:
        reply = await talk.ask(request("GET", "/healthz", X_A="canary" * MAX_LINE_BYTES))
        assert str(MAX_LINE_BYTES) in reply.fault(431)["message"]
        assert b"canary" not in reply.body


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
    assert ConnectionLimiter(limits("10.0.0.0/8")).client_address(peer, forwarded) == client


async def test_forwarded_address_of_an_unlisted_proxy_is_ignored() -> None:
    assert ConnectionLimiter(limits()).client_address("10.0.0.1", ["203.0.113.7"]) == "10.0.0.1"
    assert not ConnectionLimiter(limits("10.0.0.0/8")).trusts("nonsense")
