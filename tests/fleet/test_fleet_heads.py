"""Three hosts that share a Redis show one chain: heads do not go backwards between them, and writes are seen everywhere."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web

from tests.fleet.gateways import SEPOLIA, Fleet
from tests.flows import upstream as upstream_room
from tests.flows.upstream import Upstream, reply
from tests.http_client import HttpClient, post, rpc
from tests.service import until

ROUNDS = 20
# Hosts poll the upstream every second. By chance alone, four of five rounds do not end within this time.
SOON_S = 0.25


class Clients:
    """One connection to each host."""

    def __init__(self, clients: list[HttpClient], key: str) -> None:
        self._clients = clients
        self._key = key

    async def result(self, host: int, method: str, *params: Any) -> Any:
        found = await self._clients[host].send(post(rpc(method, params), key=self._key, network=SEPOLIA))
        return found.json["result"]


@pytest.fixture
async def clients(fleet: Fleet) -> AsyncIterator[Clients]:
    key = await fleet.key("enterprise")
    async with AsyncExitStack() as stack:
        opened = [await HttpClient.open(host.port) for host in fleet.gateways.hosts]
        for client in opened:
            stack.push_async_callback(client.close)
        yield Clients(opened, key)


class FollowedValue:
    """A balance that grows in each round, as hosts 1 and 2 show it. It never goes back on a host."""

    def __init__(self, clients: Clients, address: str) -> None:
        self._clients = clients
        self._address = address
        self._shown = [0, 0]
        self.soon = 0

    async def balances(self) -> list[int]:
        found = [
            int(await self._clients.result(host, "eth_getBalance", self._address, "latest"), 16) for host in (1, 2)
        ]
        assert all(new >= old for new, old in zip(found, self._shown, strict=True)), (found, self._shown)
        self._shown = found
        return found

    async def reaches(self, number: int) -> None:
        began = time.monotonic()

        async def is_shown() -> bool:
            return await self.balances() == [number, number]

        await until(is_shown)
        self.soon += time.monotonic() - began < SOON_S


async def test_head_that_one_host_has_shown_ends_older_replies_of_the_others(
    clients: Clients, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = int(str(upstream_room.HEAD["number"]), 16)

    async def act(call: dict[str, object]) -> web.StreamResponse:
        return reply(call, result=hex(number))

    upstream.act = act
    followed = FollowedValue(clients, "0x" + "ab" * 20)
    for _ in range(ROUNDS):
        await followed.balances()
        number += 1
        block = {"number": hex(number), "hash": f"0x{number:064x}"}
        monkeypatch.setattr(
            upstream_room, "PROBES", {"eth_blockNumber": block["number"], "eth_getBlockByNumber": block}
        )
        assert int(await clients.result(0, "eth_blockNumber"), 16) <= number
        await followed.reaches(number)
    assert followed.soon >= 0.8 * ROUNDS


async def test_write_on_one_host_is_seen_on_the_others(clients: Clients, upstream: Upstream) -> None:
    writes = 0

    async def act(call: dict[str, object]) -> web.StreamResponse:
        nonlocal writes
        writes += call["method"] == "eth_sendRawTransaction"
        return reply(call, result=f"0x{writes:064x}" if call["method"] == "eth_sendRawTransaction" else hex(writes))

    upstream.act = act
    followed = FollowedValue(clients, "0x" + "cd" * 20)
    for _ in range(ROUNDS):
        await followed.balances()
        await clients.result(0, "eth_sendRawTransaction", f"0x{writes:064x}")
        await followed.reaches(writes)
    assert followed.soon >= 0.8 * ROUNDS
