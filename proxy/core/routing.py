"""Which upstream of a network a call goes to.

Everything here is arithmetic on what is passed in; time is an argument. An `UpstreamHealth` belongs to one upstream and changes
with every call; an `UpstreamGroup` is the upstreams of one network and chooses among them.

*Choice.* Two candidates are drawn by weight (power of two choices). The first is taken unless the second has a clearly better
score, which estimates the wait. So upstreams that are equally fast share calls by weight, a slow or loaded one is avoided, and
the one with the best score does not get the calls of all workers at once.
*Cost.* Among upstreams that are equally fast, the one whose provider bills least for the call is taken. An own node costs
nothing. A `CostPolicy` says what is equally fast, or how long a call may wait to save a cent.
*Lag.* An upstream behind the network's head by more than the allowance takes no reads until it has caught up.
*Standing.* An upstream of another chain, or on another branch than most, takes no calls at all, and none before its chain was
checked.
*Bounds.* A call about an old block goes only to upstreams that have it (`data_bounds.py`).
*Canaries.* An upstream that is being promoted takes part in the choice for its share of the calls, and for those that no other
one takes.
*Tiers.* A higher tier is used only when no upstream of a lower tier can take the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from proxy.core.credits import NANOS_PER_USD
from proxy.core.upstream_health import UpstreamHealth

# The first of two candidates is taken unless its score is worse than the second's by more than this factor.
EQUALLY_FAST = 1.5
NANOS_PER_CENT: Final = NANOS_PER_USD // 100
# A hedge is sent when a call takes longer than this quantile of recent ones, within these bounds.
HEDGE_QUANTILE = 0.95
HEDGE_FLOOR_S = 0.05
HEDGE_CEILING_S = 2.0
# If no upstream meets all needs of a call, they are given up one after the other: the head, a small lag, and last a method that
# the upstream said it does not have, because its own error is then the best reply. Each line: whether the head still counts,
# whether a lag is accepted, and whether a missing method is accepted. For each line, upstreams with a closed breaker come
# first, then those whose breaker is softly open. An old block is never given up: an upstream without it has no reply. Of those
# that have not reached the head, the newest are taken: another host may have announced a block that none of ours has reported
# yet, and the caller has seen the one before it.
Concession = tuple[bool, bool, bool]
CONCESSIONS: Final[tuple[Concession, ...]] = (
    (True, False, False),
    (False, False, False),
    (False, True, False),
    (False, False, True),
    (False, True, True),
)


@dataclass(frozen=True, slots=True)
class CostPolicy:
    """How a network's calls are sent to cheap upstreams. `equally_fast`: upstreams are if their expected waits differ by a
    smaller factor. `ms_per_cent`: the wait that is as bad as a cost of one US cent; 0.0: cost only decides among those that are
    equally fast."""

    equally_fast: float = EQUALLY_FAST
    ms_per_cent: float = 0.0

    def wait_for(self, nanos: int) -> float:
        """The seconds that are as bad as this cost."""
        return nanos * self.ms_per_cent / (NANOS_PER_CENT * 1000)


USUAL_COSTS: Final = CostPolicy()


class UpstreamNeeds:
    """The needs of a call. `tried` is a bit set of indexes to pass over; `head` the least head it must have; `oldest` the
    oldest block that it reads, negative if all upstreams have it, and `data` the kind of data that it reads there. `archive`:
    the provider may bill it as a read of old data."""

    __slots__ = ("archive", "data", "head", "may_lack", "may_lag", "method", "oldest", "softly", "tried")

    def __init__(self, method: str, *, tried: int, head: int, archive: bool, oldest: int, data: int) -> None:
        self.method = method
        self.tried = tried
        self.head = head
        self.archive = archive
        self.oldest = oldest
        self.data = data
        # Whether the call accepts an upstream that lags, that lacks the method, or whose breaker is softly open.
        self.may_lag = False
        self.may_lack = False
        self.softly = False

    def __repr__(self) -> str:
        return f"<UpstreamNeeds {self.method} head {self.head}{f' block {self.oldest}' if self.oldest >= 0 else ''}>"

    def concede(self, concession: Concession) -> None:
        keeps_head, self.may_lag, self.may_lack = concession
        if not keeps_head:
            self.head = 0


class UpstreamGroup:
    """The upstreams of one network."""

    __slots__ = ("_canaries", "_costs", "_draw", "_due", "_even", "_has_prices", "has_account_shares", "members")

    def __init__(self, members: Sequence[UpstreamHealth], costs: CostPolicy = USUAL_COSTS) -> None:
        self.members = tuple(members)
        self._costs = costs
        self._draw = 1
        self._even = len({member.weight for member in members}) < 2
        # Those that may have a part of the calls only, and the part of a call that is due to each.
        self._canaries = tuple(member for member in members if member.share < 1.0)
        self._due = [0.0] * len(self._canaries)
        self._has_prices = any(member.meter is not None for member in members)
        budgets = [member.meter.budget for member in members if member.meter is not None]
        self.has_account_shares = any(budget is not None and budget.account_share < 1.0 for budget in budgets)

    def __repr__(self) -> str:
        return f"<UpstreamGroup {', '.join(member.label for member in self.members)}>"

    def choose(
        self,
        now: float,
        method: str,
        *,
        tried: int = 0,
        head: int = 0,
        archive: bool = False,
        oldest: int = -1,
        data: int = 0,
    ) -> UpstreamHealth | None:
        """The upstream for this call. See `UpstreamNeeds` for the arguments."""
        others = self._others() if self._canaries else 0
        needs = UpstreamNeeds(method, tried=tried | others, head=head, archive=archive, oldest=oldest, data=data)
        fit = self._fit(now, needs) or self._second_best(now, needs)
        if not fit and others:
            needs = UpstreamNeeds(method, tried=tried, head=head, archive=archive, oldest=oldest, data=data)
            fit = self._fit(now, needs) or self._second_best(now, needs)
        if not fit:
            return None
        if len(fit) == 1:
            return fit[0]
        tier = min(member.tier for member in fit)
        fit = [member for member in fit if member.tier == tier]
        return self._better_of_two(_cheapest(fit, needs, self._costs) if self._has_prices else fit)

    def used_up_by(self, account: str) -> int:
        """The upstreams of whose budget this account has used its part, as a bit set of indexes."""
        bits = 0
        for member in self.members:
            budget = None if member.meter is None else member.meter.budget
            if budget is not None and account in budget.over_accounts:
                bits |= 1 << member.index
        return bits

    def _others(self) -> int:
        """The canaries that this call is not due to, as a bit set of indexes."""
        bits = 0
        for at, member in enumerate(self._canaries):
            self._due[at] += member.share
            if self._due[at] < 1.0:
                bits |= 1 << member.index
            else:
                self._due[at] -= 1.0
        return bits

    def _fit(self, now: float, needs: UpstreamNeeds) -> list[UpstreamHealth]:
        """The members that meet the needs."""
        return [
            member
            for member in self.members
            # `free`, `serves_all` and `lacking` usually make the method calls unnecessary: this saves 2 of 5 µs with three
            # members.
            if not needs.tried >> member.index & 1
            and (
                member.free
                or (
                    (member.takes_calls(now) or (needs.softly and member.allows_fallback(now)))
                    and member.affords(needs.method, archive=needs.archive)
                    and (not member.method_limits or member.admits(needs.method, now, softly=needs.softly))
                )
            )
            and (member.serves_all or member.may_serve(needs.method))
            and (not member.lacking or needs.may_lack or not member.lacks(needs.method, now))
            and (needs.may_lag or not member.lagging)
            and (needs.oldest < 0 or member.bounds.holds(needs.data, needs.oldest, member.head))
            and (not needs.head or not member.head or member.head >= needs.head)
        ]

    def _second_best(self, now: float, needs: UpstreamNeeds) -> list[UpstreamHealth]:
        """The members that meet the needs after the fewest concessions."""
        is_any_soft = bool([member for member in self.members if member.is_soft or member.may_rest(now)])
        needs_head = needs.head > 0
        for concession in CONCESSIONS:
            needs.concede(concession)
            fit = self._fit(now, needs)
            if not fit and is_any_soft:
                needs.softly = True
                fit = self._fit(now, needs)
                needs.softly = False
            if fit:
                return _newest(fit) if needs_head and not needs.head else fit
        return []

    def doubtful_for_writes(self, now: float) -> int:
        """The upstreams, as a bit set of indexes, that get a write only if there is no other: a write cannot be repeated."""
        bits = 0
        for member in self.members:
            if member.pause_s or member.silent or now < member.writes_paused_until:
                bits |= 1 << member.index
        return bits

    def _better_of_two(self, fit: list[UpstreamHealth]) -> UpstreamHealth:
        if len(fit) == 1:
            return fit[0]
        # A linear congruential generator: cheap, and random enough.
        self._draw = draw = (self._draw * 1103515245 + 12345) & 0x7FFFFFFF
        if self._even:
            at = (draw >> 8) % len(fit)
            first, second = fit[at], fit[at - 1 - (draw >> 20) % (len(fit) - 1)]
        else:
            first = _drawn(fit, draw)
            second = _drawn([member for member in fit if member is not first], draw * 40503 & 0x7FFFFFFF)
        return second if second.score() * EQUALLY_FAST < first.score() else first

    def hedge_after_s(self, asked: UpstreamHealth) -> float:
        """After how many seconds the call is sent to another upstream as well. If there are too few samples of this upstream,
        the lowest quantile of the others is used."""
        quantile = asked.quantile_s(HEDGE_QUANTILE)
        if quantile is None:
            known = [q for member in self.members if (q := member.quantile_s(HEDGE_QUANTILE)) is not None]
            quantile = min(known, default=HEDGE_CEILING_S)
        return min(max(quantile, HEDGE_FLOOR_S), HEDGE_CEILING_S)


def _newest(fit: list[UpstreamHealth]) -> list[UpstreamHealth]:
    """Those with the newest head that can be true, or whose head is not known."""
    newest = max([member.head for member in fit if not member.ahead], default=0)
    return [member for member in fit if not member.head or member.head >= newest]


def _cheapest(fit: list[UpstreamHealth], needs: UpstreamNeeds, policy: CostPolicy) -> list[UpstreamHealth]:
    """Among equally fast upstreams, those whose provider bills least for the call. A loaded upstream is not fast. If a
    cent is worth some wait, those whose wait and cost together are least, with others that are as fast at the same cost."""
    costs = [
        (
            0 if member.meter is None else member.meter.cost_of(needs.method, archive=needs.archive),
            member.score(),
            member,
        )
        for member in fit
    ]
    if policy.ms_per_cent:
        _, least, fastest = min([(policy.wait_for(cost) + wait, cost, wait) for cost, wait, _ in costs])
    else:
        fastest = min([wait for _, wait, _ in costs])
        least = min([cost for cost, wait, _ in costs if wait <= fastest * policy.equally_fast])
    return [member for cost, wait, member in costs if cost == least and wait <= fastest * policy.equally_fast]


def _drawn(fit: list[UpstreamHealth], draw: int) -> UpstreamHealth:
    """One of them, by weight."""
    at = draw / 0x80000000 * sum([member.weight for member in fit])
    for member in fit:
        at -= member.weight
        if at < 0.0:
            return member
    return fit[-1]
