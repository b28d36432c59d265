"""Concurrency limits for deliveries, per receiver and in total, so that a slow receiver delays no other.

A receiver is a server: all webhooks that point to it share its limit. It starts with one delivery at a time. Each
success doubles the limit, up to a maximum; each failure halves it. Receivers of one kind also leave room for better
ones, however many there are: failing and slow receivers get at most half of the places, these and unproven ones three
quarters, and the rest is reserved for receivers that respond. Free places are shared evenly. If they do not suffice,
those with the fewest deliveries under way and the longest wait come first, among receivers and among the webhooks of
each. An account leaves an eighth of all places to others, however many receivers it has: they could respond for a while
and then hang together.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

LaneKind = Literal["slow", "new", "good"]
# An answer that takes longer is a slow one.
SLOW_S = 1.0
# Receivers remembered that have nothing under way.
REMEMBERED = 10_000
_ORIGIN = re.compile(r"(https?)://(?:[^/?#]*@)?(\[[^]/?#]*\]|[^:/?#]*?)\.?(?::(\d*))?(?=[/?#]|$)", re.ASCII)
_PORTS = {"http": "80", "https": "443"}


@lru_cache(10_000)
def receiver_of(url: str) -> str:
    """The server that a URL leads to: its scheme, host and port."""
    found = _ORIGIN.match(url.lower())
    if found is None:
        return url
    scheme, host, port = found.groups()
    return f"{scheme}://{host}:{port or _PORTS[scheme]}"


@dataclass(slots=True)
class Lane:
    """One receiver: its limit, and its deliveries under way. `turn`: when it last got a slot. `last`: the webhook that got
    it."""

    window: int = 1
    busy: int = 0
    kind: LaneKind = "new"
    turn: int = 0
    last: str = ""


class Lanes:
    def __init__(self, *, total: int, each: int) -> None:
        self.total = total
        self.each = each
        self._busy: dict[LaneKind, int] = {"slow": 0, "new": 0, "good": 0}
        self._of_account: Counter[str] = Counter()
        self._lanes: dict[str, Lane] = {}
        self._turn = 0

    def __repr__(self) -> str:
        return f"<Lanes {self._busy} of {self.total}; {len(self._lanes)} receivers>"

    @property
    def busy(self) -> int:
        return sum(self._busy.values())

    def lane(self, receiver: str) -> Lane:
        found = self._lanes.get(receiver)
        if found is None:
            if len(self._lanes) >= REMEMBERED:
                self._lanes = {name: lane for name, lane in self._lanes.items() if lane.busy}
            found = self._lanes[receiver] = Lane()
        return found

    def rooms(self, waiting: Mapping[str, str], accounts: Mapping[str, str]) -> dict[str, int]:
        """The number of deliveries that each webhook may start now; webhooks that may start none are left out.
        `waiting`: the webhooks with due deliveries, and the receiver of each. `accounts`: the account of each."""
        webhooks: defaultdict[str, list[str]] = defaultdict(list)
        for webhook, receiver in waiting.items():
            webhooks[receiver].append(webhook)
        lanes = [(self.lane(receiver), own) for receiver, own in webhooks.items()]
        lanes = [(lane, own) for lane, own in lanes if lane.window > lane.busy]
        if not lanes:
            return {}
        self._turn += 1
        left, of_account = self._left(), self._of_account.copy()
        share = max(1, left["good"] // len(lanes))
        found: dict[str, int] = {}
        for lane, own in sorted(lanes, key=lambda each: (each[0].busy, each[0].turn)):
            room = min(lane.window - lane.busy, share, left[lane.kind])
            given = self._within_accounts(_shared(lane, own, room), accounts, of_account) if room > 0 else {}
            if given:
                lane.turn = self._turn
                found |= given
                left = _after(left, lane.kind, sum(given.values()))
        return found

    def _within_accounts(
        self, rooms: Mapping[str, int], accounts: Mapping[str, str], of_account: Counter[str]
    ) -> dict[str, int]:
        """As much of the rooms as the accounts may take, which is added to `of_account`."""
        given: dict[str, int] = {}
        for webhook, room in rooms.items():
            account = accounts[webhook]
            allowed = min(room, self.total - self.total // 8 - of_account[account])
            if allowed > 0:
                given[webhook] = allowed
                of_account[account] += allowed
        return given

    def _left(self) -> dict[LaneKind, int]:
        """Places that each kind may still take. Places taken by better kinds count against it only when all are taken."""
        slow, new, good = self._busy["slow"], self._busy["new"], self._busy["good"]
        total = self.total - slow - new - good
        unknown = min(total, (self.total * 3 + 3) // 4 - slow - new)
        return {"slow": min(unknown, (self.total + 1) // 2 - slow), "new": unknown, "good": total}

    def begin(self, receiver: str, account: str) -> None:
        lane = self.lane(receiver)
        lane.busy += 1
        self._busy[lane.kind] += 1
        self._of_account[account] += 1

    def end(self, receiver: str, account: str, *, took_s: float, ok: bool) -> None:
        self._of_account[account] -= 1
        if not self._of_account[account]:
            del self._of_account[account]
        lane = self.lane(receiver)
        self._busy[lane.kind] -= lane.busy
        lane.busy -= 1
        lane.kind = "good" if ok and took_s <= SLOW_S else "slow"
        # All that a receiver has under way is of its kind.
        self._busy[lane.kind] += lane.busy
        lane.window = min(self.each, lane.window * 2) if ok else max(1, lane.window // 2)

    def clear(self) -> None:
        """Reset: no delivery is under way any more, because the deliverer was stopped."""
        self._busy = dict.fromkeys(self._busy, 0)
        self._of_account.clear()
        for lane in self._lanes.values():
            lane.busy = 0


def _shared(lane: Lane, webhooks: list[str], room: int) -> dict[str, int]:
    """Shares a receiver's slots evenly among its webhooks. The remainder rotates from one call to the next."""
    webhooks.sort()
    first = bisect_right(webhooks, lane.last)
    turned = webhooks[first:] + webhooks[:first]
    each, over = divmod(room, len(turned))
    lane.last = turned[over - 1] if over else lane.last
    return {name: each + (place < over) for place, name in enumerate(turned) if each or place < over}


def _after(left: dict[LaneKind, int], kind: LaneKind, room: int) -> dict[LaneKind, int]:
    """The free places for one kind; the total bounds all kinds."""
    good = left["good"] - room
    new = min(good, left["new"] - (room if kind != "good" else 0))
    return {"slow": min(new, left["slow"] - (room if kind == "slow" else 0)), "new": new, "good": good}
