"""Concurrency limits for deliveries, so that a slow receiver does not delay others, nor one account another.

A lane is an account's deliveries to one receiver, which is a server: all webhooks of the account that point to it share the
lane. It starts with one delivery at a time. Each success doubles this window, up to a maximum; each failure halves it. Other
accounts have windows of their own at the same receiver, so a customer whose webhooks hang there slows only itself.

Four limits apply to every delivery: the total, its account's, its receiver's, and its account's at this receiver.

- The total, a receiver's places and an account's share leave room for better lanes: failing and slow lanes get at most half of
  the places, these and unproven ones together three quarters, and the rest is reserved for lanes that respond.
- An account has no more places than are free, in total and at a receiver. Alone it gets half of them, and the next account
  always finds some, even if all receivers of the first one responded for a while and now hang.

Free places go one by one to the account with the fewest deliveries under way, and there to the lane with the fewest. Between
equals, the one that has waited longest comes first.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heapreplace
from typing import Literal

LaneKind = Literal["slow", "new", "good"]
# A lane whose last answer took longer than this is slow.
SLOW_S = 1.0
# Bounds memory. With more lanes than this, the least recently used half of the idle ones is forgotten.
REMEMBERED = 10_000
_ORIGIN = re.compile(r"(https?)://(?:[^/?#]*@)?(\[[^]/?#]*\]|[^:/?#]*?)\.?(?::(\d*))?(?=[/?#]|$)", re.ASCII)
_PORTS = {"http": "80", "https": "443"}


@lru_cache(10_000)
def receiver_of(url: str) -> str:
    """The server that a URL leads to: its scheme, host and port."""
    match = _ORIGIN.match(url.lower())
    if match is None:
        return url
    scheme, host, port = match.groups()
    return f"{scheme}://{host}:{port or _PORTS[scheme]}"


class PlaceTally:
    """Deliveries under way, by kind of lane: all of them, or those of an account or a receiver. `turn`: when it last got a
    place."""

    __slots__ = ("of_kind", "total", "turn")

    def __init__(self) -> None:
        self.of_kind: dict[LaneKind, int] = {"slow": 0, "new": 0, "good": 0}
        self.total = 0
        self.turn = 0

    def __repr__(self) -> str:
        return f"<PlaceTally {self.of_kind}>"

    def add(self, kind: LaneKind, count: int) -> None:
        self.of_kind[kind] += count
        self.total += count

    def has_room(self, kind: LaneKind, places: int) -> bool:
        """Whether a lane of this kind may take one more of `places`. Deliveries of better lanes count only towards the total,
        not towards the share of its kind."""
        if self.total >= places or kind == "good":
            return self.total < places
        slow = self.of_kind["slow"]
        return slow + self.of_kind["new"] < (places * 3 + 3) // 4 and (kind == "new" or slow < (places + 1) // 2)


@dataclass(slots=True)
class Lane:
    """An account's deliveries to a receiver: their limit, and how many are under way. `turn`: when it last got a place. `last`:
    the webhook that got it."""

    account: str
    receiver: str
    window: int = 1
    busy: int = 0
    kind: LaneKind = "new"
    turn: int = 0
    last: str = ""


class Lanes:
    def __init__(self, *, total: int, each: int) -> None:
        """`each`: the most deliveries under way to one receiver."""
        self.total = total
        self.each = each
        self._all = PlaceTally()
        self._accounts: defaultdict[str, PlaceTally] = defaultdict(PlaceTally)
        self._receivers: defaultdict[str, PlaceTally] = defaultdict(PlaceTally)
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._turn = 0

    def __repr__(self) -> str:
        return f"<Lanes {self._all.of_kind} of {self.total}; {len(self._lanes)} lanes>"

    @property
    def busy(self) -> int:
        return self._all.total

    def lane(self, account: str, receiver: str) -> Lane:
        lane = self._lanes.get((account, receiver))
        if lane is None:
            lane = self._lanes[account, receiver] = Lane(account, receiver)
        return lane

    def rooms(self, waiting: Mapping[str, str], accounts: Mapping[str, str]) -> dict[str, int]:
        """The number of deliveries that each webhook may start now; webhooks that may start none are left out.
        `waiting`: the webhooks with due deliveries, and the receiver of each. `accounts`: the account of each."""
        if len(self._lanes) > REMEMBERED:
            self._forget()
        webhooks: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for webhook, receiver in waiting.items():
            webhooks[accounts[webhook], receiver].append(webhook)
        given = self._give([self.lane(*name) for name in webhooks])
        self._turn += 1
        rooms: dict[str, int] = {}
        for (account, receiver), count in given.items():
            lane = self.lane(account, receiver)
            self._take(lane, -count)
            lane.turn = self._accounts[account].turn = self._turn
            rooms |= _shared(lane, webhooks[account, receiver], count)
        return rooms

    def _give(self, lanes: list[Lane]) -> Counter[tuple[str, str]]:
        """Take the free places for these lanes, and return how many each has got."""
        given: Counter[tuple[str, str]] = Counter()
        queues: defaultdict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for lane in lanes:
            queues[lane.account].append((lane.busy, lane.turn, lane.receiver))
        order = [(self._accounts[name].total, self._accounts[name].turn, name) for name in queues]
        heapify(order)
        for queue in queues.values():
            heapify(queue)
        while order and self._all.total < self.total:
            busy, turn, account = order[0]
            receiver = self._next_receiver(account, queues[account])
            if receiver is None:  # No lane of the account has room, and none gets room later in this round.
                heappop(order)
                continue
            self._take(self._lanes[account, receiver], 1)
            given[account, receiver] += 1
            heapreplace(order, (busy + 1, turn, account))
        return given

    def _next_receiver(self, account: str, queue: list[tuple[int, int, str]]) -> str | None:
        """The receiver of the account's next lane with room. Its entry in the queue counts the place that it gets."""
        while queue:
            busy, turn, receiver = queue[0]
            if self._has_room(self._lanes[account, receiver]):
                heapreplace(queue, (busy + 1, turn, receiver))
                return receiver
            heappop(queue)
        return None

    def _has_room(self, lane: Lane) -> bool:
        account, receiver = self._accounts[lane.account], self._receivers[lane.receiver]
        return (
            lane.busy < min(lane.window, _share(self.each, receiver.total - lane.busy))
            and self._all.has_room(lane.kind, self.total)
            and receiver.has_room(lane.kind, self.each)
            and account.has_room(lane.kind, _share(self.total, self._all.total - account.total))
        )

    def _take(self, lane: Lane, count: int) -> None:
        lane.busy += count
        for tally in self._tallies(lane):
            tally.add(lane.kind, count)

    def _tallies(self, lane: Lane) -> tuple[PlaceTally, PlaceTally, PlaceTally]:
        return self._all, self._accounts[lane.account], self._receivers[lane.receiver]

    def begin(self, account: str, receiver: str) -> None:
        self._take(self.lane(account, receiver), 1)

    def end(self, account: str, receiver: str, *, took_s: float, ok: bool) -> None:
        lane = self.lane(account, receiver)
        self._take(lane, -1)
        before, lane.kind = lane.kind, "good" if ok and took_s <= SLOW_S else "slow"
        # All deliveries of a lane count as the lane's kind, so those under way move to the new one.
        for tally in self._tallies(lane):
            tally.add(before, -lane.busy)
            tally.add(lane.kind, lane.busy)
        lane.window = min(self.each, lane.window * 2) if ok else max(1, lane.window // 2)

    def clear(self) -> None:
        """Reset: no delivery is under way any more, because the deliverer was stopped."""
        for lane in self._lanes.values():
            self._take(lane, -lane.busy)

    def _forget(self) -> None:
        idle = sorted((lane for lane in self._lanes.values() if not lane.busy), key=lambda lane: lane.turn)
        for lane in idle[: (len(idle) + 1) // 2]:
            del self._lanes[lane.account, lane.receiver]
        for tallies, names in (
            (self._accounts, {account for account, _ in self._lanes}),
            (self._receivers, {receiver for _, receiver in self._lanes}),
        ):
            for name in tallies.keys() - names:
                del tallies[name]


def _share(places: int, of_others: int) -> int:
    """The most places that an account may have: half of those that the others leave, so that it leaves as many free."""
    return max(1, (places - of_others) // 2)


def _shared(lane: Lane, webhooks: list[str], room: int) -> dict[str, int]:
    """Shares a lane's places evenly among its webhooks. The remainder rotates from one call to the next."""
    webhooks.sort()
    first = bisect_right(webhooks, lane.last)
    turned = webhooks[first:] + webhooks[:first]
    each, over = divmod(room, len(turned))
    lane.last = turned[over - 1] if over else lane.last
    return {name: each + (index < over) for index, name in enumerate(turned) if each or index < over}
