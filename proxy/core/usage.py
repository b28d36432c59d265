"""Usage of keys: how it is counted while calls run, and how charts are built from it.

A call is counted once, in the tally of its key: `key.tallies[policy.tally]`. Every second the touched tallies are
*gathered*: added to the totals that the metrics show, and to the batch that is written to the store. The cost is one
look-up per call: 0.1 µs.

Reply times are counted in fixed buckets; a quantile is computed from their sums. This module deals neither with storage
nor with the clock.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Final, Literal

from proxy.core.latency_histogram import EDGES_S, bucket_of
from proxy.errors import Fault, Reason

# Upper edges of the buckets, the same for calls as for upstreams; one more holds the rest.
LATENCY_S: Final[tuple[float, ...]] = EDGES_S
BUCKETS = len(LATENCY_S) + 1

UsageStep = Literal["minute", "hour", "day"]
# Each step with its seconds, and the maximum number of steps in one chart: longer charts need larger steps.
STEPS: dict[UsageStep, tuple[int, int]] = {"minute": (60, 360), "hour": (3600, 744), "day": (86_400, 1100)}
# The default step of a chart, by the maximum length of its period in seconds.
_AUTO: tuple[tuple[int, UsageStep], ...] = ((3 * 3600, "minute"), (8 * 86_400, "hour"))


# How a call ended: with a result, with an error of its caller or of the chain, or with a fault of ours or of an upstream.
Outcome = Literal["results", "errors", "faults", "upstream_faults"]
# Reasons of faults for which upstreams are to blame: they failed, were late, disagreed, or lacked a block.
_OF_UPSTREAMS: Final[frozenset[Reason]] = frozenset({"upstream", "block", "verification", "deadline"})


def outcome_of(fault: Fault) -> Outcome:
    """How a request that failed counts. With a status below 500, its caller is the cause, or the caller's own limits."""
    if fault.status < 500:
        return "errors"
    return "upstream_faults" if fault.reason in _OF_UPSTREAMS else "faults"


class Tally:
    """Counts of one method on one network. Counting a call allocates nothing. `errors` are those of callers and of the chain,
    `faults` those of upstreams and of ours; `upstream_faults` are the former of these."""

    __slots__ = (
        "buckets",
        "errors",
        "faults",
        "hits",
        "joins",
        "labels",
        "results",
        "seconds",
        "units",
        "upstream_faults",
    )

    def __init__(self, network: str, method: str) -> None:
        self.labels = (network, method)
        self.results = 0
        self.errors = 0
        self.faults = 0
        self.upstream_faults = 0
        self.hits = 0
        self.joins = 0
        self.units = 0
        self.seconds = 0.0
        self.buckets = [0] * BUCKETS

    def __repr__(self) -> str:
        return f"<Tally {'/'.join(self.labels)}: {self.results} results, {self.errors} errors, {self.faults} faults>"

    def count(self, outcome: Outcome, cache: str, units: int, seconds: float) -> None:
        if outcome == "results":
            self.results += 1
        elif outcome == "errors":
            self.errors += 1
        else:
            self.faults += 1
            if outcome == "upstream_faults":
                self.upstream_faults += 1
        if cache:
            if cache == "hit" or cache == "stale":
                self.hits += 1
            elif cache == "join":
                self.joins += 1
        self.units += units
        self.seconds += seconds
        self.buckets[bucket_of(seconds)] += 1

    def count_hit(self, units: int) -> None:
        """Count a call that was answered from the cache at once."""
        self.results += 1
        self.hits += 1
        self.units += units
        self.buckets[0] += 1

    def add_units(self, units: int) -> None:
        """Count the price of further work for a call that is counted elsewhere."""
        self.units += units

    def count_results(self, calls: int, units: int, seconds: float) -> None:
        """Count calls with results that all took the same time; `units` is the price of one."""
        self.results += calls
        self.units += calls * units
        self.seconds += calls * seconds
        self.buckets[bucket_of(seconds)] += calls

    def add(self, other: Tally) -> None:
        self.results += other.results
        self.errors += other.errors
        self.faults += other.faults
        self.upstream_faults += other.upstream_faults
        self.hits += other.hits
        self.joins += other.joins
        self.units += other.units
        self.seconds += other.seconds
        self.buckets = [*map(add, self.buckets, other.buckets)]


class KeyTallies(dict[Tally, Tally]):
    """One key's tallies since they were last gathered. The dict's key is the tally of the same method for all keys."""

    __slots__ = ("account", "key", "touched")

    def __init__(self, account: str = "", key: str = "", touched: TouchedTallies | None = None) -> None:
        super().__init__()
        self.account = account
        self.key = key
        # Tallies that were touched since they were last gathered.
        self.touched: TouchedTallies = [] if touched is None else touched

    def __missing__(self, whole: Tally) -> Tally:
        self[whole] = own = Tally(*whole.labels)
        self.touched.append((self, whole))
        return own

    def __repr__(self) -> str:
        return f"<KeyTallies of {self.key}: {len(self)} methods>"


TouchedTallies = list[tuple[KeyTallies, Tally]]


def gather(touched: TouchedTallies, most: int | None = None) -> list[tuple[str, str, Tally]]:
    """The usage of each key since the last call, with its account, or of the first `most`. Nothing is counted twice."""
    usage = []
    for tallies, whole in touched[:most]:
        own = tallies.pop(whole)
        whole.add(own)
        usage.append((tallies.account, tallies.key, own))
    del touched[:most]
    return usage


@dataclass(slots=True)
class UsageSums:
    """Sums, as they are stored and shown. A call without a result is an error. `faults`: the errors that callers did not cause,
    because an upstream failed, or we did. `upstream_faults`: those of upstreams. `joins`: calls that got the reply of an equal
    one under way."""

    requests: int = 0
    errors: int = 0
    units: int = 0
    hits: int = 0
    took: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    faults: int = 0
    upstream_faults: int = 0
    joins: int = 0

    def add(self, tally: Tally) -> None:
        self.requests += tally.results + tally.errors + tally.faults
        self.errors += tally.errors + tally.faults
        self.units += tally.units
        self.hits += tally.hits
        self.took = [*map(add, self.took, tally.buckets)]
        self.faults += tally.faults
        self.upstream_faults += tally.upstream_faults
        self.joins += tally.joins

    def merge(self, other: UsageSums) -> None:
        self.requests += other.requests
        self.errors += other.errors
        self.units += other.units
        self.hits += other.hits
        self.took = [*map(add, self.took, other.took)]
        self.faults += other.faults
        self.upstream_faults += other.upstream_faults
        self.joins += other.joins

    def quantile_ms(self, share: float) -> float | None:
        return quantile_ms(self.took, share)


def quantile_ms(took: Sequence[int], share: float) -> float | None:
    """The time of the reply at this share of all, None if there were no replies. Those of a bucket are taken to be spread
    evenly over it. It is the time of one reply, so all quantiles of a single one are the same."""
    left = math.ceil(share * sum(took))
    if not left:
        return None
    low_s = 0.0
    for count, high_s in zip(took, (*LATENCY_S, LATENCY_S[-1]), strict=True):
        if left <= count:
            return round((low_s + (high_s - low_s) * (left - 0.5) / count) * 1000, 3)
        left -= count
        low_s = high_s
    return LATENCY_S[-1] * 1000


def step_of(seconds: float) -> UsageStep:
    """The step for a chart of this many seconds."""
    return next((step for most, step in _AUTO if seconds <= most), "day")


def step_start(moment: datetime.datetime, step: UsageStep) -> datetime.datetime:
    """The start of the step that contains the moment. Figures of a period include this whole step."""
    size = STEPS[step][0]
    try:
        return datetime.datetime.fromtimestamp(int(moment.timestamp()) // size * size, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return moment


def times_of(first: int, last: int, step: UsageStep) -> list[int]:
    """The beginnings of all steps of a span, in Unix seconds: empty ones are drawn too."""
    size = STEPS[step][0]
    return list(range(first // size * size, last, size))


@dataclass(slots=True)
class ChartLine:
    """One line of a chart: sums for each of its times, and over all of them."""

    name: str
    points: dict[int, UsageSums] = field(default_factory=dict)
    total: UsageSums = field(default_factory=UsageSums)

    def add(self, at: int, used: UsageSums) -> None:
        have = self.points.get(at)
        if have is None:
            self.points[at] = used
        else:
            have.merge(used)
        self.total.merge(used)


# The name of the line for everything that has no line of its own.
OTHER = "other"


def lines_of(points: Iterable[tuple[str | None, int, UsageSums]]) -> list[ChartLine]:
    """Lines of points by name and time, those with the most requests first; last the unnamed line of all others."""
    lines: dict[str | None, ChartLine] = {}
    for name, at, used in points:
        line = lines.get(name)
        if line is None:
            line = lines[name] = ChartLine(OTHER if name is None else name)
        line.add(at, used)
    rest = lines.pop(None, None)
    ordered = sorted(lines.values(), key=lambda line: (-line.total.requests, line.name))
    return ordered if rest is None else [*ordered, rest]
