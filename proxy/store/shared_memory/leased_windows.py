"""Buckets that all hosts share: tokens are leased from Valkey, kept in the memory of the host, and spent without asking.

Each slot has a record of leased tokens, in seconds of refill (core/limits). `take` spends them under the slot's mutex, like
`Windows.take`. If they run out it returns ASK: the caller's worker asks Valkey for its own waiting calls (valkey/lease_keeper)
and leaves the surplus here for all workers of the host. The rules of the leases are in schemas/valkey/functions.lua.

Tokens of two slots of Valkey's clock may be held at once: those of the older one are spent first, and end first. A part of the
tokens is kept in reserve: when only the reserve is left, more tokens are asked for, before a call has to wait.

While Valkey is away, the host uses its share of each limit: the part of all grants that it got lately, and at least one part of
as many as there are hosts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from proxy.core.limits import TOLERANCE_S, BucketRates
from proxy.store.shared_memory import robust_mutexes
from proxy.store.shared_memory.host_memory import LEASES_AT
from proxy.store.shared_memory.lease_records import (
    ALL,
    ANSWERED_AT,
    ASKED_UNTIL,
    BASE_R,
    BASE_U,
    CELLS,
    DEMAND_R,
    DEMAND_U,
    DRY_UNTIL,
    EDGE_R,
    EDGE_U,
    FLEET_EDGE,
    MINE,
    MINE_AT,
    NEW_SLOT,
    NEW_UNTIL,
    OLD_R,
    OLD_SLOT,
    OLD_U,
    READY_R,
    READY_U,
    REPORTED_AT,
    RESERVE_R,
    RESERVE_U,
    UNTIL,
    LeaseGrant,
    LeaseReport,
    records_of,
)
from proxy.store.shared_memory.windows import FIRST_SLOTS, STRIPES, Windows

# `take` returns this if the caller has to wait for a lease.
ASK: Final = -1.0
# Tokens for this long, or for this many round trips, are asked for in advance; with half of that left, more are.
AHEAD_S: Final = 0.05
AHEAD_ROUND_TRIPS: Final = 3.0
# At least this part of a second's worth is requested in advance: calls of a host with little traffic come in bunches, too.
LEAST_AHEAD_S: Final = 0.02
# The demand follows within this time, and grants of the past count for this long.
DEMAND_S: Final = 0.1
SHARE_S: Final = 5.0
# After a refusal Valkey is not asked again for this long, so a flood of refused calls costs it nothing.
LEAST_DRY_S: Final = 0.01
# A host that has not used its tokens for this long returns them; sooner if Valkey had little left: others wait for them.
RETURN_S: Final = 0.45
RETURN_SCARCE_S: Final = 0.1
SCARCE_S: Final = 0.1
# A host uses this share of its part while Valkey is away: hosts with a smaller part than 1/N may use more than theirs.
KEPT_SHARE: Final = 0.95
# While Valkey is away, a host keeps what it did not use for this long, for traffic that moves from host to host. It never
# keeps more than the whole limit.
AWAY_HOLDS_S: Final = 1.25
# An ask without a reply is forgotten after this time, if its worker has died.
ASK_LIVES_S: Final = 0.1

_lock = robust_mutexes.lock
_unlock = robust_mutexes.unlock
_adopt = robust_mutexes.adopt


class LeasedWindows(Windows):
    __slots__ = ("_alone", "_cells", "_leases_fd", "_low", "away", "least_share", "rates")

    def __init__(self, fd: int, leases_fd: int, *, alone: bool) -> None:
        """`alone`: this worker is the host's only one and needs no locks."""
        super().__init__(fd)
        self._alone = alone
        self._leases_fd = leases_fd
        self._cells = memoryview(b"").cast("d")
        self._low: Callable[[int], None] = _ignore
        # Whether Valkey does not answer this worker.
        self.away = True
        # One part of as many as there are hosts.
        self.least_share = 1.0
        # By slot: what one request and one unit cost there, and the slot whose mutex guards it.
        self.rates: dict[int, tuple[BucketRates, int]] = {}
        self._map_leases(FIRST_SLOTS)

    def on_low(self, notify: Callable[[int], None]) -> None:
        """Have this called with each slot that needs more tokens soon."""
        self._low = notify

    # Slots

    def reserve_rates(self, rate: BucketRates, own: BucketRates | None) -> None:
        super().reserve_rates(rate, own)
        self.rates[rate.slot] = (rate, rate.slot)
        if own is not None:
            self.rates[own.slot] = (own, rate.slot)

    def reserve(self, slot: int) -> None:
        super().reserve(slot)
        if (slot + 1) * CELLS > len(self._cells):
            self._map_leases(self.slots)

    def _map_leases(self, slots: int) -> None:
        self._cells = records_of(self._leases_fd, LEASES_AT, slots)

    # Spending

    def take(self, slot: int, now: float, request_s: float, unit_s: float) -> float:
        """Zero if both were taken, ASK if Valkey has to be asked, otherwise the seconds to wait."""
        if self._alone:
            return self._spend(slot, now, request_s, unit_s)
        mutex = self._locks[slot % STRIPES]
        if held := _lock(mutex):
            _adopt(mutex, held)
        try:
            return self._spend(slot, now, request_s, unit_s)
        finally:
            _unlock(mutex)

    def _spend(self, slot: int, now: float, request_s: float, unit_s: float) -> float:
        cells = self._cells
        at = slot * CELLS
        requests: float = cells[at] - request_s
        units: float = cells[at + READY_U] - unit_s
        if requests < -TOLERANCE_S or units < -TOLERANCE_S or now >= cells[at + UNTIL]:
            return self._spend_rest(slot, now, request_s, unit_s)
        cells[at] = requests
        cells[at + READY_U] = units
        return 0.0

    def _spend_rest(self, slot: int, now: float, request_s: float, unit_s: float) -> float:
        """Spend the reserve too, and have more asked for."""
        cells, at = self._cells, slot * CELLS
        self._expire(at, now)
        requests = cells[at] + cells[at + RESERVE_R] - request_s
        units = cells[at + READY_U] + cells[at + RESERVE_U] - unit_s
        if requests >= -TOLERANCE_S and units >= -TOLERANCE_S:
            self._set_pool(at, requests, units, 0.0, 0.0)
            if not self.away and now >= cells[at + DRY_UNTIL] and now >= cells[at + ASKED_UNTIL]:
                self._low(slot)
            return 0.0
        if self.away:
            return self._take_share(at, now, request_s, unit_s)
        if now < cells[at + DRY_UNTIL]:
            return float(cells[at + DRY_UNTIL] - now)
        return ASK

    def _set_pool(self, at: int, requests: float, units: float, reserve_r: float, reserve_u: float) -> None:
        cells = self._cells
        cells[at] = requests
        cells[at + READY_U] = units
        cells[at + RESERVE_R] = reserve_r
        cells[at + RESERVE_U] = reserve_u

    def _take_share(self, at: int, now: float, request_s: float, unit_s: float) -> float:
        """Take from the host's share of the tokens refilled since Valkey last answered."""
        requests = self._share_edge(at, EDGE_R, now, request_s)
        units = self._share_edge(at, EDGE_U, now, unit_s)
        wait = max(requests, units) - now
        if wait > TOLERANCE_S:
            return wait
        self._cells[at + EDGE_R] = requests
        self._cells[at + EDGE_U] = units
        return 0.0

    def _share_edge(self, at: int, place: int, now: float, cost_s: float) -> float:
        """The edge of the host's own bucket after this amount. The bucket holds whole calls: otherwise a share of a low limit
        would lose the part of a call that is left over, and one below a call per second would admit none."""
        cells = self._cells
        share = self.share_of(at)
        cost_s /= share
        holds_s = min(AWAY_HOLDS_S, 1.0 / share)
        if cost_s > 0.0:
            holds_s = math.ceil(holds_s / cost_s - TOLERANCE_S) * cost_s
        since = max(now - holds_s, cells[at + ANSWERED_AT] if cells[at + ANSWERED_AT] <= now else 0.0)
        return float(max(since, min(cells[at + place], now + 1.0)) + cost_s)

    def share_of(self, at: int) -> float:
        """Most of the share of recent grants that went to this host, and at least an equal share among all hosts."""
        granted = self._cells[at + ALL]
        share = KEPT_SHARE * self._cells[at + MINE] / granted if granted > 0.0 else 0.0
        return float(min(1.0, max(self.least_share, share)))

    def take_both(self, rate: BucketRates, own: BucketRates, now: float, *, requests: int, units: int) -> float:
        """The same for the buckets of an account and of a key with lower limits, in one step."""
        mutex = self._hold(rate.slot)
        try:
            wait = self._spend(rate.slot, now, requests * rate.request_s, units * rate.unit_s)
            own_wait = self._spend(own.slot, now, requests * own.request_s, units * own.unit_s)
            if wait and not own_wait:
                self._return(own.slot, requests * own.request_s, units * own.unit_s)
            elif own_wait and not wait:
                self._return(rate.slot, requests * rate.request_s, units * rate.unit_s)
        finally:
            _unlock(mutex)
        if wait > 0.0 or own_wait > 0.0:
            return max(wait, own_wait)
        return min(wait, own_wait)

    def give_back(self, slot: int, request_s: float, unit_s: float) -> None:
        mutex = self._hold(slot)
        try:
            self._return(slot, request_s, unit_s)
        finally:
            _unlock(mutex)

    def give_back_both(self, rate: BucketRates, own: BucketRates, *, requests: int, units: int) -> None:
        mutex = self._hold(rate.slot)
        try:
            for each in (rate, own):
                self._return(each.slot, requests * each.request_s, units * each.unit_s)
        finally:
            _unlock(mutex)

    def _return(self, slot: int, request_s: float, unit_s: float) -> None:
        cells, at = self._cells, slot * CELLS
        if self.away:
            cells[at + EDGE_R] -= request_s / self.share_of(at)
            cells[at + EDGE_U] -= unit_s / self.share_of(at)
        else:
            cells[at] += request_s
            cells[at + READY_U] += unit_s

    def edge(self, slot: int) -> float:
        """The request bucket's edge, for the headers: what Valkey's bucket and this host hold together."""
        cells, at = self._cells, slot * CELLS
        if self.away:
            return float(cells[at + EDGE_R])
        return float(cells[at + FLEET_EDGE] - cells[at] - cells[at + RESERVE_R])

    # Asking. `guard` is the slot whose mutex guards the record.

    def report(
        self, rate: BucketRates, guard: int, now: float, need: tuple[float, float], ahead_s: float
    ) -> LeaseReport:
        """Begin an ask: what waiting calls need, what is wanted in advance for `ahead_s`, and what was spent. If nothing is
        wanted and nothing was spent for a while, return what is left: other hosts may need it."""
        mutex = self._hold(guard)
        try:
            return self._report(rate, now, need, ahead_s)
        finally:
            _unlock(mutex)

    def _report(self, rate: BucketRates, now: float, need: tuple[float, float], ahead_s: float) -> LeaseReport:
        cells, at = self._cells, rate.slot * CELLS
        old_slot, new_slot = int(cells[at + OLD_SLOT]), int(cells[at + NEW_SLOT])
        self._expire(at, now)
        old_r, new_r = self._spent(at, OLD_R, self._held(at, 0), BASE_R)
        old_u, new_u = self._spent(at, OLD_U, self._held(at, 1), BASE_U)
        is_idle = not ahead_s and now - cells[at + REPORTED_AT] >= self.return_s(rate.slot) and not old_r + new_r
        returned = self._take_out(at) if is_idle else (0.0, 0.0, 0.0, 0.0)
        follow = self._follow(at, now)
        spent = max(now - cells[at + REPORTED_AT], 1e-3)
        for place, amount in ((DEMAND_R, old_r + new_r + need[0]), (DEMAND_U, old_u + new_u + need[1])):
            cells[at + place] += follow * (amount / spent - cells[at + place])
        cells[at + REPORTED_AT] = now
        cells[at + ASKED_UNTIL] = now + ASK_LIVES_S
        held_r, held_u = self._held(at, 0), self._held(at, 1)
        want_r = _ahead(cells[at + DEMAND_R] * ahead_s - held_r, rate.request_s, ahead_s)
        # As many units as the requests will need: units without a request, or a request without its units, are of no use.
        units_s = want_r * rate.request_s * cells[at + DEMAND_U] / max(cells[at + DEMAND_R], 1e-9)
        return LeaseReport(
            _tokens(need[0] - held_r, rate.request_s) if need[0] else 0,
            _tokens(need[1] - held_u, rate.unit_s) if need[1] else 0,
            want_r,
            _tokens(min(1.0, units_s), rate.unit_s) if ahead_s else 0,
            old_slot,
            old_r,
            old_u,
            returned[0],
            returned[1],
            new_slot,
            new_r,
            new_u,
            returned[2],
            returned[3],
        )

    def _take_out(self, at: int) -> tuple[float, float, float, float]:
        """Remove all tokens: requests and units of the older slot, then of the newer one."""
        cells = self._cells
        held_r, held_u = self._held(at, 0), self._held(at, 1)
        old_r, old_u = min(held_r, cells[at + OLD_R]), min(held_u, cells[at + OLD_U])
        self._set_pool(at, 0.0, 0.0, 0.0, 0.0)
        cells[at + BASE_R] = cells[at + BASE_U] = cells[at + OLD_R] = cells[at + OLD_U] = 0.0
        return old_r, old_u, held_r - old_r, held_u - old_u

    def _held(self, at: int, kind: int) -> float:
        """All tokens of a kind: requests (0) or units (1)."""
        return float(self._cells[at + READY_R + kind] + self._cells[at + RESERVE_R + kind])

    def _follow(self, at: int, now: float) -> float:
        passed = now - self._cells[at + REPORTED_AT]
        return 1.0 - math.exp(-min(passed, 10.0) / DEMAND_S) if passed > 0.0 else 0.0

    def _spent(self, at: int, old: int, held: float, base: int) -> tuple[float, float]:
        """The tokens spent since the last report, of the older slot and of the newer one. The next report counts from here. A
        debt is spent when tokens for it are granted."""
        cells = self._cells
        held = max(0.0, held)
        spent = max(0.0, cells[at + base] - held)
        of_old = min(spent, cells[at + old])
        cells[at + old] -= of_old
        cells[at + base] = held
        return of_old, spent - of_old

    def _expire(self, at: int, now: float) -> None:
        """Drop tokens whose time is over: those of the older slot, then all."""
        cells = self._cells
        if now < cells[at + UNTIL]:
            return
        if now >= cells[at + NEW_UNTIL]:
            # A debt does not end (UpstreamWindows.charge).
            held_r, held_u = max(0.0, self._held(at, 0)), max(0.0, self._held(at, 1))
            cells[at + BASE_R] -= held_r
            cells[at + BASE_U] -= held_u
            self._set_pool(at, self._held(at, 0) - held_r, self._held(at, 1) - held_u, 0.0, 0.0)
            cells[at + OLD_R] = cells[at + OLD_U] = 0.0
            return
        for kind, old, base in ((0, OLD_R, BASE_R), (1, OLD_U, BASE_U)):
            held = self._held(at, kind)
            left = max(0.0, cells[at + old] - max(0.0, cells[at + base] - held))
            cells[at + READY_R + kind] = held - left
            cells[at + RESERVE_R + kind] = 0.0
            cells[at + base] -= left
            cells[at + old] -= left
        cells[at + UNTIL] = cells[at + NEW_UNTIL]

    def grant(self, rate: BucketRates, guard: int, now: float, given: LeaseGrant, low_s: float) -> None:
        """Add what Valkey has granted. `low_s`: tokens for this long are the reserve."""
        mutex = self._hold(guard)
        try:
            self._grant(rate.slot * CELLS, now, given, low_s)
        finally:
            _unlock(mutex)

    def _grant(self, at: int, now: float, given: LeaseGrant, low_s: float) -> None:
        cells = self._cells
        self._expire(at, now)
        self._sort_in(at, given)
        held_r = self._held(at, 0) + given.granted_r
        held_u = self._held(at, 1) + given.granted_u
        cells[at + BASE_R] += given.granted_r
        cells[at + BASE_U] += given.granted_u
        reserve_r = min(held_r, cells[at + DEMAND_R] * low_s)
        reserve_u = min(held_u, cells[at + DEMAND_U] * low_s)
        self._set_pool(at, held_r - reserve_r, held_u - reserve_u, reserve_r, reserve_u)
        if cells[at + OLD_R] <= 0.0 and cells[at + OLD_U] <= 0.0:
            cells[at + UNTIL] = cells[at + NEW_UNTIL]
        if given.wait_s > 0.0:
            cells[at + DRY_UNTIL] = now + max(LEAST_DRY_S, given.wait_s)
        cells[at + ASKED_UNTIL] = 0.0
        cells[at + MINE] = cells[at + MINE] * math.exp(min(0.0, cells[at + MINE_AT] - now) / SHARE_S) + given.requests
        cells[at + MINE_AT] = now
        cells[at + ALL] = given.all_requests
        cells[at + ANSWERED_AT] = now
        cells[at + FLEET_EDGE] = now - given.there_s

    def _sort_in(self, at: int, given: LeaseGrant) -> None:
        """Keep the tokens of two slots apart. Replies to two workers may arrive in the wrong order."""
        cells = self._cells
        behind = cells[at + NEW_SLOT] - given.slot
        if behind == 1:
            cells[at + OLD_SLOT] = given.slot
            cells[at + OLD_R] += given.granted_r
            cells[at + OLD_U] += given.granted_u
            cells[at + UNTIL] = min(cells[at + UNTIL], given.until)
        elif behind:
            # A new slot: the tokens held so far become the older part.
            cells[at + OLD_SLOT] = cells[at + NEW_SLOT]
            cells[at + OLD_R] = max(0.0, cells[at + BASE_R])
            cells[at + OLD_U] = max(0.0, cells[at + BASE_U])
            cells[at + UNTIL] = cells[at + NEW_UNTIL]
            cells[at + NEW_SLOT] = given.slot
            cells[at + NEW_UNTIL] = given.until
        else:
            cells[at + NEW_UNTIL] = min(cells[at + NEW_UNTIL], given.until)

    def _is_scarce(self, at: int) -> bool:
        """Whether Valkey had little left when it last answered."""
        return bool(self._cells[at + ANSWERED_AT] - self._cells[at + FLEET_EDGE] < SCARCE_S)

    def return_s(self, slot: int) -> float:
        """How long tokens stay unused before they are returned."""
        return RETURN_SCARCE_S if self._is_scarce(slot * CELLS) else RETURN_S

    def is_leased(self, slot: int, now: float) -> bool:
        """Whether a lease has not ended yet."""
        return bool(now < self._cells[slot * CELLS + NEW_UNTIL])

    def is_empty(self, slot: int) -> bool:
        """Whether no tokens are left, neither to spend nor to report."""
        at = slot * CELLS
        return self._held(at, 0) == 0.0 and self._held(at, 1) == 0.0 and not self.has_spent(slot)

    def lacks(self, rate: BucketRates, need: tuple[float, float], now: float) -> bool:
        at = rate.slot * CELLS
        if now >= self._cells[at + NEW_UNTIL]:
            return True
        return self._held(at, 0) < need[0] - TOLERANCE_S or self._held(at, 1) < need[1] - TOLERANCE_S

    def has_spent(self, slot: int) -> bool:
        """Whether tokens were spent, or ended, since the last report."""
        at = slot * CELLS
        return self._cells[at + BASE_R] != self._held(at, 0) or self._cells[at + BASE_U] != self._held(at, 1)

    def reported_at(self, slot: int) -> float:
        return float(self._cells[slot * CELLS + REPORTED_AT])

    def __repr__(self) -> str:
        return f"<LeasedWindows {self.slots} slots, Valkey {'away' if self.away else 'up'}>"


def _tokens(seconds: float, cost_s: float) -> int:
    """Whole tokens that cover this amount."""
    return max(0, math.ceil(seconds / cost_s - TOLERANCE_S))


def _ahead(seconds: float, cost_s: float, ahead_s: float) -> int:
    """Whole tokens to ask for in advance: at least one, unless the ask is only a report."""
    return max(1, int(max(seconds, LEAST_AHEAD_S) / cost_s)) if ahead_s else 0


def _ignore(_: int) -> None: ...
