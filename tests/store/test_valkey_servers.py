"""The connection to Valkey with TLS and a login, in a Cluster, and over a failover of Sentinel: all on real servers."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from proxy.store.valkey import valkey_link
from proxy.store.valkey.valkey_address import TAG
from proxy.store.valkey.valkey_link import ValkeyLink
from tests.certificates import Authority
from tests.redis_server import PROGRAM, RedisServer, free_port, redis_server, require_redis
from tests.service import until
from tests.store.test_valkey_link import linked

SLOTS = 16384
PRESENT = ("FCALL", "penstock_present_1", "1", f"{TAG}:hosts", "one", "60000")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    require_redis()
    monkeypatch.setattr(valkey_link, "LATE_S", 5.0)


async def _is_served(link: ValkeyLink) -> bool:
    return bool(await link.ask(*PRESENT) == 1)


# TLS


def with_tls(directory: Path) -> tuple[RedisServer, Path, int]:
    """A server with a password, its authority, and its port for TLS."""
    authority, port = Authority(directory / "authority"), free_port()
    leaf = authority.leaf("localhost")
    words = ("--tls-port", str(port), "--tls-auth-clients", "no", "--requirepass", "secret")
    files = (
        "--tls-cert-file",
        str(leaf.cert),
        "--tls-key-file",
        str(leaf.key),
        "--tls-ca-cert-file",
        str(authority.file),
    )
    return RedisServer(directory, *words, *files), authority.file, port


async def test_tls_and_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, authority, port = with_tls(tmp_path)
    await server.launch()
    try:
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
        async with linked(f"valkeys://:secret@localhost:{port}") as link:
            await until(lambda: _is_served(link))
        async with linked(f"valkeys://:wrong@localhost:{port}") as link:
            assert not await link.until_up(0.5)
        monkeypatch.setenv("SSL_CERT_FILE", str(Authority(tmp_path / "other").file))
        async with linked(f"valkeys://:secret@localhost:{port}") as link:
            assert not await link.until_up(0.5)
    finally:
        await server.stop()


# Cluster


@asynccontextmanager
async def cluster(directory: Path) -> AsyncIterator[list[RedisServer]]:
    """Three nodes with a third of the slots each."""
    async with AsyncExitStack() as stack:
        nodes: list[RedisServer] = []
        for number in range(3):
            words = ("--cluster-enabled", "yes", "--cluster-config-file", f"nodes{number}.conf")
            bus = ("--cluster-port", str(free_port()), "--cluster-node-timeout", "2000")
            nodes.append(await stack.enter_async_context(redis_server(directory, *words, *bus)))
            bounds = [SLOTS * number // 3, SLOTS * (number + 1) // 3 - 1]
            assert nodes[-1].command("CLUSTER", "ADDSLOTSRANGE", *map(str, bounds)) == b"+OK\r\n"
            nodes[0].command("CLUSTER", "MEET", "127.0.0.1", str(nodes[-1].port), bus[1])
        await until(lambda: all(_is_whole(node) for node in nodes))
        yield nodes


def _is_whole(node: RedisServer) -> bool:
    found = node.command("CLUSTER", "INFO")
    return b"cluster_state:ok" in found and b"cluster_known_nodes:3" in found


async def test_cluster_is_used_through_any_of_its_nodes(tmp_path: Path) -> None:
    async with cluster(tmp_path) as nodes:
        for node in nodes:
            # Their messages reach all nodes, so each gets its own channel.
            channel = f"channel {node.port}"
            async with linked(f"valkey://127.0.0.1:{node.port}") as link:
                heard: list[bytes] = []
                link.listen(channel, heard.append)
                await until(lambda link=link: _is_served(link))
                assert await link.ask("PUBLISH", channel, "news") is not None
                await until(lambda heard=heard: heard)


# Sentinel


@asynccontextmanager
async def sentinels(directory: Path, primary: RedisServer) -> AsyncIterator[int]:
    port, config = free_port(), directory / "sentinel.conf"
    lines = (
        f"port {port}",
        "bind 127.0.0.1",
        f"sentinel monitor main 127.0.0.1 {primary.port} 1",
        "sentinel down-after-milliseconds main 500",
        "sentinel failover-timeout main 3000",
    )
    config.write_text("\n".join(lines) + "\n")
    process = await asyncio.to_thread(subprocess.Popen, [PROGRAM, str(config), "--sentinel"], stdout=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


async def test_sentinel_fails_over_and_the_link_follows(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        primary = await stack.enter_async_context(redis_server(tmp_path))
        options = ("--replicaof", f"127.0.0.1 {primary.port}")
        replica = await stack.enter_async_context(redis_server(tmp_path, *options))
        await until(lambda: b"master_link_status:up" in replica.command("INFO", "replication"))
        port = await stack.enter_async_context(sentinels(tmp_path, primary))
        link = await stack.enter_async_context(linked(f"valkey://127.0.0.1:{port}/0?sentinel=main"))
        await until(lambda: _is_served(link))
        # A Sentinel knows the replicas of a primary from what that says, every ten seconds.
        asking = RedisServer(tmp_path)
        asking.port = port
        await until(lambda: str(replica.port).encode() in asking.command("SENTINEL", "replicas", "main"))
        await primary.stop()
        await until(lambda: not link.is_up)
        await until(lambda: _is_served(link))
        assert b"role:master" in replica.command("INFO", "replication")
