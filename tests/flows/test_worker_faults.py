"""Workers that die or hang, also while Postgres is away: every connection is answered, and operators see why."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from proxy.dev.postgres import Postgres, url
from tests.chain_upstream import ChainUpstream, LittleChain
from tests.database import another
from tests.flows import production
from tests.flows.production import Production, settings_text
from tests.flows.upstream import Upstream
from tests.follower.harness import NETWORK, everything
from tests.http_client import HttpClient, fresh_call, post
from tests.rpc_upstreams import scripted
from tests.service import command_here, holds, is_running, owner_of, until
from tests.store.cable import Cable

SEPOLIA = "ethereum/sepolia"
# A worker that died is back this soon, on a busy machine.
BACK_S = 40.0
TIMEOUT_S = 3.0
# Long enough for every loop to fail more than once.
OUTAGE_S = 7.0
FOLLOWED = f'networks = ["{NETWORK}"]\nstart = {{ "{NETWORK}" = 0 }}'


@dataclass
class Faulted:
    """A service with two workers whose connections to Postgres pass a cable; commands reach Postgres directly."""

    running: Production
    cable: Cable
    direct: Path

    async def run(self, *words: str) -> Any:
        return await _run(self.direct, *words)

    async def status(self, key: str = "") -> int:
        async with await HttpClient.open(self.running.port) as client:
            data = post(fresh_call(), key=key or self.running.key, network=SEPOLIA)
            return (await client.send(data, within_s=BACK_S)).status

    async def statuses(self, count: int = 24) -> set[int]:
        """The outcome of calls on new connections, which the kernel spreads over the workers."""
        return set(await asyncio.gather(*(self.status() for _ in range(count))))

    async def metric(self, name: str) -> float:
        """The value of the metric's only series. It may be missing for a moment, while workers are replaced."""
        values: list[float] = await until(lambda: self._values(name), within_s=BACK_S)
        assert len(values) == 1
        return values[0]

    async def _values(self, name: str) -> list[float]:
        address = f"http://127.0.0.1:{self.running.metrics_port}/metrics"
        async with aiohttp.ClientSession(raise_for_status=True) as session, session.get(address) as response:
            lines = (await response.text()).splitlines()
        return [float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{"))]

    async def until_metric(self, name: str, value: float) -> None:
        async def has_value() -> bool:
            return await self.metric(name) == value

        await until(has_value, within_s=BACK_S)

    async def until_replaced(self, *dead: int) -> None:
        def is_replaced() -> bool:
            return len(found := self.running.worker_pids()) == 2 and not {*dead} & {*found}

        await until(is_replaced, within_s=BACK_S)


async def _run(config: Path, *words: str) -> Any:
    done = await asyncio.to_thread(command_here, *words, "--config", str(config), "--json")
    assert done.returncode == 0, done.stderr
    return orjson.loads(done.stdout)


@pytest.fixture(scope="module")
async def shared(
    cluster: Postgres, upstream_server: Upstream, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Faulted]:
    room = tmp_path_factory.mktemp("worker-faults")
    little = LittleChain()
    little.mine(*everything())
    async with AsyncExitStack() as stack:
        (chain,) = await stack.enter_async_context(scripted(1, little, ChainUpstream))  # type: ignore[arg-type]
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-test-")))
        cable = Cable(sockets, Path(cluster.url.split("host=")[1]))
        await cable.plug()
        stack.push_async_callback(cable.cut)
        direct_url = await stack.enter_async_context(another(cluster.url, "faulted"))
        config, direct = room / "penstock.toml", room / "direct.toml"
        for path, address in ((config, url(sockets, "faulted")), (direct, direct_url)):
            text = settings_text(address, upstream_server.url, worker_timeout_s=TIMEOUT_S)
            path.write_text(
                f'{text.replace("networks = []", FOLLOWED)}[[upstreams]]\nnetwork = "{NETWORK}"\nurl = "{chain.url}"\n'
            )
        done = await asyncio.to_thread(command_here, "migrate", "--config", str(direct))
        assert done.returncode == 0, done.stderr
        words = ("--name", "A", "--email", "a@example.com", "--plan", "enterprise")
        account = await _run(direct, "accounts", "create", *words)
        key = await _run(direct, "keys", "create", "--account", account["id"])
        running = await production.start(config, room / "log", key["key"])
        yield Faulted(running, cable, direct)
        assert await production.stop(running) == 0


@pytest.fixture
def faulted(shared: Faulted, upstream: Upstream) -> Faulted:
    return shared


async def test_workers_that_die_while_postgres_is_away_are_replaced(faulted: Faulted) -> None:
    """Their successors know the keys. What changed meanwhile is applied when Postgres is back."""
    account = (await faulted.run("accounts", "list"))[0]["id"]
    revoked = await faulted.run("keys", "create", "--account", account)

    async def is_known() -> bool:
        return await faulted.status(revoked["key"]) == 200

    for _ in range(8):
        await until(is_known)
    await faulted.cable.cut()
    await faulted.until_metric("penstock_database_up", 0)
    await faulted.run("keys", "revoke", revoked["id"])
    for _ in range(2):
        dead = faulted.running.worker_pids()
        for pid in dead:
            os.kill(pid, signal.SIGKILL)
        assert await faulted.statuses() == {200}
        await faulted.until_replaced(*dead)
    assert faulted.running.said("Postgres does not answer: started with the keys that the previous worker had")
    assert await faulted.status("svc_test_unknown") == 401
    await faulted.cable.plug()

    async def is_revoked_everywhere() -> bool:
        """Many failed attempts are answered 429, which is a refusal too."""
        return 200 not in {await faulted.status(revoked["key"]) for _ in range(12)}

    await until(is_revoked_everywhere, within_s=BACK_S, every_s=0.5)
    await faulted.until_metric("penstock_database_up", 1)
    assert await faulted.statuses() == {200}


async def test_loops_report_an_outage_of_postgres_in_one_line_each(faulted: Faulted) -> None:
    await until(lambda: faulted.running.said("following network"), within_s=BACK_S)
    await faulted.until_metric("penstock_database_up", 1)
    before = len(faulted.running.log())
    away = len(faulted.running.said("Postgres does not answer"))
    await faulted.cable.cut()
    await until(lambda: len(faulted.running.said("Postgres does not answer")) == away + 4, within_s=BACK_S)
    await asyncio.sleep(OUTAGE_S)
    await faulted.cable.plug()
    again = len(faulted.running.said("Postgres answers again"))
    await until(lambda: len(faulted.running.said("Postgres answers again")) == again + 4, within_s=BACK_S)
    lines = [line for line in faulted.running.log()[before:] if line["level"] not in ("info", "debug")]
    assert not [line for line in lines if "exception" in line]
    # Two workers and two parts. A part has more loops than one, each of which may say what it cannot do.
    counts = Counter((line["logger"], line["message"], line.get("loop")) for line in lines)
    assert counts["penstock.follower", "no longer following network", None] == 1
    assert counts["penstock.deliverer", "cannot claim deliveries", None] == 1
    assert max(counts.values()) <= 4, counts


async def test_hung_worker_is_replaced(faulted: Faulted) -> None:
    before = await faulted.metric("penstock_worker_hangs_total")
    hung = faulted.running.worker_pids()[0]
    os.kill(hung, signal.SIGSTOP)
    assert await faulted.statuses() == {200}
    await faulted.until_replaced(hung)
    said = faulted.running.said("worker does not respond: killing it")
    assert [line["worker"] for line in said] == [hung]
    # Long before, the others have accepted from its socket.
    assert hung in [line["worker"] for line in faulted.running.said("worker is late")]
    assert await faulted.metric("penstock_worker_hangs_total") == before + 1


async def test_connections_of_a_dead_worker_do_not_wait_for_its_successor(faulted: Faulted) -> None:
    dead, other = faulted.running.worker_pids()
    os.kill(dead, signal.SIGKILL)

    def successor() -> int:
        return next((pid for pid in faulted.running.worker_pids() if pid not in (dead, other)), 0)

    late: int = await until(successor, within_s=BACK_S, every_s=0.002)
    os.kill(late, signal.SIGSTOP)
    try:
        assert await faulted.statuses() == {200}
        assert faulted.running.worker_pids() == sorted((late, other))
    finally:
        os.kill(late, signal.SIGCONT)

    async def is_accepted_by_successor() -> bool:
        async with await HttpClient.open(faulted.running.port) as client:
            pids = faulted.running.worker_pids()
            owner: int = await until(lambda: owner_of(faulted.running.port, client.port, pids))
            return owner == late

    await until(is_accepted_by_successor, within_s=3 * BACK_S)


async def test_worker_that_is_busy_for_a_second_is_kept(faulted: Faulted) -> None:
    workers = faulted.running.worker_pids()
    os.kill(workers[0], signal.SIGSTOP)
    await asyncio.sleep(1.0)
    os.kill(workers[0], signal.SIGCONT)
    await holds(lambda: faulted.running.worker_pids() == workers, for_s=TIMEOUT_S, every_s=0.1)
    assert await faulted.statuses() == {200}


async def test_successor_that_dies_early_leaves_no_metrics(faulted: Faulted) -> None:
    """A process that has not probed the database yet counts as one that reaches it, alive or dead."""
    pids = faulted.running.worker_pids()
    directory = run_directory(pids[0])
    os.kill(pids[0], signal.SIGKILL)

    def has_begun(pid: int) -> bool:
        """Whether it has set its metric: a new process sets all of them to 0, and then this one to 1."""
        file = directory / f"gauge_livemin_{pid}.db"
        return file.exists() and struct.pack("d", 1.0) in file.read_bytes()

    def early() -> int:
        """The successor, as soon as it has metrics."""
        found = set(faulted.running.worker_pids()) - set(pids)
        return next((pid for pid in found if has_begun(pid)), 0)

    dead = await until(early, within_s=BACK_S, every_s=0.002)
    os.kill(dead, signal.SIGKILL)
    assert await faulted.metric("penstock_database_up") == 1
    await faulted.until_replaced(pids[0], dead)
    assert not (directory / f"gauge_livemin_{dead}.db").exists()
    assert await faulted.metric("penstock_database_up") == 1


async def test_next_start_removes_the_directory_of_a_killed_supervisor(
    faulted: Faulted, tmp_path: Path, upstream: Upstream
) -> None:
    """The directories of running services stay."""
    path = tmp_path / "penstock.toml"
    path.write_text(faulted.direct.read_text().replace("workers = 2", "workers = 1"))
    kept = run_directory(faulted.running.worker_pids()[0])
    killed = await production.start(path, tmp_path / "killed", faulted.running.key, role="gateway")
    (worker,) = killed.worker_pids()
    left = run_directory(worker)
    killed.process.kill()
    killed.process.wait()
    await until(lambda: not is_running(worker), within_s=BACK_S)
    assert left.exists()
    running = await production.start(path, tmp_path / "next", faulted.running.key, role="gateway")
    own = run_directory(running.worker_pids()[0])
    assert not left.exists()
    assert kept.exists()
    assert own.exists()
    assert await production.stop(running) == 0
    assert not own.exists()


def run_directory(worker: int) -> Path:
    environ = Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
    return Path(
        next(word.split(b"=", 1)[1].decode() for word in environ if word.startswith(b"PROMETHEUS_MULTIPROC_DIR="))
    )
