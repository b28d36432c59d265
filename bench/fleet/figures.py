"""Figures of a running fleet: heads that go backwards, shorter branches, reads after writes, a rolling update, and the
work of the parts.

Each is measured as a client would see it, through the balancer or on the gateways themselves, beside the traffic of the fleet.
"""

from __future__ import annotations

import asyncio
import random
import signal
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import asyncpg

from bench.fleet.one_machine import FleetOnOneMachine
from bench.fleet.programs import NETWORK, FleetPart

# Seconds between blocks while heads are compared: at the network's own pace there would be few to compare.
BLOCK_S = 0.25
WRITES = 200
REORGANISATIONS = 20
ADDRESS = "0x" + "ab" * 20


class FleetFigures:
    def __init__(self, fleet: FleetOnOneMachine) -> None:
        self._fleet = fleet
        self._gateways = [part for part in fleet.parts if part.kind == "gateway"]

    def __repr__(self) -> str:
        return f"<FleetFigures of {self._fleet!r}>"

    async def measure(self, seconds: float) -> AsyncIterator[str]:
        """All figures, one line each."""
        yield await self.backwards(seconds, "gateways in turn", [part.port for part in self._gateways])
        yield await self.backwards(seconds, "balancer, hash by key", [self._fleet.port])
        yield await self.shorter_branch()
        yield await self.reads_after_writes()
        yield await self.work(seconds)
        yield await self.rolling_update()

    # Seen by clients

    async def backwards(self, seconds: float, name: str, ports: list[int]) -> str:
        """Read the head on these ports in turn, one read after the other."""
        newest = reads = older = 0
        async with self._session() as session, self._blocks():
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                found = await self._head(session, ports[reads % len(ports)])
                reads += 1
                older += found < newest
                newest = max(newest, found)
        return f"latest goes backwards ({name}, a block every {BLOCK_S} s): {older} of {reads} reads"

    async def shorter_branch(self) -> str:
        """Replace five blocks by three, and read the head through the balancer until it is the shorter branch's."""
        took_s: list[float] = []
        async with self._session() as session:
            while len(took_s) < REORGANISATIONS:
                await asyncio.sleep(random.uniform(1.0, 2.0))
                before = self._fleet.chain.head
                while await self._head(session, self._fleet.port) < before:
                    pass
                self._fleet.chain.drop(5)
                self._fleet.chain.mine((), (), ())
                began = time.monotonic()
                while await self._head(session, self._fleet.port) >= before:
                    pass
                took_s.append(time.monotonic() - began)
        median_ms, most_ms = statistics.median(took_s) * 1000, max(took_s) * 1000
        return f"shorter branch is shown after {median_ms:.0f} ms (median), {most_ms:.0f} ms (longest of {len(took_s)})"

    async def reads_after_writes(self) -> str:
        """Write on one gateway, then read on the others, where an older result was cached before."""
        writes = old = 0
        answers = self._fleet.upstream.answers
        answers["eth_sendRawTransaction"] = lambda _: f"0x{writes:064x}"
        answers["eth_getBalance"] = lambda _: hex(writes)
        writer, *readers = [part.port for part in self._gateways]
        async with self._session() as session:
            for _ in range(WRITES):
                for port in readers:
                    await self._result(session, port, "eth_getBalance", ADDRESS, "latest")
                writes += 1
                await self._result(session, writer, "eth_sendRawTransaction", f"0x{writes:064x}")
                seen = [await self._result(session, port, "eth_getBalance", ADDRESS, "latest") for port in readers]
                old += seen != [hex(writes)] * len(readers)
        return f"reads after writes on {len(readers)} other gateways: {old} of {WRITES} old"

    async def rolling_update(self, calls: int = 0) -> str:
        """Replace one gateway after the other, as an update does, beside the clients of the fleet: once, and again until
        this many calls were answered."""
        ledger, began = self._fleet.ledger, time.monotonic()
        answered, failed, gaps, updates = ledger.answered, ledger.failed, ledger.gaps, 0
        while not updates or ledger.answered - answered < calls:
            for part in self._gateways:
                await self._replace(part)
            updates += 1
        took_s = time.monotonic() - began
        lost = f"{ledger.failed - failed} of {ledger.answered - answered} calls lost, {ledger.gaps - gaps} gaps on a socket"
        times = "once" if updates == 1 else f"{updates} times"
        return f"{len(self._gateways)} gateways replaced {times} in {took_s:.0f} s: {lost}"

    async def _replace(self, part: FleetPart) -> None:
        process = part.child.process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        await process.wait()
        while part.child.process is process or not await part.serves():  # noqa: ASYNC110 - another process has no event
            await asyncio.sleep(0.1)
        # The balancer checks every second, and believes the second success.
        await asyncio.sleep(3.0)

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[aiohttp.ClientSession]:
        timeout = aiohttp.ClientTimeout(total=30.0)
        async with aiohttp.ClientSession(headers={"X-API-Key": self._fleet.key}, timeout=timeout) as session:
            yield session

    async def _head(self, session: aiohttp.ClientSession, port: int) -> int:
        return int(await self._result(session, port, "eth_blockNumber"), 16)

    async def _result(self, session: aiohttp.ClientSession, port: int, method: str, *params: str) -> Any:
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        async with session.post(f"http://127.0.0.1:{port}/v1/rpc/{NETWORK}", json=body) as response:
            return (await response.json(content_type=None))["result"]

    @asynccontextmanager
    async def _blocks(self) -> AsyncIterator[None]:
        async def mine() -> None:
            while True:
                await asyncio.sleep(BLOCK_S)
                self._fleet.chain.mine(())

        mining = asyncio.get_running_loop().create_task(mine())
        try:
            yield
        finally:
            mining.cancel()
            await asyncio.gather(mining, return_exceptions=True)

    # The load of the parts

    async def work(self, seconds: float) -> str:
        """Connections and usage rows of Postgres, and function calls of Valkey, while the callers run."""
        answered = self._fleet.ledger.answered
        rows, asks, began = await self._usage_rows(), await self._asks(), time.monotonic()
        await asyncio.sleep(seconds)
        took_s = time.monotonic() - began
        per_s = [
            (self._fleet.ledger.answered - answered) / took_s,
            (await self._usage_rows() - rows) / took_s,
            (await self._asks() - asks) / took_s,
        ]
        shown = f"{per_s[0]:.0f} calls/s, {per_s[1]:.1f} usage rows/s, {per_s[2]:.0f} Valkey function calls/s"
        return f"{len(self._gateways)} gateways: {shown}, {await self._connections()} Postgres connections"

    async def _usage_rows(self) -> float:
        """Rows of minutes that were written. Each batch of a host writes two more, to be counted once."""
        words = "select sum(n_tup_ins + n_tup_upd) from pg_stat_user_tables where relname like 'usage_minutes%'"
        return float(await self._ask_postgres(words))

    async def _connections(self) -> int:
        words = "select count(*) from pg_stat_activity where application_name like 'penstock%'"
        return int(await self._ask_postgres(words))

    async def _ask_postgres(self, words: str) -> Any:
        connection = await asyncpg.connect(self._fleet.database.url)
        try:
            return await connection.fetchval(words) or 0
        finally:
            await connection.close()

    async def _asks(self) -> int:
        """Functions that clients have called on the first Valkey. Its count of all commands includes those inside functions."""
        part = next(part for part in self._fleet.parts if part.kind == "valkey")
        reader, writer = await asyncio.open_connection("127.0.0.1", part.port)
        writer.write(b"INFO commandstats\r\n")
        text = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        return int(text.partition(b"cmdstat_fcall:calls=")[2].partition(b",")[0] or 0)
