"""Writes through the API, one after the other: how long they fail after a break, and whether an acknowledged one is lost."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp

from bench.fleet.ledger import FleetLedger
from bench.fleet.programs import NETWORK

EVERY_S = 0.2
ADDRESS = "0x" + "cd" * 20


class WriteWatch:
    """Each write puts the next number into the URL of a webhook that matches nothing. A later read shows it or a later one."""

    def __init__(self, ledger: FleetLedger, *, port: int, key: str) -> None:
        self._ledger = ledger
        self._base = f"http://127.0.0.1:{port}/v1/webhooks"
        self._headers = {"X-API-Key": key}
        self._path = ""
        self._number = self._acknowledged = 0
        # When the last acknowledged write was sent.
        self.sent_at = 0.0

    def __repr__(self) -> str:
        return f"<WriteWatch {self._acknowledged} of {self._number}>"

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=5.0)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
            while True:
                await asyncio.sleep(EVERY_S)
                try:
                    await (self._write(session) if self._path else self._create(session))
                except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
                    self._ledger.writes_failed += 1

    async def _create(self, session: aiohttp.ClientSession) -> None:
        body = {
            "url": self._url,
            "chain": NETWORK.partition("/")[0],
            "event_type": "address_activity",
            "config": {"addresses": [ADDRESS]},
        }
        async with session.post(self._base, json=body) as response:
            if response.status == 201:
                self._path = f"{self._base}/{(await response.json())['id']}"

    async def _write(self, session: aiohttp.ClientSession) -> None:
        async with session.get(self._path) as response:
            if response.status == 200:
                self._compare(await response.json())
        self._number += 1
        sent_at = time.monotonic()
        async with session.patch(self._path, json={"url": self._url}) as response:
            if response.status == 200:
                self._acknowledged, self.sent_at = self._number, sent_at
                self._ledger.writes += 1
            else:
                self._ledger.writes_failed += 1

    @property
    def _url(self) -> str:
        return f"https://127.0.0.1/{self._number}"

    def _compare(self, webhook: dict[str, Any]) -> None:
        self._ledger.writes_lost += max(0, self._acknowledged - int(webhook["url"].rpartition("/")[2]))
        self._acknowledged = min(self._acknowledged, int(webhook["url"].rpartition("/")[2]))

    async def acknowledged_after(self, at: float) -> None:
        """Wait for a write that was sent after this time."""
        while self.sent_at <= at:  # noqa: ASYNC110 - the writes are a loop, too
            await asyncio.sleep(0.05)
