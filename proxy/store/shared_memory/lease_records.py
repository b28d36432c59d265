"""The leased tokens of one limit, and the messages by which they are leased (leased_buckets).

Tokens of two epochs of Valkey's clock may be held at once: those of the older one are spent first, and end first. A part of the
tokens is kept in reserve: when only the reserve is left, more tokens are asked for, before a call has to wait.

In the host's memory a lease is a record of doubles, in the order of `Lease.write`. `Lease` reads it, its methods change the
numbers, and `write` stores them again. Only what every call needs is read in place.
"""

from __future__ import annotations

import math
from struct import Struct
from typing import Final, NamedTuple

from proxy.core.limits import TOLERANCE_S, BucketRates

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

# The places of the numbers that every call needs. A test compares them with the fields.
UNTIL: Final = 0
READY_R: Final = 1
RESERVE_R: Final = 2
EDGE_R: Final = 6
READY_U: Final = 7
RESERVE_U: Final = 8
EDGE_U: Final = 12
FLEET_EDGE: Final = 13
DRY_UNTIL: Final = 17
ANSWERED_AT: Final = 20
MINE: Final = 21
ALL: Final = 23
CELLS: Final = 24
RECORD_BYTES: Final = 8 * CELLS

_RECORD = Struct(f"{CELLS}d")


class LeaseReport(NamedTuple):
    """A worker's request: the tokens it needs and wants, and those that were spent or are returned since the last report.
    Tokens are whole; the rest is in seconds."""

    must_r: int
    must_u: int
    want_r: int
    want_u: int
    old_epoch: int
    old_spent_r: float
    old_spent_u: float
    old_returned_r: float
    old_returned_u: float
    new_epoch: int
    new_spent_r: float
    new_spent_u: float
    new_returned_r: float
    new_returned_u: float


class LeaseGrant(NamedTuple):
    """Valkey's reply. Amounts in seconds."""

    granted_r: float
    granted_u: float
    until: float
    wait_s: float
    epoch: int
    # Requests granted to this host now, and to all hosts recently.
    requests: int
    all_requests: float
    # The rest in Valkey's bucket.
    there_s: float


class Tokens:
    """Tokens of one kind, requests or units, in seconds of refill (core/limits)."""

    __slots__ = ("demand", "edge", "old", "ready", "reported", "reserve")

    def __init__(self, ready: float, reserve: float, reported: float, old: float, demand: float, edge: float) -> None:
        self.ready = ready
        self.reserve = reserve
        # The tokens that were there after the last report, and those of the older epoch among them.
        self.reported = reported
        self.old = old
        # Spent per second, recently.
        self.demand = demand
        # The edge of the host's own bucket while Valkey is away.
        self.edge = edge

    def __repr__(self) -> str:
        return f"<Tokens {self.ready:.3g} s ready, {self.reserve:.3g} s in reserve>"

    @property
    def held(self) -> float:
        return self.ready + self.reserve

    def hold(self, amount: float, *, reserve: float = 0.0) -> None:
        self.ready = amount - reserve
        self.reserve = reserve

    def has(self, amount: float) -> bool:
        return self.held - amount >= -TOLERANCE_S

    def has_spent(self) -> bool:
        """Whether tokens were spent, or ended, since the last report."""
        return self.reported != self.held

    def report(self) -> tuple[float, float]:
        """The tokens spent since the last report, of the older epoch and of the newer one. The next report counts from here. A
        debt is spent when tokens for it are granted."""
        held = max(0.0, self.held)
        spent = max(0.0, self.reported - held)
        of_old = min(spent, self.old)
        self.old -= of_old
        self.reported = held
        return of_old, spent - of_old

    def take_out(self) -> tuple[float, float]:
        """Remove all tokens: of the older epoch, and of the newer one."""
        held = self.held
        old = min(held, self.old)
        self.hold(0.0)
        self.reported = self.old = 0.0
        return old, held - old

    def drop_all(self) -> None:
        """Drop all tokens. A debt stays (`LeasedBuckets.charge`)."""
        held = max(0.0, self.held)
        self.reported -= held
        self.hold(self.held - held)
        self.old = 0.0

    def drop_old(self) -> None:
        held = self.held
        left = max(0.0, self.old - max(0.0, self.reported - held))
        self.hold(held - left)
        self.reported -= left
        self.old -= left

    def add(self, amount: float, low_s: float) -> None:
        held = self.held + amount
        self.reported += amount
        self.hold(held, reserve=min(held, self.demand * low_s))


class Lease:
    """One record. Its numbers are read and written one by one, because a call without Valkey pays for both: unpacking into the
    fields of a dataclass took three times as long."""

    __slots__ = (
        "all",
        "answered_at",
        "asked_until",
        "dry_until",
        "fleet_edge",
        "mine",
        "mine_at",
        "new_epoch",
        "new_until",
        "old_epoch",
        "reported_at",
        "requests",
        "units",
        "until",
    )

    def __init__(self, memory: memoryview[float], bucket_index: int) -> None:
        cells: tuple[float, ...] = _RECORD.unpack_from(memory, bucket_index * RECORD_BYTES)
        # When the first of the tokens end.
        self.until = cells[0]
        self.requests = Tokens(cells[1], cells[2], cells[3], cells[4], cells[5], cells[6])
        self.units = Tokens(cells[7], cells[8], cells[9], cells[10], cells[11], cells[12])
        # The edge of the request bucket in Valkey, by this host's clock.
        self.fleet_edge = cells[13]
        # The epochs of Valkey's clock.
        self.old_epoch = cells[14]
        self.new_epoch = cells[15]
        self.new_until = cells[16]
        # Valkey has no tokens until then.
        self.dry_until = cells[17]
        # An ask is under way until then.
        self.asked_until = cells[18]
        self.reported_at = cells[19]
        self.answered_at = cells[20]
        # Recent grants to this host and to all hosts.
        self.mine = cells[21]
        self.mine_at = cells[22]
        self.all = cells[23]

    def __repr__(self) -> str:
        return f"<Lease until {self.until:.3f}: requests {self.requests!r}, units {self.units!r}>"

    def write(self, memory: memoryview[float], bucket_index: int) -> None:
        requests, units = self.requests, self.units
        _RECORD.pack_into(
            memory,
            bucket_index * RECORD_BYTES,
            self.until,
            requests.ready,
            requests.reserve,
            requests.reported,
            requests.old,
            requests.demand,
            requests.edge,
            units.ready,
            units.reserve,
            units.reported,
            units.old,
            units.demand,
            units.edge,
            self.fleet_edge,
            self.old_epoch,
            self.new_epoch,
            self.new_until,
            self.dry_until,
            self.asked_until,
            self.reported_at,
            self.answered_at,
            self.mine,
            self.mine_at,
            self.all,
        )

    # Spending

    def spend(self, request_s: float, unit_s: float) -> bool:
        """Spend tokens, the reserve included. Returns False if there are too few."""
        if not (self.requests.has(request_s) and self.units.has(unit_s)):
            return False
        self.requests.hold(self.requests.held - request_s)
        self.units.hold(self.units.held - unit_s)
        return True

    def may_ask(self, now: float) -> bool:
        return now >= self.dry_until and now >= self.asked_until

    def lacks(self, need: tuple[float, float], now: float) -> bool:
        return not (self.is_leased(now) and self.requests.has(need[0]) and self.units.has(need[1]))

    # While Valkey is away

    def give_back_share(self, request_s: float, unit_s: float, least_share: float) -> None:
        share = self.share(least_share)
        self.requests.edge -= request_s / share
        self.units.edge -= unit_s / share

    def owe(self, now: float, request_s: float, least_share: float, *, away: bool) -> None:
        """Charge a call for which there is no token."""
        if away:
            self.requests.edge = self.share_edge(self.requests, now, request_s, least_share)
        else:
            self.requests.ready -= request_s

    def share_edge(self, tokens: Tokens, now: float, cost_s: float, least_share: float) -> float:
        return share_edge(tokens.edge, now, cost_s, self.share(least_share), self.answered_at)

    def share(self, least_share: float) -> float:
        return share_of(self.mine, self.all, least_share)

    # Asking

    def report(self, rate: BucketRates, now: float, need: tuple[float, float], ahead_s: float) -> LeaseReport:
        old_epoch, new_epoch = int(self.old_epoch), int(self.new_epoch)
        requests, units = self.requests, self.units
        self.expire(now)
        old_r, new_r = requests.report()
        old_u, new_u = units.report()
        is_idle = not ahead_s and now - self.reported_at >= self.return_s() and not old_r + new_r
        returned_r = requests.take_out() if is_idle else (0.0, 0.0)
        returned_u = units.take_out() if is_idle else (0.0, 0.0)
        self._follow_demand(now, old_r + new_r + need[0], old_u + new_u + need[1])
        self.reported_at = now
        self.asked_until = now + ASK_LIVES_S
        want_r = _ahead(requests.demand * ahead_s - requests.held, rate.request_s, ahead_s)
        # As many units as the requests will need: units without a request, or a request without its units, are of no use.
        units_s = want_r * rate.request_s * units.demand / max(requests.demand, 1e-9)
        return LeaseReport(
            _tokens(need[0] - requests.held, rate.request_s) if need[0] else 0,
            _tokens(need[1] - units.held, rate.unit_s) if need[1] else 0,
            want_r,
            _tokens(min(1.0, units_s), rate.unit_s) if ahead_s else 0,
            old_epoch,
            old_r,
            old_u,
            returned_r[0],
            returned_u[0],
            new_epoch,
            new_r,
            new_u,
            returned_r[1],
            returned_u[1],
        )

    def _follow_demand(self, now: float, requests_s: float, units_s: float) -> None:
        passed = now - self.reported_at
        follow = 1.0 - math.exp(-min(passed, 10.0) / DEMAND_S) if passed > 0.0 else 0.0
        for tokens, amount in ((self.requests, requests_s), (self.units, units_s)):
            tokens.demand += follow * (amount / max(passed, 1e-3) - tokens.demand)

    def expire(self, now: float) -> None:
        """Drop tokens whose time is over: those of the older epoch, then all."""
        if now < self.until:
            return
        if now >= self.new_until:
            self.requests.drop_all()
            self.units.drop_all()
            return
        self.requests.drop_old()
        self.units.drop_old()
        self.until = self.new_until

    def grant(self, now: float, given: LeaseGrant, low_s: float) -> None:
        self.expire(now)
        self._sort_in(given, now)
        self.requests.add(given.granted_r, low_s)
        self.units.add(given.granted_u, low_s)
        if self.requests.old <= 0.0 and self.units.old <= 0.0:
            self.until = self.new_until
        if given.wait_s > 0.0:
            self.dry_until = now + max(LEAST_DRY_S, given.wait_s)
        self.asked_until = 0.0
        self.mine = self.mine * math.exp(min(0.0, self.mine_at - now) / SHARE_S) + given.requests
        self.mine_at = now
        self.all = given.all_requests
        self.answered_at = now
        self.fleet_edge = now - given.there_s

    def _sort_in(self, given: LeaseGrant, now: float) -> None:
        """Keep the tokens of two epochs apart. Replies to two workers may arrive in the wrong order. If all tokens have ended,
        an earlier epoch is a new one: Valkey's clock was set back."""
        is_leased = self.is_leased(now)
        behind = self.new_epoch - given.epoch
        if behind == 1 and is_leased:
            self.old_epoch = float(given.epoch)
            self.requests.old += given.granted_r
            self.units.old += given.granted_u
            self.until = min(self.until, given.until)
        elif behind or not is_leased:
            # A new epoch: the tokens held so far become the older part.
            self.old_epoch = self.new_epoch
            self.requests.old = max(0.0, self.requests.reported)
            self.units.old = max(0.0, self.units.reported)
            self.until = self.new_until
            self.new_epoch = float(given.epoch)
            self.new_until = given.until
        else:
            self.new_until = min(self.new_until, given.until)

    def return_s(self) -> float:
        """How long tokens stay unused before they are returned: less if Valkey had little left when it last answered."""
        return RETURN_SCARCE_S if self.answered_at - self.fleet_edge < SCARCE_S else RETURN_S

    def is_leased(self, now: float) -> bool:
        """Whether the lease has not ended yet."""
        return now < self.new_until

    def has_spent(self) -> bool:
        return self.requests.has_spent() or self.units.has_spent()

    def is_empty(self) -> bool:
        """Whether no tokens are left, neither to spend nor to report."""
        return self.requests.held == 0.0 and self.units.held == 0.0 and not self.has_spent()


def share_of(mine: float, all_: float, least_share: float) -> float:
    """Most of the share of recent grants that went to this host, and at least an equal share among all hosts."""
    share = KEPT_SHARE * mine / all_ if all_ > 0.0 else 0.0
    return min(1.0, max(least_share, share))


def share_edge(edge: float, now: float, cost_s: float, share: float, answered_at: float) -> float:
    """The edge of the host's own bucket after this amount. The bucket holds whole calls: otherwise a share of a low limit
    would lose the part of a call that is left over, and one below a call per second would admit none."""
    cost_s /= share
    holds_s = min(AWAY_HOLDS_S, 1.0 / share)
    if cost_s > 0.0:
        holds_s = math.ceil(holds_s / cost_s - TOLERANCE_S) * cost_s
    since = max(now - holds_s, answered_at if answered_at <= now else 0.0)
    return max(since, min(edge, now + 1.0)) + cost_s


def _tokens(seconds: float, cost_s: float) -> int:
    """Whole tokens that cover this amount."""
    return max(0, math.ceil(seconds / cost_s - TOLERANCE_S))


def _ahead(seconds: float, cost_s: float, ahead_s: float) -> int:
    """Whole tokens to ask for in advance: at least one, unless the ask is only a report."""
    return max(1, int(max(seconds, LEAST_AHEAD_S) / cost_s)) if ahead_s else 0
