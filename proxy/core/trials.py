"""Compares the replies of a candidate with those of the upstream in use, and sums up whether the candidate can replace it.

Replies are equal if they differ only in what may differ between nodes: the order of members, the case of hex digits, members
that the chain family or the method calls volatile. A revert is an answer like any other. A candidate that
has not reached the block of a read is *behind*, which is not a difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

import msgspec

from proxy.core.credits import NANOS_PER_USD
from proxy.core.latency_histogram import bucket_of
from proxy.core.usage import BUCKETS, quantile_ms
from proxy.core.verification import canonical, digest_of_error

TrialOutcome = Literal["same", "different", "behind", "error", "missing"]
OUTCOMES: Final[tuple[TrialOutcome, ...]] = get_args(TrialOutcome)
# The member that is named if a result differs as a whole.
WHOLE_RESULT: Final = "the whole result"
# Members in which two replies differ that are named, and those that a report keeps for each method.
MOST_MEMBERS: Final = 8
# Accounts that are counted for each outcome: it matters whether there are several.
MOST_ACCOUNTS: Final = 4
# So many reads of other accounts show how a candidate treats them.
OTHERS_READS: Final = 50
# Fewer reads than this say little.
ENOUGH_READS: Final = 1000
# Above these shares, a candidate is not ready.
MOST_ERRORS, MOST_BEHIND = 0.001, 0.02


def differing_members(ours: bytes, theirs: bytes, volatile: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """The members in which two results differ, such as `logs[].data`; none if they are equal."""
    one, other = (canonical(msgspec.json.decode(each), volatile) for each in (ours, theirs))
    if one == other:
        return ()
    members: list[str] = []
    _add_members(one, other, "", members)
    return tuple(members)


def _add_members(one: Any, other: Any, path: str, members: list[str]) -> None:
    """Add the members below this path in which the two differ."""
    if len(members) == MOST_MEMBERS:
        return
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted({*one, *other}):
            if name not in one or name not in other:
                _add(f"{path}.{name}", members)
            elif one[name] != other[name]:
                _add_members(one[name], other[name], f"{path}.{name}", members)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for left, right in zip(one, other, strict=True):
            if left != right:
                _add_members(left, right, f"{path}[]", members)
    else:
        _add(path, members)


def _add(path: str, members: list[str]) -> None:
    name = path.lstrip(".") or WHOLE_RESULT
    if name not in members and len(members) < MOST_MEMBERS:
        members.append(name)


def is_same_error(ours: bytes, theirs: bytes) -> bool:
    """Whether two errors say the same. Nodes agree on the code and the data, not on the message."""
    try:
        return digest_of_error(ours) == digest_of_error(theirs)
    except (ValueError, msgspec.DecodeError):
        return False


@dataclass(slots=True)
class MethodTrial:
    """The reads of one method. `members`: those that differed, and how often. `ours`, `theirs`: latencies by bucket."""

    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    members: dict[str, int] = field(default_factory=dict)
    ours: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    theirs: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    our_cost: int = 0
    their_cost: int = 0

    @property
    def reads(self) -> int:
        return sum(self.outcomes.values())

    def add(self, other: MethodTrial) -> None:
        for outcome, count in other.outcomes.items():
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + count
        self.members = dict((Counter(self.members) + Counter(other.members)).most_common(MOST_MEMBERS))
        self.ours = [one + more for one, more in zip(self.ours, other.ours, strict=True)]
        self.theirs = [one + more for one, more in zip(self.theirs, other.theirs, strict=True)]
        self.our_cost += other.our_cost
        self.their_cost += other.their_cost


class TrialRead:
    """One read by both. Costs are in billionths of a dollar. `account`: the one that made it; empty for reads of our own."""

    __slots__ = ("account", "members", "our_cost", "our_s", "outcome", "their_cost", "their_s")

    def __init__(
        self,
        outcome: TrialOutcome,
        our_s: float,
        their_s: float,
        members: tuple[str, ...] = (),
        our_cost: int = 0,
        their_cost: int = 0,
        account: str = "",
    ) -> None:
        self.outcome = outcome
        self.our_s = our_s
        self.their_s = their_s
        self.members = members
        self.our_cost = our_cost
        self.their_cost = their_cost
        self.account = account

    def __repr__(self) -> str:
        return f"<TrialRead {self.outcome}, {self.our_s:.3f} and {self.their_s:.3f} s>"


class Trial:
    """The trial of one candidate. Methods come from the family's table, so their number is bounded."""

    __slots__ = (
        "_rate",
        "_second",
        "_this_second",
        "accounts",
        "bounds",
        "busiest",
        "label",
        "limited",
        "methods",
        "share",
        "skipped",
    )

    def __init__(self, label: str, share: float = 0.0) -> None:
        """`share`: the part of calls that it gets meanwhile."""
        self.label = label
        self.share = share
        self.methods: dict[str, MethodTrial] = {}
        # Reads that were due, and were not made because of a limit.
        self.skipped = 0
        # For each outcome, how many reads of each account had it.
        self.accounts: dict[str, dict[str, int]] = {}
        # The most reads that it answered within a second, and those that it refused with a 429.
        self.busiest = self.limited = 0
        self._second, self._this_second = 0, 0
        # The oldest block that it has of each kind of data, and how many calls a second it takes, as far as is known.
        self.bounds = self._rate = ""

    def __repr__(self) -> str:
        return f"<Trial of {self.label}: {self.verdict}>"

    # Events

    def read(self, method: str, read: TrialRead) -> None:
        method_trial = self.methods.get(method)
        if method_trial is None:
            method_trial = self.methods[method] = MethodTrial()
        method_trial.outcomes[read.outcome] += 1
        for member in read.members:
            if member in method_trial.members or len(method_trial.members) < MOST_MEMBERS:
                method_trial.members[member] = method_trial.members.get(member, 0) + 1
        method_trial.ours[bucket_of(read.our_s)] += 1
        method_trial.theirs[bucket_of(read.their_s)] += 1
        method_trial.our_cost += read.our_cost
        method_trial.their_cost += read.their_cost
        by_account = self.accounts.setdefault(read.outcome, {})
        if read.account in by_account or len(by_account) < MOST_ACCOUNTS:
            by_account[read.account] = by_account.get(read.account, 0) + 1

    def replied(self, now: float, *, limited: bool) -> None:
        """It has replied to a read, perhaps with a 429."""
        self.limited += limited
        if int(now) != self._second:
            self._second, self._this_second = int(now), 0
        self._this_second += not limited
        self.busiest = max(self.busiest, self._this_second)

    def bounds_found(self, bounds: str) -> None:
        self.bounds = bounds

    def rate_found(self, rate: str) -> None:
        """It was tried how many calls a second it takes."""
        self._rate = rate

    def skip(self) -> None:
        self.skipped += 1

    # The report

    @property
    def total(self) -> MethodTrial:
        total = MethodTrial()
        for each in self.methods.values():
            total.add(each)
        return total

    def blamable(self, outcome: TrialOutcome) -> int:
        """The reads with this outcome that may count against the candidate. One account can choose reads that few upstreams
        answer. So if reads of others are known, those of the account that has most of them do not count."""
        whole, by_account = self.total.outcomes[outcome], self.accounts.get(outcome, {})
        return whole - max(by_account.values(), default=0) if self._others_read(outcome) else whole

    def culprit(self, outcome: TrialOutcome) -> str:
        """The account of all reads with this outcome, if reads of others are known; otherwise empty."""
        by_account = self.accounts.get(outcome, {})
        return next(iter(by_account)) if len(by_account) == 1 and self._others_read(outcome) else ""

    def _others_read(self, outcome: TrialOutcome) -> bool:
        """Whether enough reads of other accounts than the one with most of these are known."""
        by_account = self.accounts.get(outcome, {})
        first = max(by_account, key=lambda name: by_account[name], default="")
        reads = Counter[str]()
        for each in self.accounts.values():
            reads.update(each)
        return bool(first) and reads.total() - reads[first] >= OTHERS_READS

    @property
    def is_ready(self) -> bool:
        return is_safe(self.verdict)

    @property
    def verdict(self) -> str:
        """One sentence for the operator, with the reason."""
        total = self.total
        reads, outcomes = total.reads, total.outcomes
        if not reads:
            return "no reads yet"
        if outcomes["different"]:
            worst = max(self.methods, key=lambda name: self.methods[name].outcomes["different"])
            members = ", ".join(self.methods[worst].members) or WHOLE_RESULT
            whose = self._whose("different")
            return f"do not promote: {outcomes['different']:,} of {reads:,} reads differ{whose}, most of {worst} ({members})"
        if outcomes["missing"]:
            lacking = sorted(name for name, each in self.methods.items() if each.outcomes["missing"])
            return f"not ready: it lacks {', '.join(lacking)}{self._whose('missing')}"
        if outcomes["error"] > MOST_ERRORS * reads:
            return f"not ready: {outcomes['error']:,} of {reads:,} reads failed{self._whose('error')}"
        if outcomes["behind"] > MOST_BEHIND * reads:
            return f"not ready: it was behind in {outcomes['behind']:,} of {reads:,} reads"
        if reads < ENOUGH_READS:
            return f"too few reads to tell: {reads:,} of {ENOUGH_READS:,}, 0 different"
        return (
            f"safe to promote: {reads:,} reads, 0 different{_speed(total)}{_price(total)} ({self._confidence(reads)})"
        )

    def _whose(self, outcome: TrialOutcome) -> str:
        culprit = self.culprit(outcome)
        return f", all of account {culprit}" if culprit else ""

    @staticmethod
    def _confidence(reads: int) -> str:
        """The rule of three: after n reads without a difference, fewer than 3/n differ, with a probability of 95 %."""
        return f"fewer than 1 in {reads // 3:,} differ, with 95 % confidence"

    @property
    def rate(self) -> str:
        """How many reads it takes, as far as was seen."""
        if self._rate or not self.busiest:
            return self._rate
        refused = f"{self.limited:,} refused (429)" if self.limited else "none refused"
        return f"up to {self.busiest:,} reads a second, {refused}"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row for each method, the most used first, and one for all."""
        named = sorted(self.methods.items(), key=lambda item: -item[1].reads)
        return [_row(name, each) for name, each in [*named, ("all", self.total)]]

    # Other processes

    @property
    def as_data(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "share": self.share,
            "skipped": self.skipped,
            "methods": msgspec.to_builtins(self.methods),
            "accounts": self.accounts,
            "busiest": self.busiest,
            "limited": self.limited,
            "bounds": self.bounds,
        }

    def add(self, data: Mapping[str, Any]) -> None:
        """Add what another process has found."""
        self.skipped += data["skipped"]
        # Workers of the previous version do not report these.
        for outcome, by_account in data.get("accounts", {}).items():
            both = Counter(self.accounts.get(outcome, {})) + Counter(by_account)
            self.accounts[outcome] = dict(both.most_common(MOST_ACCOUNTS))
        self.busiest += data.get("busiest", 0)
        self.limited += data.get("limited", 0)
        self.bounds = self.bounds or data.get("bounds", "")
        for name, given in data["methods"].items():
            self.methods.setdefault(name, MethodTrial()).add(msgspec.convert(given, MethodTrial))


def is_safe(verdict: str) -> bool:
    return verdict.startswith("safe to promote")


def trials_of(views: Iterable[Mapping[str, Any]], shares: Mapping[str, float] | None = None) -> list[Trial]:
    """The trials that all workers report, by the label of the candidate. `shares`: only trials at these, by label."""
    trials: dict[str, Trial] = {}
    for view in views:
        for network in view["networks"]:
            for data in network.get("trials", ()):
                # Workers of the previous version do not report it.
                label, share = data["label"], data.get("share", 0.0)
                if shares is None or shares.get(label) == share:
                    trials.setdefault(label, Trial(label, share)).add(data)
    return [trials[label] for label in sorted(trials)]


def _row(name: str, each: MethodTrial) -> dict[str, Any]:
    return {
        "method": name,
        "reads": each.reads,
        **each.outcomes,
        "members": ", ".join(each.members) or None,
        "p50_ms": quantile_ms(each.ours, 0.5),
        "their_p50_ms": quantile_ms(each.theirs, 0.5),
        "p99_ms": quantile_ms(each.ours, 0.99),
        "their_p99_ms": quantile_ms(each.theirs, 0.99),
        "usd": _usd(each.our_cost),
        "their_usd": _usd(each.their_cost),
    }


def _usd(nanos: int) -> str:
    return f"{nanos / NANOS_PER_USD:.6f}"


def _speed(total: MethodTrial) -> str:
    ours, theirs = quantile_ms(total.ours, 0.5), quantile_ms(total.theirs, 0.5)
    return "" if not ours or theirs is None else _compared(theirs / ours - 1, "slower", "faster", "as fast")


def _price(total: MethodTrial) -> str:
    if not total.our_cost:
        return ", at no cost" if not total.their_cost else f", {_usd(total.their_cost)} US dollars and not free"
    return _compared(total.their_cost / total.our_cost - 1, "dearer", "cheaper", "at the same price")


def _compared(change: float, more: str, less: str, equal: str) -> str:
    percent = round(abs(change) * 100)
    return f", {equal}" if not percent else f", {percent} % {more if change > 0 else less}"
