"""Which upstream a call goes to: health learnt from traffic, a breaker, and power of two choices.

Everything here is arithmetic on what is passed in; time is an argument. A `Health` belongs to one upstream and changes
with every call; a `Group` is the upstreams of one network and chooses among them.

*Choice.* Two candidates are drawn by weight. The first is taken unless the second is plainly better by score, the wait
to expect: so upstreams that are equally fast share by weight, a slow or loaded one is passed by, and one that looks
best to everybody is not run over. *Breaker.* Closed while calls succeed; open after a run of failures or when most
fail; then one trial call at a time, and each failed trial doubles the pause. A call that another upstream answered
first, although it was asked later, counts as failed if its upstream answered nothing else meanwhile: so one that has fallen
silent is left alone long before its calls time out, and one that is overloaded is slow, not broken.

*Blame.* Nothing that clients choose takes an upstream from the others. Clients can send calls that fail: params that an
upstream rejects, crashes on, or works on for minutes; and one attacker may have many accounts. So a breaker opens *fully*
only when no call caused the failure (a refused connection), or when the upstream does not report its head either, for
which we ask ourselves. Otherwise it opens *softly*: the upstream is passed over while another one takes calls, and used
as before when none does.

*Methods.* An upstream that replies "method not found" is passed over for that method while another one takes the call. The
reply is neither a success, which would favour the upstream for its speed, nor a failure.

*Lag.* An upstream behind the network's head by more than the allowance takes no reads until it has caught up.
*Standing.* An upstream of another chain, or on another branch than most, takes no calls at all, and none before its chain was
checked.
*Tiers.* A higher tier is used only when no upstream of a lower one can be.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Final, Literal

# Upper edges of the latency histogram, in seconds; one more bucket holds the rest.
EDGES_S: Final[tuple[float, ...]] = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
# How fast the averages follow: the last twenty calls or so.
FOLLOW = 0.05
# A run of failures that opens the breaker; and the share of failures, once there were enough calls to tell.
FAILURES_IN_A_ROW = 5
FAILING_SHARE = 0.5
ENOUGH_CALLS = 10
# Writes that may fail in a row before others are preferred: each one is a client's transaction.
WRITE_FAILURES_IN_A_ROW = 3
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
# How long an upstream is passed over for a method that it does not have. It may be upgraded meanwhile.
LACKING_S = 300.0
# The longest Retry-After that is obeyed: longer ones are taken for a mistake.
LONGEST_REST_S = 300.0
# How much worse the first of two drawn may be and still be taken: within that, upstreams are equally fast.
EQUALLY_FAST = 1.5
# Hedge when a reply is later than all but this share of the recent ones, but never before the floor.
HEDGE_QUANTILE = 0.95
HEDGE_FLOOR_S = 0.05
HEDGE_CEILING_S = 2.0
# Samples below which a quantile says nothing.
ENOUGH_SAMPLES = 20
# Retries that each client has for itself when the shared savings are spent: so many at once, and so many a second.
OWN_RETRIES = 20
OWN_RETRIES_PER_S = 10.0
# Bounds memory. Beyond this the client that spent its own retries first has all of them again.
MAX_CLIENTS = 10_000
# The histogram forgets half of itself when it holds this many: it speaks of the recent past.
FORGET_AT = 2048


# `unchecked`: it has not named its chain yet. Only an upstream in good standing takes calls.
Standing = Literal["good", "unchecked", "wrong_chain", "forked"]


class UpstreamHealth:
    """The health of one upstream."""

    __slots__ = (
        "ahead", "allow", "archive", "back_at", "bad", "calls", "cordoned", "deny", "failing_share", "failures_in_a_row",
        "free", "good", "head", "head_at", "head_hash", "histogram", "index", "inflight", "is_soft", "label", "lacking",
        "lagging", "latency_s", "mark", "parent_hash", "pause_s", "paused_until", "peak", "rate_edge", "rate_s",
        "rests_until", "samples", "serves_all", "silent", "standing", "tier", "trial_until", "weight", "withheld",
        "writes_failed", "writes_paused_until",
    )  # fmt: skip

    def __init__(
        self,
        label: str,
        *,
        index: int = 0,
        weight: float = 1.0,
        tier: int = 0,
        archive: bool = True,
        allow: Iterable[str] = (),
        deny: Iterable[str] = (),
        requests_per_second: float = 0.0,
        mark: str = "",
    ) -> None:
        self.label = label
        # Identifies it independently of its position in the settings.
        self.mark = mark
        self.index = index
        self.weight = weight
        self.tier = tier
        self.archive = archive
        self.allow = frozenset(allow)
        self.deny = frozenset(deny)
        self.serves_all = not self.allow and not self.deny
        # Methods that it said it does not have, and until when that is believed.
        self.lacking: dict[str, float] = {}
        # The upstream's own limit: seconds of refill that a call costs, and the moment its bucket would have been empty.
        self.rate_s = 1.0 / requests_per_second if requests_per_second else 0.0
        self.rate_edge = 0.0
        self.inflight = 0
        self.latency_s = 0.01
        self.failing_share = 0.0
        self.failures_in_a_row = 0
        self.calls = 0
        self.good = 0
        self.bad = 0
        self.pause_s = 0.0
        self.paused_until = 0.0
        self.rests_until = 0.0
        self.trial_until = 0.0
        # Whether the breaker is open because of what clients sent.
        self.is_soft = False
        # Whether it did not even say where its head is when it was last asked, and when it last did so again.
        self.silent = False
        self.back_at = 0.0
        # Whether calls go through without a second thought: kept by what happens, and by `refresh`.
        self.free = not self.rate_s
        self.head = 0
        self.head_at = 0.0
        # The hashes of the head and of its parent; empty if only the number is known.
        self.head_hash = ""
        self.parent_hash = ""
        # The highest head that it has reported on this branch.
        self.peak = 0
        # Takes no reads: too far behind the others, or `ahead` of them by more than is possible.
        self.lagging = False
        self.ahead = False
        self.cordoned = False
        # Writes in a row that got no valid reply, and until when other upstreams are preferred for them.
        self.writes_failed = 0
        self.writes_paused_until = 0.0
        self.standing: Standing = "good"
        # Takes no calls at all: cordoned, or not in good standing.
        self.withheld = False
        self.histogram = [0] * (len(EDGES_S) + 1)
        self.samples = 0

    def __repr__(self) -> str:
        figures = f"{self.latency_s * 1000:.1f} ms, {self.inflight} in flight, {self.failing_share:.0%} failing"
        return f"<UpstreamHealth {self.label} {figures}>"

    # Events

    def succeeded(self, took_s: float) -> None:
        self.good += 1
        self.calls += 1
        self.failures_in_a_row = 0
        self.pause_s = 0.0
        self.trial_until = 0.0
        if self.is_soft:
            self.is_soft = False
            self.paused_until = self.rests_until
        self.failing_share -= FOLLOW * self.failing_share
        self.latency_s += FOLLOW * (took_s - self.latency_s)
        self.histogram[bisect_left(EDGES_S, took_s)] += 1
        self.samples += 1
        if self.samples >= FORGET_AT:
            self._forget_half()

    def lacked(self, method: str, now: float, *, certainly: bool) -> None:
        """It replied that it does not have the method. Methods come from the family's table, so `lacking` is bounded. A reply
        that is not `certainly` about the method, but perhaps about the params, is not remembered."""
        self.trial_until = 0.0
        if certainly:
            self.lacking[method] = now + LACKING_S

    def complained(self) -> None:
        """It returned a server error, which the call may have caused. A trial ends; the next call is another trial."""
        self.bad += 1
        self.trial_until = 0.0

    def failed(self, now: float, *, by_call: bool = False) -> None:
        """A call failed. `by_call`: the call itself may be the cause."""
        self.bad += 1
        self.blamed(now, by_call=by_call)

    def blamed(self, now: float, *, by_call: bool = False) -> None:
        """It failed; or complained, and another upstream has answered the same call."""
        self.calls += 1
        self.failures_in_a_row += 1
        self.failing_share += FOLLOW * (1.0 - self.failing_share)
        failing = self.calls >= ENOUGH_CALLS and self.failing_share > FAILING_SHARE
        if self.failures_in_a_row >= FAILURES_IN_A_ROW or failing or self.pause_s:
            self.open(now, softly=by_call and not self.silent)

    def overdue(self, began: float, now: float) -> None:
        """A call timed out. An upstream that has reported its head meanwhile is healthy: the call itself is slow."""
        if self.head_at > began:
            self.complained()
        else:
            self.failed(now, by_call=True)

    def late(self, after_s: float, now: float) -> None:
        """Another upstream answered the call, although it was asked later, and this one has answered nothing meanwhile."""
        self.slow(after_s)
        self.failed(now, by_call=True)

    def slow(self, after_s: float) -> None:
        """A call was not answered within this time."""
        if after_s > self.latency_s:
            self.latency_s += FOLLOW * (after_s - self.latency_s)

    def open(self, now: float, *, softly: bool = False) -> None:
        """Open the breaker: no calls for a while, twice as long as last time."""
        if self.pause_s and now < self.paused_until:
            self.is_soft = self.is_soft and softly
            return  # A call that was under way when it opened: it says nothing new.
        self.pause_s = min(self.pause_s * 2 or FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self.paused_until = max(self.rests_until, now + self.pause_s)
        self.trial_until = 0.0
        self.is_soft = softly
        self.free = False

    def write_failed(self, now: float) -> None:
        """It replied to a write with an HTTP error. A write is not repeated, so no other upstream's reply will show whose fault
        that was: after a few of them, writes go elsewhere for a while."""
        self.writes_failed += 1
        if self.writes_failed >= WRITE_FAILURES_IN_A_ROW:
            doublings = min(self.writes_failed - WRITE_FAILURES_IN_A_ROW, 6)
            self.writes_paused_until = now + min(FIRST_PAUSE_S * 2.0**doublings, LONGEST_PAUSE_S)

    def rest(self, now: float, for_s: float) -> None:
        """The upstream asked for a pause (429 with Retry-After): that is not a failure."""
        self.rests_until = max(self.rests_until, now + min(for_s, LONGEST_REST_S))
        self.paused_until = max(self.paused_until, self.rests_until)
        self.free = False

    def cordon(self, *, cordoned: bool, now: float) -> None:
        """No calls, or calls again, because an operator says so; what is under way goes on to its end."""
        self.cordoned = cordoned
        self.refresh(now)

    def stand(self, standing: Standing, now: float) -> bool:
        """Its chain or branch was compared with what it should be. Returns whether the outcome is new."""
        if standing == self.standing:
            return False
        self.standing = standing
        self.refresh(now)
        return True

    def refresh(self, now: float) -> None:
        """A pause ends by time alone, so the clock has to be checked."""
        self.withheld = self.cordoned or self.standing != "good"
        self.free = now >= self.paused_until and not (self.pause_s or self.rate_s or self.withheld)

    def saw_head(self, number: int, now: float, block_hash: str = "", parent_hash: str = "") -> None:
        self.head = number
        self.head_at = now
        self.head_hash = block_hash
        self.parent_hash = parent_hash
        if number > self.peak:
            self.peak = number

    def fell_silent(self, now: float) -> None:
        """It did not say where its head is. Its traffic decides; one that is being tried has failed."""
        self.silent = True
        if self.pause_s or self.failures_in_a_row >= FAILURES_IN_A_ROW:
            self.open(now)

    def spoke(self, took_s: float, now: float) -> None:
        """It said where its head is. One that was silent is back: the next call may try it. One that is quick again is not
        thought slow for ever, although it gets no calls that would show it."""
        if self.silent:
            self.back_at = now
            if self.pause_s:
                self.paused_until = min(self.paused_until, max(now, self.rests_until))
        self.silent = False
        self.latency_s = min(self.latency_s, max(took_s, self.latency_s / 2))

    def _forget_half(self) -> None:
        self.histogram = [count // 2 for count in self.histogram]
        self.samples = sum(self.histogram)

    # Decisions

    def takes_calls(self, now: float) -> bool:
        """Whether the breaker lets a call through; half open, one trial at a time."""
        if self.withheld or now < self.paused_until:
            return False
        if self.rate_s and self._rate_edge(now) > now:
            return False
        return not self.pause_s or now >= self.trial_until

    def takes_calls_softly(self, now: float) -> bool:
        """Whether a call can go here that finds no upstream with a closed breaker."""
        if not self.is_soft or self.withheld or now < self.rests_until:
            return False
        return not self.rate_s or self._rate_edge(now) <= now

    def begin(self, now: float) -> None:
        self.inflight += 1
        if self.rate_s:
            self.rate_edge = self._rate_edge(now)
        if self.pause_s:
            self.trial_until = now + max(self.pause_s, 1.0)

    def _rate_edge(self, now: float) -> float:
        """The edge after one more call. The bucket holds a second's calls, one at the least."""
        return max(self.rate_edge, now - max(1.0, self.rate_s)) + self.rate_s

    def may_serve(self, method: str) -> bool:
        return method not in self.deny and (not self.allow or method in self.allow)

    def lacks(self, method: str, now: float) -> bool:
        return self.lacking.get(method, 0.0) > now

    def score(self) -> float:
        """Lower is better: the wait to expect, by load for its weight, and failures."""
        return (self.latency_s + 0.0005) * (1.0 + self.inflight / self.weight) * (1.0 + 4.0 * self.failing_share)

    def quantile_s(self, share: float) -> float | None:
        """The upper edge of the bucket that holds this quantile of recent replies; None while too few were seen."""
        if self.samples < ENOUGH_SAMPLES:
            return None
        wanted = share * self.samples
        for place, count in enumerate(self.histogram):
            wanted -= count
            if wanted <= 0:
                return EDGES_S[place] if place < len(EDGES_S) else EDGES_S[-1]
        return EDGES_S[-1]


class UpstreamGroup:
    """The upstreams of one network."""

    __slots__ = ("_draw", "_even", "members")

    def __init__(self, members: Sequence[UpstreamHealth]) -> None:
        self.members = tuple(members)
        self._draw = 1
        self._even = len({member.weight for member in members}) < 2

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
        allow_lagging: bool = False,
        softly: bool = False,
        allow_lacking: bool = False,
    ) -> UpstreamHealth | None:
        """The upstream for this call. `tried` is a bit set of indexes to pass over; `head` the least head it must have."""
        fit = [
            member
            for member in self.members
            # The two flags save the calls that mostly say the same: 2 µs of 5 with three members.
            if not tried >> member.index & 1
            and (member.free or member.takes_calls(now) or (softly and member.takes_calls_softly(now)))
            and (member.serves_all or member.may_serve(method))
            and (not member.lacking or allow_lacking or not member.lacks(method, now))
            and (allow_lagging or not member.lagging)
            and (not archive or member.archive)
            and (not head or not member.head or member.head >= head)
        ]
        if not fit:
            if not softly and [member for member in self.members if member.is_soft]:
                return self.choose(
                    now, method, tried=tried, head=head, archive=archive, allow_lagging=allow_lagging, softly=True,
                    allow_lacking=allow_lacking,
                )  # fmt: skip
            return self._second_best(
                now, method, tried=tried, head=head, archive=archive, allow_lagging=allow_lagging,
                allow_lacking=allow_lacking,
            )  # fmt: skip
        if len(fit) == 1:
            return fit[0]
        tier = min(member.tier for member in fit)
        return self._better_of_two([member for member in fit if member.tier == tier])

    def may_have(self, method: str, now: float) -> bool:
        """Whether an upstream serves this method, although it may take no calls now."""
        return bool([each for each in self.members if each.may_serve(method) and not each.lacks(method, now)])

    def doubtful_for_writes(self, now: float) -> int:
        """The upstreams, as a bit set of indexes, that a write goes to only if there is no other: it cannot be repeated."""
        found = 0
        for member in self.members:
            if member.pause_s or member.silent or now < member.writes_paused_until:
                found |= 1 << member.index
        return found

    def _second_best(
        self, now: float, method: str, *, tried: int, head: int, archive: bool, allow_lagging: bool, allow_lacking: bool
    ) -> UpstreamHealth | None:
        """Give up the wishes one after the other: a head that is behind, a lag, an archive that is none by its settings, and
        last the method that an upstream said it does not have: it knows best, and its error is a reply."""
        if head:
            return self.choose(
                now, method, tried=tried, archive=archive, allow_lagging=allow_lagging, allow_lacking=allow_lacking
            )
        if not allow_lagging:
            return self.choose(
                now, method, tried=tried, archive=archive, allow_lagging=True, allow_lacking=allow_lacking
            )
        if archive:
            return self.choose(now, method, tried=tried, allow_lacking=allow_lacking)
        if not allow_lacking and [member for member in self.members if member.lacking]:
            return self.choose(now, method, tried=tried, allow_lacking=True)
        return None

    def _better_of_two(self, fit: list[UpstreamHealth]) -> UpstreamHealth:
        if len(fit) == 1:
            return fit[0]
        # A linear congruential step: cheap, and no need for more chance than this.
        self._draw = draw = (self._draw * 1103515245 + 12345) & 0x7FFFFFFF
        if self._even:
            at = (draw >> 8) % len(fit)
            first, second = fit[at], fit[at - 1 - (draw >> 20) % (len(fit) - 1)]
        else:
            first = _drawn(fit, draw)
            second = _drawn([member for member in fit if member is not first], draw * 40503 & 0x7FFFFFFF)
        return second if second.score() * EQUALLY_FAST < first.score() else first

    def hedge_after_s(self, asked: UpstreamHealth) -> float:
        """When another one is asked as well. An upstream too new to tell is measured by the others."""
        quantile = asked.quantile_s(HEDGE_QUANTILE)
        if quantile is None:
            known = [q for member in self.members if (q := member.quantile_s(HEDGE_QUANTILE)) is not None]
            quantile = min(known, default=HEDGE_CEILING_S)
        return min(max(quantile, HEDGE_FLOOR_S), HEDGE_CEILING_S)


def _drawn(fit: list[UpstreamHealth], draw: int) -> UpstreamHealth:
    """One of them, by weight."""
    at = draw / 0x80000000 * sum([member.weight for member in fit])
    for member in fit:
        at -= member.weight
        if at < 0.0:
            return member
    return fit[-1]


class RetryBudget:
    """Extra load that retries and hedges may cause: a share of the calls, saved up. The savings must cover all calls that
    are under way on an upstream when it goes down; a few are granted from the start.

    All clients share the savings, and one whose calls all fail can use them up. Then each client still has a few retries of its
    own, which come back with time.
    """

    __slots__ = ("_most", "_own", "_saved", "_share")

    def __init__(self, share: float = 0.2, most: float = 500.0) -> None:
        self._share = share
        self._most = most
        self._saved = most / 5
        # By client: the moment from which on all its own retries are there again.
        self._own: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<RetryBudget {self._saved:.1f} of {self._most:.0f}>"

    def earn(self) -> None:
        saved = self._saved + self._share
        self._saved = saved if saved < self._most else self._most

    def spend(self, now: float = 0.0, client: str | None = None) -> bool:
        """Without a client only the savings are spent."""
        if self._saved >= 1.0:
            self._saved -= 1.0
            return True
        return client is not None and self._spend_own(client, now)

    def _spend_own(self, client: str, now: float) -> bool:
        full_at = max(self._own.get(client, 0.0), now) + 1.0 / OWN_RETRIES_PER_S
        if full_at - now > OWN_RETRIES / OWN_RETRIES_PER_S + 1e-9:
            return False
        if len(self._own) >= MAX_CLIENTS and client not in self._own:
            del self._own[next(iter(self._own))]
        self._own[client] = full_at
        return True
