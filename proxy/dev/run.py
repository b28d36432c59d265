"""`python -m proxy dev`: start every part, say where it is, keep it running, and leave nothing behind."""

from __future__ import annotations

import asyncio
import fcntl
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import orjson

from proxy import settings as settings_room
from proxy.commands.place import RUNNING
from proxy.dev import seed
from proxy.dev.banner import Ready, banner
from proxy.dev.chain import FUNDED, development_chain
from proxy.dev.child import Child
from proxy.dev.display import Display
from proxy.dev.postgres import Postgres
from proxy.errors import StartError
from proxy.process import Tasks, unless_stopped
from proxy.settings import Settings
from proxy.store import migrate
from proxy.store.keys import KeyStore
from proxy.store.pool import Pool
from proxy.supervisor import Supervisor

# What a fresh start removes: our own parts, never the directory itself.
PARTS = ("postgres", "chain", "logs", "pepper", "keys.json", RUNNING)
DEV_NETWORKS = ("dev/mainnet", "dev/testnet")


@dataclass(frozen=True, slots=True)
class Options:
    data: Path
    port: int | None
    workers: int
    fresh: bool
    upstreams: Sequence[str]
    config: Path | None
    ready_file: Path | None


class Dev:
    def __init__(self, options: Options, display: Display) -> None:
        self._options = options
        self._display = display
        self._data = options.data.resolve()
        self._tasks = Tasks()

    async def run(self) -> None:
        """Everything up, until a signal; then everything down, in the opposite order, whatever failed."""
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with AsyncExitStack() as stack:
            ready = await unless_stopped(stop, self._start(stack))
            if ready is None:
                return
            print(ready, flush=True)
            await stop.wait()
            print("\nstopping …", flush=True)

    async def _start(self, stack: AsyncExitStack) -> str:
        self._lock(stack)
        socket_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-")))
        postgres = Postgres(self._data / "postgres", socket_dir, self._data / "logs" / "postgres.log")
        await self._prepare(postgres)
        chain, chain_url = development_chain(self._data / "chain", self._data / "logs" / "chain.log")
        settings = self._settings(postgres.url, chain_url)
        await self._start_parts(stack, postgres, chain)
        with self._display.part("accounts"):
            keys = await self._seeded(settings)
        supervisor = Supervisor(settings, log_to=self._data / "logs" / "penstock.log")
        stack.push_async_callback(supervisor.stop)
        with self._display.part("workers"):
            await supervisor.start()
        ready = Ready.of(settings, supervisor, chain_url=chain_url, keys=keys, funded=FUNDED)
        self._announce(stack, settings, ready)
        return banner(ready, self._data)

    def _lock(self, stack: AsyncExitStack) -> None:
        """The data directory, for us alone."""
        try:
            self._data.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((self._data / "lock").open("a+"))
        except OSError as exc:
            raise StartError([f"--data {self._data}: cannot be used ({exc.strerror}): choose another"]) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StartError(
                [f"{self._data} is in use by another run: stop it, or choose another with --data"]
            ) from None

    async def _prepare(self, postgres: Postgres) -> None:
        """What a killed run left behind must not be taken for ours."""
        ready_file = self._options.ready_file
        if ready_file is not None:
            if not ready_file.parent.is_dir():
                raise StartError([f"--ready-file {ready_file}: there is no directory {ready_file.parent}"])
            ready_file.unlink(missing_ok=True)
        (self._data / RUNNING).unlink(missing_ok=True)
        await postgres.end_stale()
        if self._options.fresh:
            for name in PARTS:
                path = self._data / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        (self._data / "logs").mkdir(exist_ok=True)

    async def _start_parts(self, stack: AsyncExitStack, postgres: Postgres, chain: Child) -> None:
        """Database and chain at once, and kept running from then on."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._part(stack, postgres.start, postgres.child))
                group.create_task(self._part(stack, chain.start, chain))
        except* StartError as failed:
            raise StartError([fault for exc in _leaves(failed) for fault in exc.faults]) from None
        stack.push_async_callback(self._tasks.close)
        for child in (postgres.child, chain):
            self._tasks.start(child.program.name, child.keep)

    async def _part(self, stack: AsyncExitStack, start: Callable[[], Awaitable[None]], child: Child) -> None:
        stack.push_async_callback(child.stop)
        with self._display.part(child.program.name):
            await start()

    def _settings(self, database_url: str, chain_url: str) -> Settings:
        """The defaults of a development machine under the operator's own words."""
        own = [_upstream(text) for text in self._options.upstreams]
        server: dict[str, Any] = {"dev": True, "workers": self._options.workers}
        if self._options.port is not None:
            server["port"] = self._options.port
        overrides = {
            "server": server,
            "database": {"url": database_url},
            "keys": {"pepper": seed.pepper(self._data / "pepper")},
            "metrics": {"port": 0},
        }
        found = settings_room.load(self._options.config, environ=settings_room.environment(), overrides=overrides)
        chains = [{"network": name, "url": chain_url} for name in DEV_NETWORKS]
        found = settings_room.from_tree({**found.tree, "upstreams": [*chains, *own, *found.tree.get("upstreams", ())]})
        if faults := settings_room.upstream_faults(found, settings_room.load_tables()):
            raise StartError([fault.replace("upstreams", "--upstream", 1) for fault in faults])
        return found

    async def _seeded(self, settings: Settings) -> dict[str, dict[str, str]]:
        connection = await asyncpg.connect(settings.database.url, timeout=5)
        try:
            await migrate.migrate(connection)
        finally:
            await connection.close()
        pool = Pool(settings.database.url, size=2, acquire_timeout_s=5.0)
        await pool.open()
        try:
            store = KeyStore(pool, pepper=settings.keys.pepper, plans=seed.PLANS)
            return await seed.keys(store, self._data / "keys.json")
        finally:
            await pool.close()

    def _announce(self, stack: AsyncExitStack, settings: Settings, ready: Ready) -> None:
        """For commands that are run beside us, and for whoever waits for the ready file."""
        overrides = {"database": {"url": settings.database.url}, "keys": {"pepper": settings.keys.pepper}}
        seed.write_private(self._data / RUNNING, orjson.dumps(overrides))
        stack.callback((self._data / RUNNING).unlink, missing_ok=True)
        if self._options.ready_file is not None:
            seed.write_private(self._options.ready_file, orjson.dumps(ready.as_json(), option=orjson.OPT_INDENT_2))
            stack.callback(self._options.ready_file.unlink, missing_ok=True)


def _leaves(group: BaseExceptionGroup[StartError]) -> Iterator[StartError]:
    for exc in group.exceptions:
        if isinstance(exc, BaseExceptionGroup):
            yield from _leaves(exc)
        else:
            yield exc


def _upstream(text: str) -> dict[str, str]:
    network, _, url = text.partition("=")
    if not url or "/" not in network:
        raise StartError(
            [f"--upstream {network!r}: write CHAIN/NETWORK=URL, such as ethereum/mainnet=https://host/path"]
        )
    return {"network": network, "url": url}
