"""The door: who comes in, for how many requests, and what those are told that do not."""

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
async def test_full_worker_says_that_it_is_and_not_who_is_to_blame() -> None:
    async with worker(NOWHERE, server={"max_connections": 2}) as found:
        talks = [await found.talk() for _ in range(2)]
        assert (await talks[0].ask(request("GET", "/healthz"))).status == 200
        async with await found.talk() as one_more:
            said = await one_more.reply(5)
            assert "address" not in said.fault(503)["message"]
            assert int(said.headers["retry-after"]) >= 1
            assert await one_more.is_closed(5)
        for talk in talks:
            assert (await talk.ask(request("GET", "/healthz"))).status == 200
            await talk.close()


@pytest.mark.parametrize("target", ["/healthz", "/v1/wallets?page=0", "/v1/nope"])
@on_uvloop
async def test_connection_that_left_the_hot_path_has_its_share_of_requests_too(target: str) -> None:
    async with worker(NOWHERE, server={"keepalive_requests": 3}) as found, await found.talk() as talk:
        said = [await talk.ask(request("GET", target, key=found.keys["main"])) for _ in range(3)]
        assert [reply.closes for reply in said] == [False, False, True]
        assert await talk.is_closed(5)


@on_uvloop
async def test_line_that_is_too_long_is_named_and_not_repeated() -> None:
    async with worker(NOWHERE) as found, await found.talk() as talk:
        said = await talk.ask(request("GET", "/healthz", X_A="canary" * MAX_LINE_BYTES))
        assert str(MAX_LINE_BYTES) in said.fault(400)["message"]
        assert b"canary" not in said.body


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
async def test_balancer_is_believed_in_the_clothes_of_either_family(
    peer: str, forwarded: list[str], client: str
) -> None:
    assert ConnectionLimiter(limits("10.0.0.0/8")).client_address(peer, forwarded) == client


async def test_no_balancer_is_believed_that_is_not_listed() -> None:
    assert ConnectionLimiter(limits()).client_address("10.0.0.1", ["203.0.113.7"]) == "10.0.0.1"
    assert not ConnectionLimiter(limits("10.0.0.0/8")).trusts("nonsense")
