"""Sends the cells of the cost matrix to a running service and measures what each of them cost.

Cells are sent one after another, so that a slow step and an upstream call belong to the cell that was under way. Each goes out
with the key of the Free account that has rested longest: at any moment every account is within its plan. A cell that costs more
than such an account gets in a second comes from a new one with more units per second: it pays the same and does not wait for
them, so its work is not spread over many seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import aiohttp
import orjson

from proxy.store.postgres.keys import LimitChange
from tests.costs.cells import RESULT, TABLES, Request, Row, Subscriptions, is_short
from tests.costs.service import FLUSH_S, CostService, FreeAccount
from tests.dashboard.service import Client
from tests.http_client import Closed, Reply, request
from tests.isolation.loop_steps import slowness
from tests.service import until
from tests.web.worker import ChunkedClient

# What one unit may cost. SECURITY.md states these bounds.
MAX_STEP_MS = 5.0
MAX_GROWTH = 64 << 20
BACK_WITHIN_S = 10.0
# Bytes of the write-ahead log per unit: eight pages of Postgres. A small row costs a page and its indexes; a request that
# writes a hundred thousand rows has to cost accordingly.
MAX_WRITTEN = 64 << 10
# Bytes of it for each address or other value of a webhook's filter. A plan limits these by themselves, per day. When they are
# removed, they are written again, with whole pages.
MAX_PER_VALUE = 256
PURGED_PER_VALUE = 512
# What the service writes by itself while a cell is measured: usage, records of requests, reports of processes, and whole pages
# after a checkpoint.
WRITTEN_ANYWAY = 2 << 20
# What a worker may keep of a cell: caches that fill up once.
KEPT = 24 << 20
ACCOUNTS = 12
REPLY_S = 60.0
# Within this time charges are in the database.
FLUSHED_S = 2 * FLUSH_S + 0.3
# A client may lose an early reply if it is still sending. One that gets none at all waits longer.
LONGEST_REPLY_MS = 10_000
# After a reply, work on behalf of the cell may go on for a moment.
SETTLE_S = 0.01
QUIET_S, QUIET_WITHIN_S = 0.05, 3.0
RESTS_S = 0.12
# The receiver in the examples of the API spec.
NO_RECEIVER = b"https://hooks.example.com/penstock"
# Paths at which cells create what a plan allows only a few of.
CREATED = frozenset({"/v1/webhooks", "/v1/gas/policies"})
# Subscriptions are opened faster than a plan allows, so that a row takes seconds: the account holds them for long. Dear cells
# would wait for units.
FAST = LimitChange(requests_per_second=10_000, units_per_second=100_000)
LOOK_UP = "eth_getTransactionByHash"
TRIES = 5
UNITS = "x-compute-units"
# A row of subscriptions ends after so many refusals: the account has no more room.
FEW_REFUSALS = 20


@dataclass(slots=True)
class Cost:
    """What a cell cost.

    `steps`: the longest step of the worker's event loop in ms, for each time that it was sent. `growth`: the peak of its memory
    above the size before. `kept`: what was left of it 10 s later, the least over all times, because some memory is
    allocated once. `written`: bytes of the write-ahead log. `values`: of a webhook's filter.
    """

    row: str
    shape: str
    size: int = 0
    values: int = 0
    status: int = 0
    units: int = 0
    took_ms: float = 0.0
    steps: list[float] = field(default_factory=list)
    growth: int = 0
    kept: int | None = None
    written: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    lost: str = ""

    @property
    def name(self) -> str:
        return f"{self.row} / {self.shape}"

    @property
    def step_ms(self) -> float:
        """The least over all times that it was sent: longer ones were the machine's."""
        return min(self.steps, default=0.0)

    @property
    def list_price(self) -> int:
        """Of the upstream calls."""
        return sum(PRICES.get(method, 0) * count for method, count in self.calls.items())

    def faults(self) -> Iterator[str]:
        """The names of the bounds that were exceeded."""
        paid = max(self.units, 1)
        bounds = {
            "step": self.step_ms > MAX_STEP_MS,
            "growth": self.growth > MAX_GROWTH,
            "kept": (self.kept or 0) > KEPT,
            "written": self.written > MAX_WRITTEN * paid + allowed_for(self.values) + WRITTEN_ANYWAY,
            "price": self.list_price > paid,
            "failed": self.status == 500 or (not self.status and self.took_ms > LONGEST_REPLY_MS),
            "lost": bool(self.lost),
        }
        return (name for name, exceeded in bounds.items() if exceeded)


def allowed_for(values: int) -> int:
    """Bytes for values of filters, if the plan limits them."""
    return values * MAX_PER_VALUE if TABLES.plans["free"].webhook_values_per_day else 0


PRICES = {name: method.price for family in TABLES.methods.values() for name, method in family.items()}


class Driver:
    def __init__(self, service: CostService) -> None:
        self._service = service
        self._accounts: list[FreeAccount] = []
        self._holder: Client | None = None
        self._holder_seeds: dict[str, str] = {}
        # The holder's account, and its units when they were last read.
        self._holder_id = ""
        self._holder_units = 0
        self._operator: Client | None = None
        self._witness: FreeAccount | None = None
        # The account of the next dear cell.
        self._rich: FreeAccount | None = None
        # Requests of the witness, with the row after which each was sent.
        self._seen: dict[str, str] = {}
        # Bytes that the removal of deleted webhooks will write.
        self._to_purge = 0
        # Transactions that webhooks wait for and that were not looked up yet.
        self._to_look_up = 0

    def __repr__(self) -> str:
        return f"<Driver of {len(self._accounts)} accounts>"

    async def prepare(self) -> None:
        service = self._service
        await service.fill_wallet()
        self._witness = await service.new_account("growth")
        self._accounts = [await service.new_account() for _ in range(ACCOUNTS)]
        await until(self._knows_keys)
        for account in self._accounts:
            await self._seed(account)
        await self._new_holder()
        self._operator = await service.dashboard.operator()

    async def _knows_keys(self) -> bool:
        replies = [await self._send("GET", "/v1/chains", key=each.key) for each in (*self._accounts, self.witness)]
        return all(reply.status == 200 for reply in replies)

    @property
    def witness(self) -> FreeAccount:
        assert self._witness is not None
        return self._witness

    async def _seed(self, account: FreeAccount) -> None:
        """Things of the account, so that operations on them have something to do."""
        url = f"http://127.0.0.1:{self._service.receiver.port}/{account.id}"
        webhook = {
            "url": url,
            "chain": "ethereum",
            "event_type": "address_activity",
            "config": {"addresses": ["0x" + "11" * 20]},
        }
        policy = {"name": "Costs", "chain": "ethereum", "rules": {}}
        for name, path, body in (("webhooks", "/v1/webhooks", webhook), ("policies", "/v1/gas/policies", policy)):
            reply = await self._send("POST", path, orjson.dumps(body), key=account.key)
            assert reply.status == 201, reply
            account.seeds[name] = reply.json["id"]

    # Sending

    async def _send(self, method: str, path: str, body: bytes | None = None, *, key: str = "", **headers: str) -> Reply:
        """One request on a new connection. A connection that is closed without a reply has the status 0."""
        data = request(method, path, body or b"", key=key or None, **headers)
        try:
            async with await ChunkedClient.open(self._service.port) as client:
                return await client.send(data, REPLY_S)
        except (Closed, OSError, TimeoutError):
            return Reply(0, {}, b"")

    async def _send_as(self, row: Row, cell: Request) -> Reply:
        match row.caller:
            case "key":
                return await self._with_key(cell)
            case "account":
                return await self._as_person(cell, self._holder)
            case "admin":
                return await self._as_person(cell, self._operator)
            case _:
                return await self._send(cell.method, cell.path, cell.body, X_Forwarded_For=_address())

    async def _with_key(self, cell: Request) -> Reply:
        """With the account that has rested longest; with another one if its limits are reached."""
        if cell.is_dear:
            assert self._rich is not None
            return await self._send_from(self._rich, cell)
        for _ in range(2):
            reply = await self._send_from(await self._rested(), cell)
            if reply.status != 429:
                return reply
        return await self._send_from(await self._rested(), cell)

    async def _send_from(self, account: FreeAccount, cell: Request) -> Reply:
        path = _seeded(cell.path, self._accounts, account)
        body, units = self._reachable(cell.body), 0
        if cell.first is not None and body is not None:
            first = await self._send(cell.method, path, cell.first, key=account.key)
            units = units_of(first)
            result = first.json.get("result") if first.status == 200 else None
            body = body.replace(RESULT, str(result).encode())
        reply = await self._send(cell.method, path, body, key=account.key, **cell.headers)
        await self._clean_up(cell, reply, account)
        return replace(reply, headers={**reply.headers, UNITS: str(units + units_of(reply))})

    def _reachable(self, body: bytes | None) -> bytes | None:
        """The body with a receiver that exists: the example's does not."""
        return body and body.replace(NO_RECEIVER, b"http://127.0.0.1:%d/" % self._service.receiver.port)

    async def _clean_up(self, cell: Request, reply: Reply, account: FreeAccount) -> None:
        """Delete what the cell created: a plan allows only a few."""
        if reply.status == 201 and cell.path in CREATED:
            await self._send("DELETE", f"{cell.path}/{reply.json['id']}", key=account.key)

    async def _rested(self) -> FreeAccount:
        account = min(self._accounts, key=lambda each: each.last_used)
        await asyncio.sleep(max(0.0, account.last_used + RESTS_S - time.monotonic()))
        account.last_used = time.monotonic()
        return account

    async def _as_person(self, cell: Request, person: Client | None) -> Reply:
        assert person is not None
        cookies = "; ".join(f"{name}={value}" for name, value in person.cookies.items())
        headers = {"Cookie": cookies, "X_CSRF_Token": person.csrf, "X_Forwarded_For": person.address}
        reply = await self._send(cell.method, cell.path, self._reachable(cell.body), **headers)
        if reply.status == 201 and cell.path.replace("/account", "") in CREATED:
            await self._send("DELETE", f"{cell.path}/{reply.json['id']}", None, **headers)
        return reply

    async def _sign_in(self) -> None:
        """The row before may have ended the session or deleted the account."""
        session = await self._as_person(Request("", "GET", "/v1/account/session"), self._holder)
        if session.status == 200:
            return
        await self._new_holder()

    async def _new_holder(self) -> None:
        """Sign in the owner of a new account, which need not wait for the units of dear cells."""
        account = await self._new_account(own=FAST)
        self._holder, self._holder_seeds = await self._service.holder(account), account.seeds
        self._holder_id, self._holder_units = account.id, 0

    async def _units_of_holder(self) -> int:
        """What the holder's account was charged since the last call. Replies to sessions do not say it."""
        await asyncio.sleep(FLUSHED_S)
        before, self._holder_units = self._holder_units, await self._service.units_of(self._holder_id)
        return self._holder_units - before

    async def _new_account(self, own: LimitChange | None = None) -> FreeAccount:
        account = await self._service.new_account(own=own)
        await until(lambda: self._is_known(account))
        await self._seed(account)
        return account

    # Cells

    async def measure(self, row: Row, *, short: bool) -> AsyncIterator[Cost]:
        """Send the cells of a row. `short`: only those of the short form. One with a slow step is sent again, to see
        whether the step was its own."""
        if row.caller == "account":
            await self._sign_in()
        for cell in row.requests(self._holder_seeds if row.caller == "account" else self._accounts[0].seeds):
            if short and not is_short(row, cell.shape):
                continue
            cost = Cost(row.name, cell.shape, size=len(cell.body or b""), values=cell.values)
            for _ in range(TRIES):
                if cell.is_dear and row.caller == "key":
                    self._rich = await self._new_account(own=FAST)
                async with self._measuring(cost):
                    replies = await asyncio.gather(*(self._send_as(row, cell) for _ in range(cell.times)))
                    cost.status = replies[0].status
                    cost.units = sum(map(units_of, replies))
                if row.caller == "account" and cost.list_price:
                    cost.units = await self._units_of_holder()
                if not {"step", "kept"} & set(cost.faults()):
                    break
            yield cost
        await self._leave_mark(row.name)

    @asynccontextmanager
    async def _measuring(self, cost: Cost) -> AsyncIterator[None]:
        service = self._service
        written = await service.written()
        service.forget_peak()
        before, _ = service.memory()
        [*service.log_lines()]
        began = time.monotonic()
        yield
        cost.took_ms = (time.monotonic() - began) * 1000
        await self._settle()
        ended = time.monotonic()
        lines = [*service.log_lines()]
        cost.steps.append(max(map(_step_ms, lines), default=0.0) / slowness())
        cost.calls = self._own_calls(service.calls(began, ended), cost)
        cost.written = self._own_bytes(await service.written() - written, cost)
        failed = [line["loop"] for line in lines if line["message"] == "loop failed"]
        cost.lost = cost.lost or ", ".join(failed)
        if service.is_replaced():
            cost.lost = "the worker"
            await until(self._knows_keys)
            return
        resident, peak = service.memory()
        cost.growth = max(cost.growth, peak - before)
        end = time.monotonic() + BACK_WITHIN_S
        while resident - before > KEPT and time.monotonic() < end:
            await asyncio.sleep(0.1)
            resident, _ = service.memory()
        cost.kept = min(resident - before, resident - before if cost.kept is None else cost.kept)

    def _own_bytes(self, written: int, cost: Cost) -> int:
        """Without what is written while values of earlier cells are purged."""
        purged = min(written, self._to_purge)
        self._to_purge += cost.values * PURGED_PER_VALUE - purged
        return written - purged

    def _own_calls(self, calls: Counter[str], cost: Cost) -> Counter[str]:
        """Without the look-ups of transactions that webhooks wait for. There is one for each value, in the background."""
        self._to_look_up += cost.values
        looked_up = min(calls[LOOK_UP], self._to_look_up)
        self._to_look_up -= looked_up
        return calls - Counter({LOOK_UP: looked_up})

    async def _settle(self) -> None:
        """Wait until upstreams are quiet: a cell may have caused work that goes on after its reply."""
        await asyncio.sleep(SETTLE_S)
        with contextlib.suppress(AssertionError):
            await until(self._is_quiet, within_s=QUIET_WITHIN_S, every_s=SETTLE_S)

    def _is_quiet(self) -> bool:
        return not self._service.calls(time.monotonic() - QUIET_S, math.inf)

    async def _leave_mark(self, row: str) -> None:
        """A request of another account, which must be recorded."""
        name = f"witness-{len(self._seen)}"
        self._seen[name] = row
        await self._send("GET", "/v1/requests/none", key=self.witness.key, X_Request_Id=name)

    # Subscriptions

    async def measure_subscriptions(self, row: Subscriptions, *, seconds: float) -> Cost:
        """Open as many subscriptions as the plan of a new Free account allows, and hold them for a while.

        The account may open them faster than its plan says: what it holds after minutes counts.
        """
        cost = Cost(row.name, row.shape)
        for _ in range(TRIES):
            account = await self._service.new_account(own=FAST)
            await until(partial(self._is_known, account))
            cost.size = 0
            async with self._measuring(cost), aiohttp.ClientSession() as session:
                await self._subscribe(session, row, account, cost, time.monotonic() + seconds)
            await asyncio.sleep(FLUSHED_S)
            cost.units = await self._service.units_of(account.id)
            if not {"step", "kept"} & set(cost.faults()):
                break
        await self._leave_mark(cost.name)
        return cost

    async def _is_known(self, account: FreeAccount) -> bool:
        return (await self._send("GET", "/v1/chains", key=account.key)).status == 200

    async def _subscribe(
        self, session: aiohttp.ClientSession, row: Subscriptions, account: FreeAccount, cost: Cost, until_at: float
    ) -> None:
        plan, service = TABLES.plans["free"], self._service
        url = f"http://127.0.0.1:{service.port}/v1/ws/{row.network}"
        sockets: list[aiohttp.ClientWebSocketResponse] = []
        refused = 0
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            while cost.size < row.count and refused < FEW_REFUSALS and time.monotonic() < until_at:
                if cost.size % plan.subscriptions == 0:
                    sockets.append(await session.ws_connect(url, max_msg_size=0, headers={"X-API-Key": account.key}))
                calls = [row.params(cost.size + more, service.moving.chain.head) for more in range(row.at_once)]
                confirmed = await _subscribed(sockets[-1], row.method, calls)
                cost.status = 200 if confirmed else cost.status or 400
                cost.size += confirmed
                refused += row.at_once - confirmed
        async with asyncio.TaskGroup() as group:
            readers = [group.create_task(_read(socket)) for socket in sockets]
            while time.monotonic() < until_at:
                service.moving.chain.head += 1
                service.svm.chain.head += 1
                await asyncio.sleep(0.25)
            for reader in readers:
                reader.cancel()
        for socket in sockets:
            await socket.close()

    # The end

    async def unrecorded(self) -> list[str]:
        """Rows after which requests of another account are no longer recorded."""
        names = [*self._seen]

        async def written() -> set[str]:
            rows = await self._service.database.fetch("select client_id from requests where client_id = any($1)", names)
            return {row["client_id"] for row in rows}

        with contextlib.suppress(AssertionError):
            await until(lambda: _all_in(written, names), every_s=0.2)
        missing = [name for name in names if name not in await written()]
        return [self._seen[name] for name in missing[:1]]

    async def is_usage_written(self) -> bool:
        with contextlib.suppress(AssertionError):
            await until(self._witness_is_counted, every_s=0.2)
            return True
        return False

    async def _witness_is_counted(self) -> bool:
        return await self._service.units_of(self.witness.id) >= len(self._seen)

    async def is_delivered(self) -> bool:
        """Whether an event of another account still reaches its receiver."""
        await self._seed(self.witness)
        path = f"/v1/webhooks/{self.witness.seeds['webhooks']}/test"
        before = self._service.receiver.received
        reply = await self._send("POST", path, b"{}", key=self.witness.key)
        with contextlib.suppress(AssertionError):
            await until(lambda: self._service.receiver.received > before)
            return reply.status < 300
        return False


def units_of(reply: Reply) -> int:
    return int(reply.headers.get(UNITS, 0))


async def _all_in(written: Any, names: list[str]) -> bool:
    return len(await written()) == len(names)


async def _subscribed(socket: aiohttp.ClientWebSocketResponse, method: str, calls: list[list[Any]]) -> int:
    """Subscribe with each of these params, and return how many were confirmed."""
    for number, params in enumerate(calls):
        await socket.send_bytes(orjson.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params}))
    confirmed = replies = 0
    async with asyncio.timeout(20.0):
        while replies < len(calls):
            message = await socket.receive()
            if message.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                raise TimeoutError
            reply = orjson.loads(message.data)
            replies += "id" in reply
            confirmed += "id" in reply and "result" in reply
    return confirmed


async def _read(socket: aiohttp.ClientWebSocketResponse) -> None:
    async for _ in socket:
        pass


def _step_ms(line: dict[str, Any]) -> float:
    """The CPU time of a step. Time of other threads counts if they ran for nearly all of it: they kept the interpreter."""
    if line["message"] != "slow step" or line["of"] != "worker":
        return 0.0
    late = line["wall_ms"] - 1.0
    return float(max(line["cpu_ms"], line["process_ms"] if line["process_ms"] > 0.9 * late else 0.0))


_addresses = iter(range(1, 1 << 24))


def _address() -> str:
    """Each client without a key has its own: attempts to sign in are limited by address."""
    number = next(_addresses)
    return f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"


def _seeded(path: str, accounts: list[FreeAccount], account: FreeAccount) -> str:
    """The path, with the ids of this account instead of the first one's."""
    for segment, seed in accounts[0].seeds.items():
        path = path.replace(seed, account.seeds.get(segment, seed))
    return path
