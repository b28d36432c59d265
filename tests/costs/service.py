"""The service under the cost matrix: `serve` with one worker, a real Postgres, counting upstreams, and Free accounts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import orjson
from aiohttp import web

from proxy.services.accounts.sign_in import hash_password
from proxy.services.tokens.evm_tokens import MOST_CONTRACTS
from proxy.settings import load_tables
from proxy.store.postgres.keys import KeyStore, LimitChange
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.sessions import SessionStore
from tests.beacon_stub import serving
from tests.costs.cells import BEACON, COSMOS, EVM, MOVING, OTHERS, RICH, SVM
from tests.costs.deep_upstream import (
    HEAD,
    DeepUpstream,
    NotingBeacon,
    NotingNode,
    PolledSvmUpstream,
    QueryUpstream,
    noting_node,
)
from tests.dashboard.service import PASSWORD, Client, DashboardService
from tests.flows import production
from tests.flows.production import OPEN_EGRESS, PEPPER, Production
from tests.node_stubs import running_stub
from tests.rpc_upstreams import Chain
from tests.service import is_running, until
from tests.svm_upstreams import SvmChain

# Steps below this are not logged.
NOTICED_MS = 1.0
FLUSH_S = 0.2
# Within this time the service has made every call that it makes by itself.
POLLED_S = 3.0
# Spends nothing: it only has to be a key that signs.
SIGNER = "0x" + "11" * 32
PAYMASTER = "0x" + "22" * 20
_serial = itertools.count(1)


def settings_text(database: str, evm: str, moving: str, svm: str, more: str, signer: Path) -> str:
    """`more`: blocks of other upstreams."""
    return f"""
[server]
port = 0
workers = 1
drain_s = 5.0
trusted_proxies = ["127.0.0.1/32"]
[metrics]
port = 0
[follower]
networks = ["{EVM}"]
[prices]
sources = ["fixed"]
[[prices.fixed]]
network = "{EVM}"
usd = "3000"
[database]
url = "{database}"
[keys]
pepper = "{PEPPER}"
auth_failures_per_minute = 1000000
[rpc]
alchemy_methods = true
quicknode_methods = true
ankr_methods = true
[aliases]
alchemy = true
ankr = true
infura = true
quicknode = true
[cache]
bytes = 8388608
[usage]
flush_s = {FLUSH_S}
[dashboard]
url = "https://dashboard.example.com/"
[log]
access = false
slow_step_ms = {NOTICED_MS}
{OPEN_EGRESS}
[[upstreams]]
network = "{EVM}"
url = "{evm}"
[[upstreams]]
network = "{MOVING}"
url = "{moving}"
[[upstreams]]
network = "{SVM}"
url = "{svm}"
{more}
[[bundlers]]
network = "{EVM}"
url = "{evm}"
[[paymasters]]
network = "{EVM}"
address = "{PAYMASTER}"
entry_point = "0.7"
signer_file = "{signer}"
"""


@dataclass
class FreeAccount:
    """An account with a key and things of its own. `seeds`: their ids by the segment of the path before them."""

    id: str
    key: str
    seeds: dict[str, str]
    last_used: float = 0.0


@dataclass
class CostService:
    """The running service, with direct access to its database and its upstreams."""

    running: Production
    database: asyncpg.Connection[asyncpg.Record]
    dashboard: DashboardService
    evm: DeepUpstream
    moving: DeepUpstream
    svm: PolledSvmUpstream
    beacon: NotingBeacon
    cosmos: QueryUpstream
    nodes: list[NotingNode]
    receiver: Receiver
    worker: int
    _read_to: int = 0

    @property
    def port(self) -> int:
        return self.running.port

    def is_replaced(self) -> bool:
        """Whether another process has taken the worker's place since the last call."""
        if is_running(self.worker):
            return False
        self.worker = next(iter(self.running.worker_pids()), 0)
        return True

    # Accounts

    async def new_account(self, plan: str = "free", own: LimitChange | None = None) -> FreeAccount:
        keys = self.dashboard.keys
        email = f"cost{next(_serial)}@example.com"
        row = await keys.create_account(name="Cost", email=email, plan=plan, own=own or LimitChange())
        made, key = await keys.create_key(row["id"], name="Cost", mode="live")
        wallets = {"balances": RICH, "owned": RICH}
        return FreeAccount(row["id"], key, {"keys": made["id"], "accounts": row["id"], **wallets})

    async def holder(self, account: FreeAccount) -> Client:
        """The account's owner, signed in."""
        await self.dashboard.sessions.set_password(account.id, hash_password(PASSWORD))
        return await self.dashboard.holder(await self.dashboard.keys.read_account(account.id))

    async def fill_wallet(self) -> None:
        """Give the rich wallet more tokens than are listed."""
        query = "select number from followed_networks where network = $1 and block is not null"

        async def is_indexed() -> bool:
            return await self.database.fetchval(query, EVM) is not None

        await until(is_indexed, within_s=30.0)
        number, holder = await self.database.fetchval(query, EVM), bytes.fromhex(RICH[2:])
        rows = [(number, holder, each.to_bytes(20, "big"), 1) for each in range(1, MOST_CONTRACTS + 2)]
        await self.database.copy_records_to_table("token_holdings", records=rows)

    # Measurements

    def log_lines(self) -> Iterator[dict[str, Any]]:
        """What was logged since the last call: slow steps, and loops that failed."""
        with self.running.log_file.open("rb") as file:
            file.seek(self._read_to)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self._read_to += len(text)
        for line in text.splitlines():
            if line.startswith(b"{"):
                yield orjson.loads(line)

    def memory(self) -> tuple[int, int]:
        """The resident set of the worker, and its peak since `forget_peak`, in bytes."""
        with contextlib.suppress(OSError), open(f"/proc/{self.worker}/status") as file:
            sizes = dict(line.split(":", 1) for line in file)
            return tuple(int(sizes[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]
        return 0, 0

    def forget_peak(self) -> None:
        with contextlib.suppress(OSError), open(f"/proc/{self.worker}/clear_refs", "w") as file:
            file.write("5")

    async def written(self) -> int:
        """Bytes of the write-ahead log so far."""
        return int(await self.database.fetchval("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn"))

    def calls(self, began: float, ended: float) -> Counter[str]:
        """The upstream calls in this time, by method."""
        notes = [each.noted for each in (self.evm, self.moving, self.svm)] + [self.beacon.noted, self.cosmos.noted]
        notes += [node.noted for node in self.nodes]
        return sum((each.between(began, ended) for each in notes), Counter())

    async def units_of(self, account: str) -> int:
        query = """select coalesce(sum(units), 0) from usage join usage_series on id = series
            where account_id = $1 and step = 'minute'"""
        return int(await self.database.fetchval(query, account))


class Receiver:
    """A webhook receiver that counts what it gets."""

    def __init__(self) -> None:
        self.received = 0
        self.port = 0
        application = web.Application(client_max_size=1 << 24)
        application.router.add_post("/{tail:.*}", self._receive)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)

    def __repr__(self) -> str:
        return f"<Receiver :{self.port}, {self.received} received>"

    async def open(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _receive(self, request: web.Request) -> web.Response:
        await request.read()
        self.received += 1
        return web.Response()


def identity(network: str) -> str:
    """The chain id or genesis hash that an upstream of the network reports."""
    found = load_tables().chains.find(*network.split("/"))
    assert found is not None
    return found.identity


@asynccontextmanager
async def running_service(database: str, home: Path) -> AsyncIterator[CostService]:
    async with AsyncExitStack() as stack:
        evm, moving = (DeepUpstream(Chain(head=HEAD, identity=identity(network))) for network in (EVM, MOVING))
        svm = PolledSvmUpstream(SvmChain(head=1000, identity=identity(SVM)))
        receiver, cosmos = Receiver(), QueryUpstream(identity(COSMOS))
        for each in (evm, moving, svm, receiver, cosmos):
            await each.open()
            stack.push_async_callback(each.close)
        beacon = await stack.enter_async_context(serving(NotingBeacon()))
        others = [(BEACON, beacon.url), (COSMOS, f"http://127.0.0.1:{cosmos.port}/")]
        nodes = [noting_node(family) for family, network in OTHERS.items() if network != COSMOS]
        for node in nodes:
            await stack.enter_async_context(running_stub(node))
            others.append((node.network, node.url))
        others.append((COSMOS, f"ws://127.0.0.1:{cosmos.port}/websocket"))
        more = "\n".join(f'[[upstreams]]\nnetwork = "{network}"\nurl = "{url}"' for network, url in others)
        signer = home / "signer"
        signer.write_text(SIGNER)
        signer.chmod(0o600)
        config = home / "settings.toml"
        config.write_text(settings_text(database, evm.url, moving.url, svm.url, more, signer))
        running = await production.start(config, home / "log", "")
        stack.push_async_callback(production.stop, running)
        pool = Pool(database, size=4, acquire_timeout_s=10.0)
        await pool.open()
        stack.push_async_callback(pool.close)
        connection = await asyncpg.connect(database, timeout=5)
        stack.push_async_callback(connection.close)
        keys = KeyStore(pool, pepper=PEPPER, plans={name: plan.keys for name, plan in load_tables().plans.items()})
        dashboard = DashboardService(running, database, pool, keys, SessionStore(pool, pepper=PEPPER), [])
        (worker,) = running.worker_pids()
        await asyncio.sleep(POLLED_S)
        for node in nodes:
            node.open_to_clients()
        yield CostService(running, connection, dashboard, evm, moving, svm, beacon, cosmos, nodes, receiver, worker)
