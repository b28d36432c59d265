"""How many hosts share the limits. Each announces itself once a second, and counts all that do.

While Valkey is away, the last number holds, which the processes of a host share; and the hosts are counted in Postgres, by the
processes that report themselves there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from proxy.errors import Unavailable
from proxy.store.shared_memory.leased_buckets import LeasedBuckets
from proxy.store.valkey.valkey_address import TAG
from proxy.store.valkey.valkey_link import ValkeyLink

PRESENT = "penstock_present_1"
KEY = f"{TAG}:hosts"
# A host counts as present for this long after its last announcement, which it repeats every PRESENT_S.
PRESENT_FOR_S = 5.0
PRESENT_S = 1.0
# How often the hosts are counted in Postgres while Valkey is away.
COUNT_S = 5.0


class LiveHosts:
    def __init__(
        self,
        link: ValkeyLink,
        host: str,
        buckets: Sequence[LeasedBuckets],
        shared: memoryview[int],
        in_postgres: Callable[[str], Awaitable[int]],
    ) -> None:
        """`host` identifies this host among all that share the Valkey; a process that serves no clients passes none, and only
        counts. `buckets`: the limits that are split between the hosts while Valkey is away. `shared`: the number in the memory
        of the host. `in_postgres` counts the other hosts there."""
        self._link = link
        self._host = host
        self._buckets = buckets
        self._shared = shared
        self._in_postgres = in_postgres
        self._counted_at = -COUNT_S
        self.count = 1
        if shared[0]:
            self._know(shared[0])

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
        if not isinstance(reply, int):
            await self._ask_postgres()
        elif reply > 0:
            self._know(reply)

    async def _ask_postgres(self) -> None:
        if time.monotonic() - self._counted_at < COUNT_S:
            return
        self._counted_at = time.monotonic()
        try:
            others = await self._in_postgres(self._host)
        except Unavailable:
            return
        # A host that reports nothing may still serve.
        self._know(max(self.count, others + (self._host != "")))

    def _know(self, count: int) -> None:
        self.count = self._shared[0] = count
        for each in self._buckets:
            each.least_share = 1.0 / count
