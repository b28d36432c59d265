"""`serve` with its own Postgres: drains, reloads and crashes under load lose no request."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from cryptography import x509

from proxy import settings
from proxy.dev.postgres import Postgres
from proxy.processes.supervisor import Supervisor, listeners, refuse_new, waiting
from tests.certificates import Authority
from tests.database import Server, another
from tests.flows import production
from tests.flows.production import PEPPER, Production, settings_text
from tests.flows.upstream import PASSWORD, SECRET_PATH, Upstream, reply
from tests.http_client import Closed, HttpClient, Reply, close_all, fresh_call, post, queued_at, to_every_worker
from tests.service import command, command_here, descendants, is_running, owner_of, until

SEPOLIA = "ethereum/sepolia"
SERVED = "served"
CONNECTIONS = 12
SO_LOCK_FILTER = 44
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="some kernels let only root have a filter")


@pytest.fixture(scope="module")
async def config(
    tmp_path_factory: pytest.TempPathFactory, cluster: Postgres, upstream_server: Upstream
) -> AsyncIterator[tuple[Path, str]]:
    """A settings file for a migrated database, and an enterprise key."""
    path = tmp_path_factory.mktemp("config") / "penstock.toml"
    async with another(cluster.url, SERVED) as url:
        path.write_text(settings_text(url, upstream_server.url))
        said = await asyncio.gather(*(asyncio.to_thread(command, "migrate", "--config", str(path)) for _ in range(3)))
        assert [done.returncode for done in said] == [0, 0, 0], said
        assert [done.stdout.startswith("applied ") for done in said].count(True) == 1
        account = await _json(
            "accounts", "create", "--name", "A", "--email", "a@example.com", "--plan", "enterprise", at=path
        )
        key = await _json("keys", "create", "--account", account["id"], at=path)
        yield path, key["key"]


async def _json(*words: str, at: Path) -> Any:
    done = await asyncio.to_thread(command_here, *words, "--config", str(at), "--json")
    assert done.returncode == 0, done.stderr
    return orjson.loads(done.stdout)


@pytest.fixture
async def serving(tmp_path: Path, config: tuple[Path, str], upstream: Upstream) -> AsyncIterator[Production]:
    """The workers for one test, with their own copy of the settings file."""
    path = tmp_path / "penstock.toml"
    path.write_text(config[0].read_text())
    running = await production.start(path, tmp_path / "log", config[1], role="gateway")
    yield running
    assert await production.stop(running) == 0
    assert not descendants(running.process.pid)


@pytest.fixture(scope="module")
async def steady_service(
    tmp_path_factory: pytest.TempPathFactory, config: tuple[Path, str]
) -> AsyncIterator[Production]:
    room = tmp_path_factory.mktemp("steady")
    path = room / "penstock.toml"
    path.write_text(config[0].read_text())
    running = await production.start(path, room / "log", config[1])
    yield running
    assert await production.stop(running) == 0
    said = running.log_file.read_text()
    assert [secret for secret in (PEPPER, PASSWORD, SECRET_PATH, config[1]) if secret in said] == []


@pytest.fixture
def steady(steady_service: Production, config: tuple[Path, str], upstream: Upstream) -> Iterator[Production]:
    """A shared service for tests that do not stop it. Its settings file is restored after each test."""
    yield steady_service
    steady_service.config.write_text(config[0].read_text())


@dataclass
class Load:
    """Clients that keep connections open. A request counts as lost if it was sent and has no complete reply."""

    port: int
    key: str
    keep_alive: bool = True
    answered: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    refused: int = 0
    closes: int = 0

    async def run(self) -> None:
        """Send requests until connections are refused."""
        while True:
            try:
                client = await HttpClient.open(self.port)
            except ConnectionError:
                self.refused += 1
                return
            async with client:
                await self._use(client)

    async def _use(self, client: HttpClient) -> None:
        while not client.reader.at_eof():
            try:
                said = await client.send(post(fresh_call(), key=self.key, network=SEPOLIA))
            except Closed as exc:
                self.lost.append(repr(exc))
                return
            self._note(said)
            if said.closes or not self.keep_alive:
                return
            await asyncio.sleep(random.uniform(0, 0.005))

    def _note(self, said: Reply) -> None:
        self.answered += 1
        self.closes += said.closes
        self.statuses[said.status] = self.statuses.get(said.status, 0) + 1


@asynccontextmanager
async def load(running: Production, *, keep_alive: bool = True) -> AsyncIterator[Load]:
    clients = Load(running.port, running.key, keep_alive)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(clients.run()) for _ in range(CONNECTIONS)]
        await until(lambda: clients.answered > 500)
        yield clients
        for task in tasks:
            task.cancel()


async def slowly(call: dict[str, Any]) -> web.StreamResponse:
    """Reply with a delay, so that requests are always in flight."""
    await asyncio.sleep(random.uniform(0.001, 0.05))
    return reply(call, result="0x1")


@pytest.mark.parametrize("keep_alive", [True, False])
async def test_sigterm_under_load_loses_no_request(
    serving: Production, upstream: Upstream, keep_alive: bool, record_property: Any
) -> None:
    """With keep-alive and with one connection per request, every request that was sent is answered."""
    upstream.act = slowly
    async with load(serving, keep_alive=keep_alive) as clients:
        serving.send_signal(signal.SIGTERM)
        await until(lambda: clients.refused == CONNECTIONS, within_s=20.0)
    record_property("answered", clients.answered)
    print("answered", clients.answered, "lost", len(clients.lost), clients.statuses)
    assert clients.lost == []
    assert set(clients.statuses) == {200}
    if keep_alive:
        assert clients.closes, "no reply had Connection: close"
    assert await production.stop(serving) == 0
    assert serving.said("draining")


async def test_request_in_flight_is_answered_after_sigterm(serving: Production, upstream: Upstream) -> None:
    gate = asyncio.Event()

    async def held_back(call: dict[str, Any]) -> web.StreamResponse:
        await gate.wait()
        return reply(call, result="0x1")

    upstream.act = held_back
    async with await HttpClient.open(serving.port) as client:
        before = upstream.calls
        await client.write(post(fresh_call(), key=serving.key, network=SEPOLIA))
        await until(lambda: upstream.calls > before)
        serving.send_signal(signal.SIGTERM)
        await until(lambda: serving.said("draining"))
        await until(lambda: _is_refused(serving.port))
        gate.set()
        said = await client.reply()
    assert said.json["result"] == "0x1"
    assert said.closes


async def test_queued_connection_at_sigterm_is_answered(serving: Production, upstream: Upstream) -> None:
    """The busy worker has not accepted the connection yet, but the request was sent: closing the socket would reset it."""
    busy = serving.worker_pids()[0]
    client = await queued_at(busy, serving.port, serving.worker_pids())
    await client.write(post(fresh_call(), key=serving.key, network=SEPOLIA))
    serving.send_signal(signal.SIGTERM)
    await until(lambda: serving.said("draining"))
    os.kill(busy, signal.SIGCONT)
    assert (await client.reply()).status == 200
    await client.close()


@AS_ROOT
async def test_socket_that_refuses_new_connections_keeps_its_queue() -> None:
    """A closed socket would reset queued connections; one that keeps listening would lose later ones."""
    (listener,) = listeners("127.0.0.1", 0, 1)
    listener.setblocking(False)
    with listener:
        port = listener.getsockname()[1]
        early = await HttpClient.open(port)
        await early.write(b"hello")
        assert refuse_new(listener)
        assert waiting(listener) == 1
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await HttpClient.open(port)
        accepted, _ = listener.accept()
        assert waiting(listener) == 0
        assert accepted.recv(5) == b"hello"
        accepted.close()
        await early.close()
    with pytest.raises(ConnectionRefusedError):
        await HttpClient.open(port)


async def test_service_stops_on_a_kernel_without_socket_filters() -> None:
    """Some kernels refuse filters to non-root users; a socket with locked filters refuses them to every user."""
    environ = {"DATABASE_URL": "postgresql://nowhere", "PENSTOCK_KEYS__PEPPER": PEPPER}
    supervisor = Supervisor(settings.load(environ=environ))
    supervisor._listeners = listeners("127.0.0.1", 0, 2)
    port = supervisor._listeners[0].getsockname()[1]
    for listener in supervisor._listeners:
        listener.setsockopt(socket.SOL_SOCKET, SO_LOCK_FILTER, 1)
        assert not refuse_new(listener)
    await supervisor.stop()
    with pytest.raises(ConnectionRefusedError):
        await HttpClient.open(port)


async def _is_refused(port: int) -> bool:
    try:
        await (await HttpClient.open(port)).close()
    except ConnectionError:
        return True
    return False


async def test_drain_ends_at_its_deadline(tmp_path: Path, config: tuple[Path, str], upstream: Upstream) -> None:
    """A request that is never answered does not delay the shutdown forever."""
    path = tmp_path / "short.toml"
    path.write_text(config[0].read_text().replace("drain_s = 10.0", "drain_s = 1.0"))
    running = await production.start(path, tmp_path / "short.log", config[1], role="gateway")
    hangs = asyncio.Event()

    async def never(call: dict[str, Any]) -> web.StreamResponse:
        await hangs.wait()
        return reply(call, result="0x1")

    upstream.act = never
    async with await HttpClient.open(running.port) as client:
        before = upstream.calls
        await client.write(post(fresh_call(), key=running.key, network=SEPOLIA))
        await until(lambda: upstream.calls > before)
        assert await production.stop(running) == 0
        assert await client.is_closed()
    hangs.set()


async def test_sighup_applies_changed_settings_and_loses_no_request(steady: Production, upstream: Upstream) -> None:
    upstream.act = slowly
    large = post(fresh_call() + b" " * 4000, key=steady.key, network=SEPOLIA)
    assert (await _send(steady, large)).status == 200
    text = steady.config.read_text()
    async with load(steady) as clients:
        for size, status in ((2048, 413), (1_048_576, 200)):
            old = set(steady.worker_pids())
            steady.config.write_text(text.replace("[server]", f"[server]\nmax_body_bytes = {size}"))
            steady.send_signal(signal.SIGHUP)
            await until(lambda old=old: old.isdisjoint(steady.worker_pids()), within_s=30.0)
            assert (await _send(steady, large)).status == status
        before = clients.answered
        await until(lambda: clients.answered > before + 100)
    assert clients.lost == []
    assert clients.refused == 0
    assert set(clients.statuses) == {200}


async def _send(serving: Production, data: bytes) -> Reply:
    async with await HttpClient.open(serving.port) as client:
        return await client.send(data)


async def test_sighup_with_a_broken_file_keeps_the_old_settings(steady: Production) -> None:
    workers = steady.worker_pids()
    text = steady.config.read_text()
    for broken in ("[server", text.replace("[server]", "[server]\nmax_body_bytes = -1"), text + "[nonsense]\n"):
        refused = len(steady.said("reload refused: keeping the old settings"))
        steady.config.write_text(broken)
        steady.send_signal(signal.SIGHUP)
        await until(lambda n=refused: len(steady.said("reload refused: keeping the old settings")) > n)
        assert steady.said("reload refused: keeping the old settings")[-1]["faults"]
    steady.config.unlink()
    steady.send_signal(signal.SIGHUP)
    await until(lambda: len(steady.said("reload refused: keeping the old settings")) == 4)
    assert steady.worker_pids() == workers
    assert (await _send(steady, post(fresh_call(), key=steady.key, network=SEPOLIA))).status == 200


async def test_sighup_renews_certificates_without_closing_a_connection(
    tmp_path: Path, config: tuple[Path, str], upstream: Upstream
) -> None:
    """A renewal that cannot be used changes nothing, even for a worker that starts afterwards."""
    authority = Authority(tmp_path)
    served, renewed = authority.leaf("localhost"), authority.leaf("localhost", stem="renewed")
    path = tmp_path / "penstock.toml"
    files = f'[server.tls]\ncert = "{served.cert}"\nkey = "{served.key}"\n'
    path.write_text(config[0].read_text() + files)
    running = await production.start(path, tmp_path / "log", config[1], role="gateway")
    try:
        workers, context = running.worker_pids(), authority.client_context()

        async def connect() -> HttpClient:
            return HttpClient(
                *await asyncio.open_connection("127.0.0.1", running.port, ssl=context, server_hostname="localhost")
            )

        async def shown() -> int:
            async with await connect() as client:
                found = client.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
                return x509.load_der_x509_certificate(found).serial_number

        call = post(fresh_call(), key=running.key, network=SEPOLIA)
        async with await connect() as old:
            assert (await old.send(call)).status == 200
            owner, first = owner_of(running.port, old.port, workers), served.serial
            other = next(pid for pid in workers if pid != owner)
            served.cert.write_text("half written")
            running.send_signal(signal.SIGHUP)
            await until(lambda: bool(running.said("reload refused: keeping the old settings")))
            os.kill(other, signal.SIGKILL)
            await until(lambda: other not in running.worker_pids() and len(running.worker_pids()) == 2)
            assert {await shown() for _ in range(4)} == {first}
            served.replace_with(renewed)
            running.send_signal(signal.SIGHUP)
            await until(lambda: len(running.said("certificates renewed")) == 2, within_s=60.0)
            assert {await shown() for _ in range(4)} == {renewed.serial}
            assert (await old.send(call)).status == 200
            assert owner in running.worker_pids()
            assert not running.said("process did not start")
    finally:
        assert await production.stop(running) == 0


async def test_settings_that_need_a_restart_are_named_at_a_reload(steady: Production) -> None:
    old = set(steady.worker_pids())
    steady.config.write_text(steady.config.read_text().replace("workers = 2", "workers = 3"))
    steady.send_signal(signal.SIGHUP)
    await until(lambda: steady.said("some changed settings need a restart"))
    await until(lambda: old.isdisjoint(steady.worker_pids()))
    await until(lambda: steady.said("reloaded"))
    assert steady.said("some changed settings need a restart")[0]["settings"] == ["server.workers"]
    assert (await _send(steady, post(fresh_call(), key=steady.key, network=SEPOLIA))).status == 200


async def test_sigterm_during_a_reload_stops_cleanly(serving: Production, upstream: Upstream) -> None:
    upstream.act = slowly
    async with load(serving) as clients:
        workers = set(serving.worker_pids())
        serving.send_signal(signal.SIGHUP)
        await until(lambda: set(serving.worker_pids()) - workers, every_s=0.002)
        below = descendants(serving.process.pid)
        serving.send_signal(signal.SIGTERM)
        await until(lambda: clients.refused == CONNECTIONS, within_s=30.0)
    assert clients.lost == []
    assert await production.stop(serving) == 0
    assert not any(map(is_running, below))


async def test_workers_end_when_the_supervisor_is_killed(tmp_path: Path, config: tuple[Path, str]) -> None:
    """Even one that is stopped. The others drain first."""
    path = tmp_path / "penstock.toml"
    path.write_text(config[0].read_text().replace("drain_s = 10.0", "drain_s = 0.1"))
    running = await production.start(path, tmp_path / "log", config[1])
    below = descendants(running.process.pid)
    stopped, _ = running.worker_pids()
    os.kill(stopped, signal.SIGSTOP)
    running.process.kill()
    running.process.wait()
    await until(lambda: not any(map(is_running, below)))


async def test_request_ids_of_workers_have_nothing_in_common(steady: Production) -> None:
    """Both are forks of one process."""
    held = await to_every_worker(steady)
    data = post(fresh_call(), key=steady.key, network=SEPOLIA)
    stems = [(await client.send(data)).headers["x-request-id"][:14] for (client, *_) in held.values()]
    await close_all(held)
    assert len(set(stems)) == 2


async def test_killed_worker_is_replaced_and_counted(steady: Production) -> None:
    dead = steady.worker_pids()[0]
    os.kill(dead, signal.SIGKILL)
    await until(lambda: len(steady.worker_pids()) == 2 and dead not in steady.worker_pids(), within_s=20.0)
    assert steady.said("worker died")[0]["worker"] == dead
    assert (await _send(steady, post(fresh_call(), key=steady.key, network=SEPOLIA))).status == 200


@asynccontextmanager
async def far(server: Server, seconds: float) -> AsyncIterator[str]:
    """The database's URL behind a forwarder that delays each new connection."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(seconds)
        back, forth = await asyncio.open_unix_connection(server.sockets / ".s.PGSQL.5432")
        await asyncio.gather(carry(reader, forth), carry(back, writer))

    forwarder = await asyncio.start_server(accept, "127.0.0.1", 0)
    yield f"postgresql://penstock@127.0.0.1:{forwarder.sockets[0].getsockname()[1]}/{SERVED}"
    forwarder.close()


async def test_slow_database_connections_are_waited_for(
    tmp_path: Path, config: tuple[Path, str], server: Server
) -> None:
    """Connecting takes longer than a request may wait, but keys are loaded and changes still arrive."""
    async with far(server, 0.6) as address:
        path = tmp_path / "penstock.toml"
        path.write_text(config[0].read_text().replace(server.url(SERVED), address))
        running = await production.start(path, tmp_path / "log", config[1], role="gateway")
        data = post(fresh_call(), key=running.key, network=SEPOLIA)
        assert (await _send(running, data)).status == 200
        account = (await _json("accounts", "list", at=config[0]))[0]
        made = await _json("keys", "create", "--account", account["id"], at=config[0])

        async def is_known() -> bool:
            return (await _send(running, post(fresh_call(), key=made["key"], network=SEPOLIA))).status == 200

        await until(is_known)
        assert await production.stop(running) == 0
