"""The events of a simulation with their times: two runs are the same if their digests are.

Events on the wire (bytes that arrived, connections that ended) count towards the digest. Events that mean something to a reader
(calls, replies, blocks, faults) do so too, and can be kept for the timeline.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import NamedTuple
from zlib import crc32

from tests.simulation.seams import Clock

HASHED_TOGETHER = 1000


class Event(NamedTuple):
    at_s: float
    who: str
    what: str

    def __str__(self) -> str:
        return f"{self.at_s:12.6f}  {self.who:<24} {self.what}"


class History:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._digest = hashlib.blake2b(digest_size=16)
        # Lines that are not in the digest yet: hashing many together is faster.
        self._lines: list[str] = []
        self._wire: list[str] | None = None
        self.events: list[Event] = []
        self._keeps_events = False
        self._hashed = 0
        # How often each kind of fault struck, and each kind of thing was tried: shows what a set of seeds covers.
        self.coverage: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<History of {self._hashed + len(self._lines)} events, {self.digest}>"

    def keep_events(self) -> None:
        """Keep the events that mean something to a reader."""
        self._keeps_events = True

    def keep_wire(self) -> None:
        """Keep the events on the wire too, to compare two runs line by line."""
        self._wire = []

    @property
    def now_s(self) -> float:
        """Seconds since the history began."""
        return self._clock.elapsed_s

    @property
    def lines(self) -> list[str]:
        return self._wire or []

    @property
    def digest(self) -> str:
        self._hash()
        return self._digest.hexdigest()

    def wire(self, who: str, what: str, data: bytes = b"") -> None:
        self._lines.append(f"{self._clock.ns} {who} {what} {len(data)} {crc32(data)}")
        if len(self._lines) >= HASHED_TOGETHER:
            self._hash()

    def note(self, who: str, what: str) -> None:
        self._lines.append(f"{self._clock.ns} {who} {what}")
        if self._keeps_events:
            self.events.append(Event(self._clock.elapsed_s, who, what))

    def fault(self, who: str, kind: str, detail: str = "") -> None:
        """A fault that the simulation has caused."""
        self.coverage[kind] += 1
        self.note(who, f"fault: {kind}{' ' if detail else ''}{detail}")

    def covers(self, kind: str) -> None:
        self.coverage[kind] += 1

    def _hash(self) -> None:
        self._digest.update("".join(self._lines).encode())
        if self._wire is not None:
            self._wire += self._lines
        self._hashed += len(self._lines)
        self._lines.clear()
