"""Three hosts that share a Redis show one chain: heads do not go backwards between them, and writes are seen everywhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web

from tests.fleet.gateways import SEPOLIA, Fleet
from tests.flows import upstream as upstream_room
from tests.flows.upstream import Upstream, reply
from tests.http_client import HttpClient, post, rpc
from tests.service import until

# Hosts poll the upstream every second: by chance alone, so many good rounds in a row do not happen.
ROUNDS = 10
ADDRESS = "0x" + "ab" * 20


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


async def all_good(good: Callable[[], Any]) -> bool:
    return all([await good() for _ in range(ROUNDS)])


async def test_head_that_one_host_has_shown_ends_older_replies_of_the_others(
    clients: Clients, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = int(str(upstream_room.HEAD["number"]), 16)

    async def act(call: dict[str, object]) -> web.StreamResponse:
        return reply(call, result=hex(number))

    async def balances() -> list[int]:
        return [int(await clients.result(host, "eth_getBalance", ADDRESS, "latest"), 16) for host in (1, 2)]

    async def is_followed() -> bool:
        nonlocal number
        await balances()
        number += 1
        block = {"number": hex(number), "hash": f"0x{number:064x}"}
        monkeypatch.setattr(
            upstream_room, "PROBES", {"eth_blockNumber": block["number"], "eth_getBlockByNumber": block}
        )
        assert int(await clients.result(0, "eth_blockNumber"), 16) <= number
        return await balances() == [number, number]

    upstream.act = act
    await until(lambda: all_good(is_followed), within_s=60.0)


async def test_write_on_one_host_is_seen_on_the_others(clients: Clients, upstream: Upstream) -> None:
    writes = 0

    async def act(call: dict[str, object]) -> web.StreamResponse:
        nonlocal writes
        writes += call["method"] == "eth_sendRawTransaction"
        return reply(call, result=f"0x{writes:064x}" if call["method"] == "eth_sendRawTransaction" else hex(writes))

    upstream.act = act

    async def is_seen() -> bool:
        for host in (1, 2):
            await clients.result(host, "eth_getBalance", ADDRESS, "latest")
        await clients.result(0, "eth_sendRawTransaction", f"0x{writes:064x}")
        seen = [await clients.result(host, "eth_getBalance", ADDRESS, "latest") for host in (1, 2)]
        return seen == [hex(writes)] * 2

    await until(lambda: all_good(is_seen), within_s=60.0)
