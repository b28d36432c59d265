"""Rates of requests with a session: by client address, by person and by account.

These requests cost no units, but each takes time of the worker and of the database. The buckets are shared by the workers of a
host. The address is charged before the session is looked up, so an invalid cookie costs its sender too; the person and the
account are charged for each part that a page reads at once.
"""

from __future__ import annotations

import math

from proxy.core.access import client_prefix_of
from proxy.errors import RateLimited
from proxy.store.shared_memory.bucket_table import SharedBucketTable

# A bucket holds the requests of this many seconds, so that opening several pages at once is not refused.
HOLDS_S = 5.0
# The people of an account, or of an address, share this many times the rate of one person.
SHARED = 5


class SessionRates:
    def __init__(self, per_second: float, buckets: SharedBucketTable) -> None:
        self._per_second = per_second
        self._buckets = buckets

    def __repr__(self) -> str:
        return f"<SessionRates {self._per_second:g}/s for each person>"

    def charge_address(self, address: str, now: float) -> None:
        """Raise RateLimited if the address sends too many requests."""
        self._take(f"session address {client_prefix_of(address)}", now, 1.0 / (SHARED * self._per_second))

    def charge_person(self, person: str, account: str, now: float, *, reads: int = 1) -> None:
        """Raise RateLimited if the person, or all people of the account together, send too many requests."""
        cost_s = min(reads / self._per_second, HOLDS_S)
        self._take(f"session person {person}", now, cost_s)
        self._take(f"session account {account}", now, cost_s / SHARED)

    def _take(self, name: str, now: float, cost_s: float) -> None:
        if wait_s := self._buckets.take(name, now, cost_s, holds_s=HOLDS_S):
            raise RateLimited(
                f"too many dashboard requests: at most {self._per_second:g} a second for each person",
                retry_after_s=math.ceil(wait_s),
            )
