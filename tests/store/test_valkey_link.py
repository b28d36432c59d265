"""The connection to Valkey on a real Redis: replies in order, a login, and never a long wait."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.compose.fleet import link_to
from proxy.store.valkey import valkey_link
from proxy.store.valkey.valkey_address import address_of, moved_to
from proxy.store.valkey.valkey_link import ValkeyLink
from proxy.tasks import Tasks
from tests.redis_server import RedisServer, free_port, redis_server, require_redis
from tests.service import until


@pytest.fixture(scope="module", autouse=True)
def _redis() -> None:
    require_redis()


@asynccontextmanager
async def linked(url: str) -> AsyncIterator[ValkeyLink]:
    link, tasks = link_to(url), Tasks()
    tasks.start("valkey", link.run)
    try:
        yield link
    finally:
        await tasks.close()


@pytest.mark.parametrize(
    ("url", "servers", "facts"),
    [
        ("valkey://one", [("one", 6379)], (False, "", "", 0, "")),
        ("redis://one:1/3", [("one", 1)], (False, "", "", 3, "")),
        ("rediss://:pw@one:1", [("one", 1)], (True, "", "pw", 0, "")),
        ("valkeys://me:p%40w@a:1,b:2/0", [("a", 1), ("b", 2)], (True, "me", "p@w", 0, "")),
        ("valkey://[::1]:7000,c", [("::1", 7000), ("c", 6379)], (False, "", "", 0, "")),
        ("valkey://a:1,b:2/1?sentinel=main", [("a", 1), ("b", 2)], (False, "", "", 1, "main")),
    ],
)
def test_address_names_servers_login_and_sentinel(url: str, servers: list[Any], facts: tuple[Any, ...]) -> None:
    found = address_of(url)
    assert found.servers == tuple(servers)
    assert (found.tls, found.username, found.password, found.database, found.sentinel) == facts
    assert "pw" not in repr(found)


def test_error_of_a_cluster_names_the_node() -> None:
    assert moved_to("MOVED 3999 127.0.0.1:6381") == ("127.0.0.1", 6381)
    assert moved_to("READONLY You can't write against a read only replica.") is None


async def test_replies_come_in_order_and_functions_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valkey_link, "LATE_S", 5.0)
    async with redis_server(tmp_path) as redis, linked(redis.url) as link:
        await until(lambda: link.is_up)
        assert await asyncio.gather(*(link.ask("ECHO", str(n)) for n in range(100))) == [b"%d" % n for n in range(100)]
        assert await link.ask("FCALL", "penstock_present_1", "1", "hosts", "one", "5000") == 1
        assert await link.ask("FCALL", "penstock_present_1", "1", "hosts", "two", "5000") == 2


async def _pong(link: ValkeyLink) -> bool:
    return bool(await link.ask("PING") == b"PONG")


async def test_server_that_hangs_fails_what_waits_and_is_used_again(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as redis, linked(redis.url) as link:
        await until(lambda: link.is_up)
        redis.freeze()
        try:
            assert await link.ask("PING") is None
            assert not link.is_up
            assert await link.ask("PING") is None
        finally:
            redis.thaw()
        await until(lambda: _pong(link))


async def test_server_that_refuses_commands_is_not_flooded_with_connections(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its memory is full: that is as if it were away, until there is room again."""

    def refused() -> list[float]:
        return [each.created for each in caplog.records if each.message == "valkey refused a connection"]

    async with redis_server(tmp_path) as redis, linked(redis.url) as link:
        await until(lambda: link.is_up)
        redis.command("CONFIG", "SET", "maxmemory", "1")
        link.send(("SET", "a", "b"), lambda reply: link.reload(str(reply)))
        await until(lambda: len(refused()) >= 4)
        assert not link.is_up
        assert refused()[3] - refused()[0] > 1.2, "each pause is twice as long as the one before"
        redis.command("CONFIG", "SET", "maxmemory", "0")
        await until(lambda: link.is_up)


async def test_messages_arrive_also_after_a_new_connection(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as redis, linked(redis.url) as link:
        heard: list[bytes] = []
        link.listen("channel", heard.append)
        await until(lambda: link.is_up)
        await redis.stop()
        await until(lambda: not link.is_up)
        await redis.start()
        await until(lambda: link.is_up)

        async def hears() -> bool:
            await link.ask("PUBLISH", "channel", "news")
            return heard[:1] == [b"news"]

        await until(hears)


async def test_login_needs_the_right_password(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as redis:
        redis.command("CONFIG", "SET", "requirepass", "secret")
        async with linked(f"valkey://:secret@127.0.0.1:{redis.port}") as link:
            await until(lambda: link.is_up)
        async with linked(f"valkey://:wrong@127.0.0.1:{redis.port}") as link:
            assert not await link.until_up(0.3)


async def test_sentinel_names_the_server(tmp_path: Path) -> None:
    async with (
        redis_server(tmp_path) as redis,
        sentinel(tmp_path, redis) as port,
        linked(f"valkey://127.0.0.1:1,127.0.0.1:{port}/0?sentinel=main") as link,
    ):
        assert await until(lambda: _pong(link))


@asynccontextmanager
async def sentinel(directory: Path, redis: RedisServer) -> AsyncIterator[int]:
    port = free_port()
    config = directory / "sentinel.conf"
    config.write_text(f"port {port}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {redis.port} 1\n")
    process = await asyncio.to_thread(
        subprocess.Popen, ["redis-server", str(config), "--sentinel"], stdout=subprocess.DEVNULL
    )
    try:
        yield port
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)
