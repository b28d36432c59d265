"""How many hosts share the limits. Each says once a second that it is there, and counts all that do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from proxy.store.leased_windows import LeasedWindows
from proxy.store.valkey_address import TAG
from proxy.store.valkey_link import ValkeyLink

PRESENT = "penstock_present_1"
KEY = f"{TAG}:hosts"
# A host is present for this long after it last said so, which it does every PRESENT_S.
PRESENT_FOR_S = 5.0
PRESENT_S = 1.0


class LiveHosts:
    def __init__(self, link: ValkeyLink, host: str, windows: Sequence[LeasedWindows]) -> None:
        """`host` identifies this host among all that share the Valkey; a process that serves no clients passes none, and only
        counts. `windows`: the limits that are split between the hosts while Valkey is away."""
        self._link = link
        self._host = host
        self._windows = windows
        self.count = 1

    def __repr__(self) -> str:
        return f"<LiveHosts {self.count}>"

    async def run(self) -> None:
        """A supervised loop."""
        while True:
            await self.renew()
            await asyncio.sleep(PRESENT_S)

    async def renew(self) -> None:
        announces = ("FCALL", PRESENT, "1", KEY, self._host, str(int(PRESENT_FOR_S * 1000)))
        reply = await self._link.ask(*(announces if self._host else ("ZCARD", KEY)))
        if isinstance(reply, int) and reply > 0:
            self._know(reply)

    def _know(self, count: int) -> None:
        self.count = count
        for each in self._windows:
            each.least_share = 1.0 / count
