"""A model of the Valkey for limits: the commands that hosts send, and the functions of `schemas/valkey/functions.lua`.

`test_valkey_model.py` sends the same commands to the model and to a real server, and compares every reply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

# These are constants of `functions.lua`, too.
SLOT, KEPT_MS, MEMORY_S, TOLERANCE = 0.5, 5000, 5.0, 1e-6

Publish = Callable[[bytes, bytes], int]
Pair = list[float]


class Refused(Exception):
    """The server's error."""


@dataclass(slots=True)
class LentTokens:
    """The record of a limit. `edge`: when its buckets would have been empty. `cur` and `prev`: lent in this slot and the one
    before, less what was reported as spent."""

    slot: float
    at: float
    edge: Pair = field(default_factory=lambda: [0.0, 0.0])
    cur: Pair = field(default_factory=lambda: [0.0, 0.0])
    prev: Pair = field(default_factory=lambda: [0.0, 0.0])
    granted: float = 0.0

    def settle(self, now: float) -> None:
        slot = math.floor(now / SLOT)
        passed = slot - self.slot
        back = max(0.0, self.at - now)
        for i in (0, 1):
            self.edge[i] -= back
            if self.edge[i] > now + 1:
                self.edge[i] = 0.0
            if passed >= 1:
                self.edge[i] = max(self.edge[i], (self.slot + 1) * SLOT - 1 + self.prev[i] + self.cur[i])
            if passed >= 2:
                self.edge[i] = max(self.edge[i], (self.slot + 2) * SLOT - 1 + self.cur[i])
            if passed != 0:
                self.prev[i] = self.cur[i] if passed == 1 else 0.0
                self.cur[i] = 0.0
            self.edge[i] = max(self.edge[i], now - 1 + self.prev[i] + self.cur[i])
        self.slot = slot

    def report(self, slot: float, i: int, spent: float, returned: float) -> None:
        lent = self.cur if slot == self.slot else self.prev if slot == self.slot - 1 else None
        if lent is not None:
            returned = min(returned, max(0.0, lent[i] - spent))
            lent[i] = max(0.0, lent[i] - spent - returned)
            self.edge[i] -= returned

    def there(self, i: int, now: float, cost: float) -> int:
        return max(0, math.floor((now - self.edge[i]) / cost + TOLERANCE))

    def fit(self, now: float, cost: Pair, must: Pair) -> tuple[float, float]:
        """The part of the calls that wait that fit, and the time until one more does."""
        calls = max(1.0, must[0])
        fitting, wait = calls, 0.0
        for i in (0, 1):
            each = must[i] / calls
            if each > 0:
                fitting = min(fitting, math.floor(self.there(i, now, cost[i]) / each + TOLERANCE))
        for i in (0, 1):
            if fitting < calls:
                wait = max(wait, self.edge[i] + (fitting + 1) * must[i] / calls * cost[i] - now)
        return fitting / calls, wait

    def advance(self, now: float, cost: Pair, must: Pair, want: Pair) -> float:
        """The part of what is wanted in advance that is granted."""
        calls, fitting = max(1.0, want[0]), math.inf
        for i in (0, 1):
            each = want[i] / calls
            if each > 0:
                fitting = min(fitting, math.floor((self.there(i, now, cost[i]) - must[i]) / each + TOLERANCE))
        return 1.0 if math.isinf(fitting) else max(0.0, min(1.0, math.ceil(fitting / 2) / calls))

    def grant(self, i: int, cost: float, given: float) -> float:
        self.edge[i] += given * cost
        self.cur[i] += given * cost
        return given


@dataclass(slots=True)
class _Kept:
    """A value, and when it expires."""

    value: Any
    until_ms: float


class ValkeyModel:
    """`clock` is the server's own, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: dict[bytes, _Kept] = {}
        self._has_functions = False

    def __repr__(self) -> str:
        return f"<ValkeyModel of {len(self._kept)} keys>"

    def execute(self, words: Sequence[bytes], publish: Publish) -> Any:
        """The reply to a command. `publish` sends a message to the subscribers of a channel, and returns their number."""
        match [word.decode(errors="replace") for word in words]:
            case ["FUNCTION", "LOAD", *_]:
                self._has_functions = True
                return b"penstock_1"
            case ["FCALL", name, _, *_]:
                if not self._has_functions:
                    raise Refused("ERR Function not found")
                return self._functions[name](self, words[3], words[4:], publish)
            case ["GET", _]:
                return self._value(words[1])
            case ["ZCARD", _]:
                return len(self._value(words[1]) or ())
            case ["EXISTS", _]:
                return int(self._value(words[1]) is not None)
            case ["PUBLISH", _, _]:
                return publish(words[1], words[2])
            case ["PING"]:
                return "PONG"
            case ["CLIENT", "SETNAME", _]:
                return "OK"
            case _:
                raise AssertionError(f"not simulated: {words!r}")

    def forget_everything(self) -> None:
        """The server was restarted."""
        self._kept.clear()
        self._has_functions = False

    # Keys

    def _value(self, key: bytes) -> Any:
        found = self._kept.get(key)
        if found is not None and found.until_ms <= self._clock() * 1000:
            del self._kept[key]
            return None
        return None if found is None else found.value

    def _keep(self, key: bytes, value: Any, for_ms: float) -> None:
        self._kept[key] = _Kept(value, self._clock() * 1000 + for_ms)

    # Functions

    def _lease(self, key: bytes, args: Sequence[bytes], _: Publish) -> list[int]:
        a, now = [0.0, *map(float, args)], self._clock()
        tokens: LentTokens = self._value(key) or LentTokens(math.floor(now / SLOT), now)
        tokens.settle(now)
        for at in (7, 12):
            tokens.report(a[at], 0, a[at + 1], a[at + 3])
            tokens.report(a[at], 1, a[at + 2], a[at + 4])
        cost = [a[1], a[2]]
        part, wait = tokens.fit(now, cost, [a[3], a[4]])
        must: Pair = [math.floor(a[3] * part + TOLERANCE), math.floor(a[4] * part + TOLERANCE)]
        more = tokens.advance(now, cost, must, [a[5], a[6]])
        requests = tokens.grant(0, cost[0], must[0] + math.floor(a[5] * more + TOLERANCE))
        units = tokens.grant(1, cost[1], must[1] + math.floor(a[6] * more + TOLERANCE))
        tokens.granted = tokens.granted * math.exp((tokens.at - now) / MEMORY_S) + requests
        tokens.at = now
        self._keep(key, tokens, KEPT_MS)
        life_us = math.floor(((tokens.slot + 2) * SLOT - now) * 1e6)
        there_us = math.floor(min(1.0, now - tokens.edge[0]) * 1e6)
        granted = math.floor(tokens.granted * 1000)
        return [int(requests), int(units), life_us, math.ceil(wait * 1e6), granted, int(tokens.slot), there_us]

    def _members(self, key: bytes, args: Sequence[bytes], _: Publish) -> list[bytes]:
        now_ms, for_ms = self._clock() * 1000, float(args[1])
        names: dict[bytes, float] = {**(self._value(key) or {}), args[0]: now_ms + for_ms}
        names = {name: until for name, until in names.items() if until > now_ms}
        self._keep(key, names, for_ms)
        return sorted(names, key=lambda name: (names[name], name))

    def _present(self, key: bytes, args: Sequence[bytes], publish: Publish) -> int:
        return len(self._members(key, args, publish))

    def _count(self, key: bytes, args: Sequence[bytes], _: Publish) -> int:
        now_ms, for_ms = self._clock() * 1000, float(args[2])
        open_: dict[bytes, tuple[int, float]] = self._value(key) or {}
        open_[args[0]] = int(args[1]), float(f"{now_ms + for_ms:.0f}")
        open_ = {host: each for host, each in open_.items() if each[1] > now_ms and each[0]}
        if open_:
            self._keep(key, open_, for_ms)
        else:
            self._kept.pop(key, None)
        return sum(count for count, _ in open_.values())

    def _head(self, key: bytes, args: Sequence[bytes], publish: Publish) -> int:
        self._keep(key, args[1], float(args[2]))
        return publish(args[0], args[1])

    _functions: ClassVar[dict[str, Callable[..., Any]]] = {
        "penstock_lease_1": _lease,
        "penstock_members_1": _members,
        "penstock_present_1": _present,
        "penstock_count_1": _count,
        "penstock_head_1": _head,
    }
