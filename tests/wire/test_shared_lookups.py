"""Name lookups and fetches of one client leave room for those of others, however long its hosts take."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from proxy.tasks import client_of_task
from proxy.wire.fetcher import Fetched, Fetcher
from proxy.wire.outbound_guard import CONNECTIONS, LOOKUPS, PER_HOST, GuardedResolver
from tests.service import until
from tests.wire.external_servers import listener, pages
from tests.wire.test_fetcher import LOOPBACK

MANY = 2 * max(LOOKUPS, CONNECTIONS)


def start(client: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start work of a client."""
    before = client_of_task.set(client)
    try:
        return asyncio.get_running_loop().create_task(work)
    finally:
        client_of_task.reset(before)


async def end(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class SlowNames:
    """A system resolver that does not answer for `*.slow.test` until it is released."""

    def __init__(self) -> None:
        self.asked = 0
        self.released = threading.Event()

    def getaddrinfo(self, host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        if host.endswith(".slow.test"):
            self.asked += 1
            self.released.wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowNames]:
    found = SlowNames()
    monkeypatch.setattr(socket, "getaddrinfo", found.getaddrinfo)
    yield found
    found.released.set()


async def test_slow_names_of_one_client_do_not_delay_the_lookups_of_another(names: SlowNames) -> None:
    resolver = GuardedResolver()
    slow = [start("one", resolver.resolve(f"{n}.slow.test")) for n in range(MANY)]
    await until(lambda: names.asked)
    found = await start("other", resolver.resolve("good.test"))
    assert [each["host"] for each in found] == ["127.0.0.1"]
    # The thread of a lookup without a caller is still taken.
    await end(slow)
    again = [start("one", resolver.resolve(f"again{n}.slow.test")) for n in range(MANY)]
    assert await start("other", resolver.resolve("better.test"))
    assert names.asked < LOOKUPS
    names.released.set()
    await asyncio.gather(*again)
    await resolver.close()


@pytest.mark.parametrize("own", [False, True])
async def test_hanging_fetches_of_one_client_do_not_delay_those_of_another(own: bool) -> None:
    hosts = [f"127.0.0.{n + 2}" for n in range(MANY // PER_HOST)]
    async with pages() as site, listener(*hosts) as silent:
        good = site.put("/good.json", b"{}")
        fetcher = Fetcher(LOOPBACK, timeout_s=60.0, max_bytes=1000)
        urls = [f"http://{host}:{silent.port}/{n}" for host in hosts for n in range(PER_HOST)]
        slow = [start("one", fetcher.get(url, own=own)) for url in urls]
        await until(lambda: silent.connections >= CONNECTIONS // 2)
        assert await start("other", fetcher.get(good, own=own)) == Fetched("ok", b"{}", "application/json")
        assert not any(task.done() for task in slow)
        await end(slow)
        await fetcher.close()
