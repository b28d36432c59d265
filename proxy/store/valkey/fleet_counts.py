"""How many sockets and subscriptions each account has open, over all hosts.

Each host keeps its own number in Valkey, for a while: numbers of a host that is gone expire. A host that opens one more writes
its number and gets the sum of all. Changes are written soon after, and all numbers again before they expire.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from proxy.store.shared_memory.account_counts import AccountCounts, CountKind
from proxy.store.valkey.valkey_address import TAG
from proxy.store.valkey.valkey_link import ValkeyLink

COUNT = "penstock_count_1"
KEPT_S = 30.0
RENEW_S = 10.0
WRITE_S = 0.5

_Place = tuple[CountKind, int]


class FleetCounts:
    def __init__(self, link: ValkeyLink, counts: AccountCounts, host: str, hosts: Callable[[], int]) -> None:
        """`hosts`: how many hosts there are."""
        self._link = link
        self._counts = counts
        self._host = host
        self._hosts = hosts
        # Open sockets and subscriptions of other hosts, as last reported.
        self._others: dict[_Place, int] = {}
        # In the order of their changes: Valkey gets the same commands in each run of a simulation.
        self._changed: dict[_Place, None] = {}

    def __repr__(self) -> str:
        return f"<FleetCounts of {len(self._others)}>"

    async def is_within(self, kind: CountKind, bucket_index: int, most: int, *, place: int) -> bool:
        """Whether one more is within the limit of all hosts together. `place`: its number on this host when it was counted."""
        own = self._counts.total(kind, bucket_index)
        reply = await self._link.ask(*self._words(kind, bucket_index, own))
        self._heard(kind, bucket_index, own, reply)
        others = self._others.get((kind, bucket_index), 0)
        # Sockets or subscriptions that were counted before it may have been closed meanwhile.
        place = min(place, self._counts.total(kind, bucket_index))
        return place <= (most - others if isinstance(reply, int) else self._share(most))

    def room(self, kind: CountKind, bucket_index: int, most: int) -> int:
        """How many this host may have, given the last known counts of the others."""
        self._changed[(kind, bucket_index)] = None
        return most - self._others.get((kind, bucket_index), 0) if self._link.is_up else self._share(most)

    def changed(self, kind: CountKind, bucket_index: int) -> None:
        self._changed[(kind, bucket_index)] = None

    def _share(self, most: int) -> int:
        """While Valkey is away: an equal share for each host."""
        return math.ceil(most / self._hosts())

    def _words(self, kind: CountKind, bucket_index: int, own: int) -> tuple[str, ...]:
        return ("FCALL", COUNT, "1", f"{TAG}:{kind}:{bucket_index}", self._host, str(own), str(int(KEPT_S * 1000)))

    def _heard(self, kind: CountKind, bucket_index: int, own: int, reply: Any) -> None:
        """`own`: this host's count when it asked. If it is 0, the counts of other hosts are not needed."""
        if not own:
            self._others.pop((kind, bucket_index), None)
        elif isinstance(reply, int):
            self._others[(kind, bucket_index)] = reply - own

    async def run(self) -> None:
        """A supervised loop: write changed counts often, and all of them from time to time."""
        loop = asyncio.get_running_loop()
        renewed_at = loop.time()
        while True:
            await asyncio.sleep(WRITE_S)
            changed, self._changed = self._changed, {}
            if loop.time() - renewed_at > RENEW_S:
                renewed_at = loop.time()
                changed |= dict.fromkeys(self._others)
            for kind, bucket_index in changed:
                own = self._counts.total(kind, bucket_index)
                self._link.send(self._words(kind, bucket_index, own), partial(self._heard, kind, bucket_index, own))
