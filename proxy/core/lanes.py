"""How many deliveries may be under way, to each receiver and in all, so that a slow one delays nobody else.

A receiver begins with one at a time. Each that succeeds doubles what it may have, up to a limit; each that fails halves it.
And however many they are, those of one kind leave room for the better ones: all that fail or are slow may have half of the
places, these and those of which nothing is known yet three quarters, the rest is for those that answer. What is free is
shared evenly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["slow", "new", "good"]
# An answer that takes longer is a slow one.
SLOW_S = 1.0
# Receivers remembered that have nothing under way.
REMEMBERED = 10_000


@dataclass(slots=True)
class Lane:
    """One receiver: what it may have under way, and what it has."""

    window: int = 1
    busy: int = 0
    kind: Kind = "new"


class Lanes:
    def __init__(self, *, total: int, each: int) -> None:
        self.total = total
        self.each = each
        self._busy: dict[Kind, int] = {"slow": 0, "new": 0, "good": 0}
        self._lanes: dict[str, Lane] = {}

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

    def rooms(self, waiting: Iterable[str]) -> dict[str, int]:
        """For each of those who have something to deliver how much of it may begin now; those who may not are not in it."""
        lanes = [(name, self.lane(name)) for name in waiting]
        open_lanes = [(name, lane) for name, lane in lanes if lane.window > lane.busy]
        if not open_lanes:
            return {}
        left = self._left()
        share = max(1, left["good"] // len(open_lanes))
        found: dict[str, int] = {}
        for name, lane in open_lanes:
            room = min(lane.window - lane.busy, share, left[lane.kind])
            if room > 0:
                found[name] = room
                left = _after(left, lane.kind, room)
        return found

    def _left(self) -> dict[Kind, int]:
        """Places that each kind may still take: what better ones have counts against it only when all are taken."""
        slow, new, good = self._busy["slow"], self._busy["new"], self._busy["good"]
        total = self.total - slow - new - good
        unknown = min(total, self.total * 3 // 4 - slow - new)
        return {"slow": min(unknown, self.total // 2 - slow), "new": unknown, "good": total}

    def begin(self, receiver: str) -> None:
        lane = self.lane(receiver)
        lane.busy += 1
        self._busy[lane.kind] += 1

    def end(self, receiver: str, *, took_s: float, ok: bool) -> None:
        lane = self.lane(receiver)
        self._busy[lane.kind] -= lane.busy
        lane.busy -= 1
        lane.kind = "good" if ok and took_s <= SLOW_S else "slow"
        # All that a receiver has under way is of its kind.
        self._busy[lane.kind] += lane.busy
        lane.window = min(self.each, lane.window * 2) if ok else max(1, lane.window // 2)


def _after(left: dict[Kind, int], kind: Kind, room: int) -> dict[Kind, int]:
    """What is left when one of this kind has taken so much: the total bounds all."""
    good = left["good"] - room
    new = min(good, left["new"] - (room if kind != "good" else 0))
    return {"slow": min(new, left["slow"] - (room if kind == "slow" else 0)), "new": new, "good": good}
