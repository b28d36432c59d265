"""`python -m proxy dev`: starts every part, prints the banner, keeps the parts running, and stops them all at the end."""

from __future__ import annotations

import asyncio
import fcntl
import shutil
import signal
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
import orjson

from proxy import settings as settings_room
from proxy.commands import upstream_option
from proxy.commands.context import CHAIN, RUNNING
from proxy.dev import seed
from proxy.dev.banner import ReadyFile, banner
from proxy.dev.devnet import Devnet
from proxy.dev.display import Display
from proxy.dev.indexing import is_indexed
from proxy.dev.npm_packages import home_of
from proxy.dev.postgres import Postgres
from proxy.dev.seed import Seeded
from proxy.errors import StartError
from proxy.processes import file_limit
from proxy.processes.background_compiler import compile_once
from proxy.processes.supervisor import Supervisor
from proxy.settings import Settings
from proxy.store.postgres import migrate, peppers
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.sessions import SessionStore
from proxy.tasks import Tasks, unless_stopped

# Entries of the data directory that --fresh deletes. The directory itself stays.
PARTS = ("postgres", "chain", "logs", "pepper", "paymaster.key", "keys.json", "dashboard.json", RUNNING, CHAIN)
T = TypeVar("T")

# How long after the start compiling begins: until then there is other work to do.
COMPILE_AFTER_S = 30.0
DEV_NETWORKS = ("dev/mainnet", "dev/testnet")


@dataclass(frozen=True, slots=True)
class Options:
    data: Path
    port: int | None
    workers: int | None
    fresh: bool
    upstreams: Sequence[str]
    config: Path | None
    ready_file: Path | None
    contracts: bool
    bundler: bool


def metrics_defaults(port: int | None) -> dict[str, int]:
    """The port for metrics: the default, which the guide names. A service with its own `port` may be one of several on this
    machine, so its metrics use any free port."""
    return {} if port is None else {"port": 0}


class DevService:
    def __init__(self, options: Options, display: Display) -> None:
        self._options = options
        self._display = display
        self._data = options.data.resolve()
        self._tasks = Tasks()

    async def run(self) -> None:
        """Start everything, wait for a signal, and stop everything in reverse order, even after a failure."""
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
        options = self._options
        home = await home_of(self._data, self._display)
        devnet = Devnet(self._data, home, self._display, with_contracts=options.contracts, with_bundler=options.bundler)
        settings = file_limit.fitted(self._settings(postgres.url, devnet), file_limit.raise_limit())
        await _together(self._database(stack, postgres), devnet.start(stack))
        self._keep_running(stack, postgres, devnet)
        supervisor = Supervisor(settings, log_to=self._data / "logs" / "penstock.log")
        stack.push_async_callback(supervisor.stop)
        seeded = await _together(self._service(settings, supervisor, devnet), devnet.start_bundler(self._tasks))
        ready = ReadyFile.of(settings, supervisor, devnet=devnet, seeded=seeded)
        self._announce(stack, settings, ready)
        return banner(ready, self._data)

    def _lock(self, stack: AsyncExitStack) -> None:
        """Create and lock the data directory."""
        try:
            self._data.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((self._data / "lock").open("a+"))
        except OSError as exc:
            raise StartError([f"--data {self._data}: not usable ({exc.strerror}): choose another directory"]) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StartError(
                [f"{self._data} is in use by another run: stop it, or choose another directory with --data"]
            ) from None

    async def _prepare(self, postgres: Postgres) -> None:
        """Remove leftovers of a killed run; with --fresh, delete all data."""
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

    async def _database(self, stack: AsyncExitStack, postgres: Postgres) -> None:
        stack.push_async_callback(postgres.child.stop)
        with self._display.part("postgres"):
            await postgres.start()

    def _keep_running(self, stack: AsyncExitStack, postgres: Postgres, devnet: Devnet) -> None:
        """Restart database and chain if they end, until the service stops."""
        stack.push_async_callback(self._tasks.close)
        self._tasks.start("postgres", postgres.child.keep_running)
        self._tasks.start("compiler", self._compile)
        devnet.keep_running(self._tasks)

    async def _compile(self) -> None:
        """For the next start: this one is not interrupted."""
        await asyncio.sleep(COMPILE_AFTER_S)
        await compile_once()

    async def _service(self, settings: Settings, supervisor: Supervisor, devnet: Devnet) -> Seeded:
        """Create the accounts, start the workers and wait for the index."""
        with self._display.part("accounts"):
            seeded = await self._seeded(settings)
        with self._display.part("workers"):
            await supervisor.start()
        followed = [name for name in DEV_NETWORKS if settings.follower.follows(name)]
        with self._display.part("index"):
            is_whole = await is_indexed(settings.database.url, devnet.url, followed)
        if not is_whole:
            self._display.note("index", "not complete yet: balances and NFTs will follow shortly")
        return seeded

    def _settings(self, database_url: str, devnet: Devnet) -> Settings:
        """Combine the development defaults with the user's configuration and options."""
        options = {"workers": self._options.workers, "port": self._options.port}
        server = {"dev": True, **{name: value for name, value in options.items() if value is not None}}
        # One worker is enough.
        defaults = {
            "server": {"workers": 1},
            "metrics": metrics_defaults(self._options.port),
            # Charts show calls at once.
            "usage": {"flush_s": 1.0, "rollup_s": 2.0},
            "rpc": {"alchemy_methods": True, "quicknode_methods": True, "ankr_methods": True},
            "aliases": {"alchemy": True, "infura": True},
        }
        overrides = {
            "server": server,
            "database": {"url": database_url},
            "keys": {"pepper": seed.pepper(self._data / "pepper")},
            # The chain is new at every start, and small: index all of it, and drop the index of the old one.
            "follower": {"start": dict.fromkeys(DEV_NETWORKS, 0), "renew": True},
        }
        settings = settings_room.load(
            self._options.config, environ=settings_room.environment(), defaults=defaults, overrides=overrides
        )
        tables = settings_room.tables_for(settings)
        own = [upstream_option.parse(text, tables) for text in self._options.upstreams]
        chains = [{"network": name, "url": devnet.url} for name in DEV_NETWORKS]
        bundlers = [{"network": name, "url": devnet.bundler_url} for name in DEV_NETWORKS if devnet.bundler_url]
        upstreams = [*chains, *own, *settings.tree.get("upstreams", ())]
        bundlers += settings.tree.get("bundlers", ())
        paymasters = [*self._paymasters(devnet), *settings.tree.get("paymasters", ())]
        tree, faults = settings_room.expanded(
            {**settings.tree, "upstreams": upstreams, "bundlers": bundlers, "paymasters": paymasters}
        )
        settings = settings_room.from_tree(tree, faults=faults)
        tables = settings_room.tables_for(settings)
        faults += settings_room.network_faults(settings.tree, tables)
        faults += settings_room.paymaster_faults(settings.tree, tables, settings_room.environment())
        faults += settings_room.relay_faults(settings.tree, tables, settings_room.environment())
        if faults:
            raise StartError([fault.replace("upstreams", "--upstream", 1) for fault in faults])
        return settings

    def _paymasters(self, devnet: Devnet) -> Iterator[dict[str, str]]:
        """Yield settings of the chain's paymasters. Their signing key is written to a private file."""
        contracts = devnet.contracts
        if not contracts.paymasters:
            return
        key = self._data / "paymaster.key"
        seed.write_private(key, contracts.paymaster_signer["private_key"].encode())
        for version, address in contracts.paymasters.items():
            for name in DEV_NETWORKS:
                yield {
                    "network": name,
                    "entry_point": version,
                    "address": address,
                    "signer_file": str(key),
                    # Generous: gas is almost free on this chain, and test operations offer all kinds of fees.
                    "any_fee_gwei": "100",
                }

    async def _seeded(self, settings: Settings) -> Seeded:
        connection = await asyncpg.connect(settings.database.url, timeout=5)
        try:
            await migrate.migrate(connection)
            await peppers.admit(connection, settings.keys.pepper, settings.keys.previous_pepper, {})
        finally:
            await connection.close()
        pool = Pool(settings.database.url, size=2, acquire_timeout_s=5.0)
        await pool.open()
        try:
            store = KeyStore(pool, pepper=settings.keys.pepper, plans=dict.fromkeys(seed.PLANS, 10))
            keys = await seed.keys(store, self._data / "keys.json")
            people = SessionStore(pool, pepper=settings.keys.pepper)
            return Seeded(keys, await seed.sign_ins(people, self._data / "dashboard.json"))
        finally:
            await pool.close()

    def _announce(self, stack: AsyncExitStack, settings: Settings, ready: ReadyFile) -> None:
        """Write the files that other commands read, and the ready file."""
        overrides = {
            "database": {"url": settings.database.url},
            "keys": {"pepper": settings.keys.pepper},
            "dashboard": {"url": settings.dashboard.url or ready.dashboard_url},
            "upstreams": settings.tree["upstreams"],
        }
        seed.write_private(self._data / RUNNING, orjson.dumps(overrides))
        stack.callback((self._data / RUNNING).unlink, missing_ok=True)
        ready_json = ready.as_json()
        chain = {name: ready_json[name] for name in ("upstream_url", "accounts", "tokens", "nfts")}
        seed.write_private(self._data / CHAIN, orjson.dumps(chain))
        stack.callback((self._data / CHAIN).unlink, missing_ok=True)
        if self._options.ready_file is not None:
            seed.write_private(self._options.ready_file, orjson.dumps(ready_json, option=orjson.OPT_INDENT_2))
            stack.callback(self._options.ready_file.unlink, missing_ok=True)


async def _together(first: Coroutine[Any, Any, T], second: Coroutine[Any, Any, None]) -> T:
    """Run both concurrently and return the first result; raise the faults of both if they fail."""
    faults: list[str] = []
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(first)
            group.create_task(second)
        return task.result()
    except* StartError as failed:
        faults = [fault for exc in _leaves(failed) for fault in exc.faults]
    raise StartError(faults)  # outside except*: before Python 3.11.4 an exception raised in it is wrapped in a group


def _leaves(group: BaseExceptionGroup[StartError]) -> Iterator[StartError]:
    for exc in group.exceptions:
        if isinstance(exc, BaseExceptionGroup):
            yield from _leaves(exc)
        else:
            yield exc
