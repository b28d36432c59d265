"""HAProxy in front of two gateways, with the configuration in `deploy/`: updates lose no call, and heads never go back."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import orjson
import pytest
from aiohttp import web

from proxy.dev.child import Child, Program, inherited_environment
from proxy.store.postgres.keys import KeyStore
from tests import programs
from tests.database import pooled
from tests.flows import production
from tests.flows import upstream as upstream_room
from tests.flows.production import PEPPER, Production, settings_text
from tests.flows.upstream import Upstream, reply
from tests.http_client import HttpClient, fresh_call, post, rpc
from tests.service import ROOT, until

HAPROXY = programs.find("haproxy")
CONFIG = ROOT / "deploy" / "haproxy" / "haproxy.cfg"
NETWORK = "ethereum/sepolia"
GATEWAYS = 2
# The test's balancer spreads a key with more requests than this at a time.
AT_A_TIME = 20

pytestmark = programs.needs("haproxy")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def balancer_text(port: int, gateways: list[int]) -> str:
    """The configuration of `deploy/`, with the ports of this test."""
    text = CONFIG.read_text().replace("bind :8545", f"bind 127.0.0.1:{port}").replace("maxconn 20000", "maxconn 200")
    text = re.sub(r"^    server .*\n", "", text, flags=re.MULTILINE)
    text = text.replace("inter 1s", "inter 200ms").replace("gt 5000", f"gt {AT_A_TIME}")
    text = text.replace("    default_backend", "    http-response set-header X-Gateway %s\n    default_backend")
    return text + "".join(f"    server gateway{index} 127.0.0.1:{each} check\n" for index, each in enumerate(gateways))


def test_configuration_is_valid() -> None:
    assert HAPROXY is not None
    done = subprocess.run([HAPROXY, "-c", "-f", str(CONFIG)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Fleet:
    """Gateways by their ports, and the balancer's port. Each gateway can be replaced."""

    def __init__(self, room: Path, port: int, key: str) -> None:
        self.room, self.port, self.key = room, port, key
        self.gateways: dict[int, Production] = {}

    async def start(self, port: int) -> None:
        config = self.room / f"gateway-{port}.toml"
        self.gateways[port] = await production.start(config, self.room / f"log-{port}", self.key, role="gateway")

    async def stop(self, port: int) -> None:
        await production.stop(self.gateways[port])

    async def replace(self, port: int) -> None:
        assert await production.stop(self.gateways[port]) == 0
        await self.start(port)


@pytest.fixture
async def fleet(tmp_path: Path, database: str, upstream: Upstream) -> AsyncIterator[Fleet]:
    assert HAPROXY is not None
    ports = [free_port() for _ in range(GATEWAYS + 1)]
    for port in ports[1:]:
        text = settings_text(database, upstream.url, port=port, workers=1, leave_s=2.0)
        (tmp_path / f"gateway-{port}.toml").write_text(text)
    found = Fleet(tmp_path, ports[0], await new_key(database))
    (tmp_path / "haproxy.cfg").write_text(balancer_text(ports[0], ports[1:]))
    balancer = Child(
        Program(
            name="haproxy",
            argv=(HAPROXY, "-db", "-f", str(tmp_path / "haproxy.cfg")),
            env=inherited_environment(),
            is_ready=lambda: _serves(found),
            ready_within_s=30.0,
            stop_signal=signal.SIGTERM,
            log_file=tmp_path / "haproxy.log",
        )
    )
    async with AsyncExitStack() as stack:
        for port in ports[1:]:
            stack.push_async_callback(found.stop, port)
        await asyncio.gather(*map(found.start, ports[1:]))
        await balancer.start()
        stack.push_async_callback(balancer.stop)
        yield found


async def new_key(database: str) -> str:
    async with pooled(database, size=1) as pool:
        store = KeyStore(pool, pepper=PEPPER, plans={"enterprise": 10})
        account = await store.create_account(name="A", email="balanced@example.com", plan="enterprise")
        _, key = await store.create_key(account["id"], name="k", mode="live")
        return key


async def _serves(fleet: Fleet) -> bool:
    try:
        async with await HttpClient.open(fleet.port) as client:
            return (await client.send(post(fresh_call(), key=fleet.key, network=NETWORK))).status == 200
    except OSError:
        return False


async def test_rolling_update_of_all_gateways_loses_no_call(fleet: Fleet) -> None:
    """Every gateway is stopped and started again while clients call through the balancer."""
    statuses: dict[int, int] = {}
    done = asyncio.Event()

    async def call() -> None:
        async with await HttpClient.open(fleet.port) as client:
            while not done.is_set():
                said = await client.send(post(fresh_call(), key=fleet.key, network=NETWORK))
                statuses[said.status] = statuses.get(said.status, 0) + 1
                assert "result" in orjson.loads(said.body)
                await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(call())
        for port in list(fleet.gateways):
            await fleet.replace(port)
            before = statuses.get(200, 0)
            await until(lambda before=before: statuses.get(200, 0) > before + 50)
        done.set()
    assert set(statuses) == {200}


@asynccontextmanager
async def busy(fleet: Fleet, pause_s: float) -> AsyncIterator[Counter[str]]:
    """Eight connections that use the key at the same time. Yields how many replies each gateway has sent on them."""
    gateways: Counter[str] = Counter()

    async def call() -> None:
        async with await HttpClient.open(fleet.port) as client:
            while True:
                said = await client.send(post(fresh_call(), key=fleet.key, network=NETWORK))
                gateways[said.headers["x-gateway"]] += 1
                await asyncio.sleep(pause_s)

    calling = [asyncio.get_running_loop().create_task(call()) for _ in range(8)]
    try:
        yield gateways
    finally:
        for each in calling:
            each.cancel()
        ended = await asyncio.gather(*calling, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended


async def test_head_never_goes_back_for_a_key_that_others_use_too(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These gateways do not share their heads: each polls when it does."""
    number = newest = int(str(upstream_room.HEAD["number"]), 16)
    async with busy(fleet, 0.01) as gateways, await HttpClient.open(fleet.port) as client:
        for read in range(1500):
            if read % 10 == 0:
                number += 1
                block = {"number": hex(number), "hash": f"0x{number:064x}"}
                probes = {"eth_blockNumber": block["number"], "eth_getBlockByNumber": block}
                monkeypatch.setattr(upstream_room, "PROBES", probes)
            said = await client.send(post(rpc("eth_blockNumber"), key=fleet.key, network=NETWORK))
            found = int(said.json["result"], 16)
            assert newest <= found <= number
            newest = found
            gateways[said.headers["x-gateway"]] += 1
        await until(lambda: sum(gateways.values()) > 2000)
        assert len(gateways) == 1, gateways
    assert newest > int(str(upstream_room.HEAD["number"]), 16)


async def test_key_with_very_many_requests_at_a_time_is_spread_over_the_gateways(
    fleet: Fleet, upstream: Upstream
) -> None:
    release = asyncio.Event()

    async def hold(call: dict[str, object]) -> web.StreamResponse:
        await release.wait()
        return reply(call, result="0x1")

    async def gateway() -> str:
        async with await HttpClient.open(fleet.port) as client:
            return (await client.send(post(fresh_call(), key=fleet.key, network=NETWORK))).headers["x-gateway"]

    upstream.act = hold
    before = upstream.calls
    asked = []
    for count in range(1, 2 * AT_A_TIME + 1):
        asked.append(asyncio.get_running_loop().create_task(gateway()))
        await until(lambda count=count: upstream.calls == before + count)
    release.set()
    served = await asyncio.gather(*asked)
    assert len({*served[:AT_A_TIME]}) == 1
    assert len({*served}) == GATEWAYS
