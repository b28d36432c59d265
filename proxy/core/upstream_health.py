"""The health of one upstream, learnt from its calls and its heads: a breaker, latencies, standing.

Everything here is arithmetic on what is passed in; time is an argument.

*Breaker.* Closed while calls succeed; open after a run of failures or when most fail; then one trial call at a time, and each
failed trial doubles the pause. A call that another upstream answered first, although it was sent there later, counts as failed
if its upstream answered nothing else meanwhile. So an upstream that has stopped answering is avoided long before its calls time
out, and one that is overloaded counts as slow, not as broken.

*Blame.* A client must not be able to take an upstream away from other clients. Clients can send calls that fail: params that an
upstream rejects, crashes on, or works on for minutes; and one attacker may have many accounts. So a breaker opens *fully* only
when no call caused the failure (a refused connection), or when our own polls for the upstream's head fail too. Otherwise it
opens *softly*: the upstream is avoided while another one takes calls, and used as before when none does.

*Rate limits.* An upstream that answers 429 rests, while others take its calls, and then gets calls at a pace that rises slowly
(`pace.py`). If no other upstream takes the calls, refusing every one would turn one second of a rate limit into an outage. So a
trial call is sent now and then. If the settings limit the method (`method_rates`), the 429 counts for that limit alone: other
methods go on, and if they are limited too, their own 429s show it.

*Methods.* An upstream that replies "method not found" is avoided for that method while another one takes the call. The reply
counts neither as a success, which would favour the upstream for its speed, nor as a failure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from proxy.core.credits import CreditMeter
from proxy.core.data_bounds import DataBounds
from proxy.core.latency_histogram import LatencyHistogram
from proxy.core.limits import TOLERANCE_S, CallRate
from proxy.core.method_patterns import fitting_value
from proxy.core.pace import LONGEST_REST_S, SAMPLE_S, MethodLimit, Pace

# The weight of a new value in the averages: they cover about the last twenty calls.
FOLLOW = 0.05
# The breaker opens after this many failures in a row, or above this share of failures once there were enough calls.
FAILURES_IN_A_ROW = 5
FAILING_SHARE = 0.5
ENOUGH_CALLS = 10
# After this many failed writes in a row, other upstreams are preferred for writes: each one is a client's transaction.
WRITE_FAILURES_IN_A_ROW = 3
# A call is late after this many times the usual latency, within these bounds.
LATE = 2.0
SOONEST_LATE_S = 0.05
LATEST_LATE_S = 1.0
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
# How long an upstream is passed over for a method that it does not have. It may be upgraded meanwhile.
LACKING_S = 300.0
# After this many replies that other upstreams or the chain's hashes contradicted, an upstream gets no calls for this long.
CONTRADICTIONS = 3
# Added to the tier of an upstream whose soft budget is used up: above all tiers of the settings.
LAST_TIER = 10
DISTRUSTED_S = 600.0

# `unchecked`: it has not named its chain yet. Only an upstream in good standing takes calls.
Standing = Literal["good", "unchecked", "wrong_chain", "wrong_version", "forked"]


def name_in(label: str) -> str:
    """The name of an upstream in its label, such as `geth` in `ethereum/mainnet#geth`."""
    return label.rpartition("#")[2]


class UpstreamHealth:
    """The health of one upstream."""

    inflight = 0
    calls = 0
    good = 0
    bad = 0
    failures_in_a_row = 0
    latency_s = 0.01
    failing_share = 0.0
    _calls_before_poll = 0
    # The breaker: open until `paused_until`, then one call until `trial_until`. `is_soft`: because of what clients sent.
    pause_s = 0.0
    paused_until = 0.0
    trial_until = 0.0
    is_soft = False
    # When the paces of its methods were sampled, and until when one of its methods rests at most.
    sampled_at = 0.0
    methods_rest_until = 0.0
    # Writes in a row that got no valid reply, and until when other upstreams are preferred for them.
    writes_failed = 0
    writes_paused_until = 0.0
    # Its head, with the hashes of that and its parent if they are known; and the highest head it reported on this branch.
    head = 0
    head_at = 0.0
    # When its head last went back.
    head_fell_at = 0.0
    head_hash = ""
    parent_hash = ""
    peak = 0
    # Whether the last poll for its head failed, and when a poll last succeeded after one that failed.
    silent = False
    back_at = 0.0
    # Whether it is catching up with its chain.
    syncing = False
    # Takes no reads: too far behind the others, or `ahead` of them by more than is possible.
    lagging = False
    ahead = False
    # Takes no calls at all (`withheld`): cordoned, not in good standing, or distrusted.
    cordoned = False
    withheld = False
    # The part of calls that may choose it: below 1 while it is being promoted, and 0 while it is on trial (`canary.py`).
    share = 1.0
    # Its budget is used up. If it is a soft one, it is still chosen, but last.
    is_over_budget = False
    standing: Standing = "good"
    # Its replies that were contradicted lately, and until when it is distrusted for them.
    contradictions = 0
    contradicted_at = 0.0
    distrusted_until = 0.0
    # Until when it has no capacity left, as it said itself, and when it said so.
    exhausted_until = 0.0
    exhausted_at = 0.0
    # All contradicted replies since the start, and the last contradiction.
    contradicted_replies = 0
    last_contradiction = ""

    def __init__(
        self,
        label: str,
        *,
        index: int = 0,
        weight: float = 1.0,
        tier: int = 0,
        bounds: DataBounds | None = None,
        allow: Iterable[str] = (),
        deny: Iterable[str] = (),
        rate: CallRate | None = None,
        method_limits: Mapping[str, MethodLimit] | None = None,
        upstream_id: str = "",
        operator: str = "",
        operator_name: str = "",
        host: str = "",
        labels: tuple[str, ...] = (),
        meter: CreditMeter | None = None,
        share: float = 1.0,
    ) -> None:
        self.label = label
        self.share = share
        self.withheld = share == 0.0
        # Shown to operators: the host of its URL, and words from the settings.
        self.host = host
        self.labels = labels
        # Routing rules match these labels, and those that follow from its settings and its client.
        self._own_words = frozenset((*labels, f"name={name_in(label)}", f"operator={operator or label}"))
        self._own_words |= {"paid"} if meter is not None else frozenset()
        self.words = self._own_words
        # The client that it runs, as it says itself, such as Geth/v1.16.3.
        self.client = ""
        # Upstreams of one operator have one vote together. Clients see `operator_name`: the name in the settings, or else the
        # label, because they must not learn the domain of an upstream.
        self.operator = operator or label
        self.operator_name = operator_name or label
        # Identifies it independently of its position in the settings.
        self.upstream_id = upstream_id
        self.index = index
        self.weight = weight
        self.tier = tier
        self._own_tier = tier
        # The blocks that it has, for each kind of data.
        self.bounds = bounds or DataBounds()
        self.allow = frozenset(allow)
        self.deny = self._own_deny = frozenset(deny)
        # Methods that an operator has taken out of use here.
        self.cordoned_methods: frozenset[str] = frozenset()
        self.serves_all = not self.allow and not self.deny
        # Methods that it said it does not have, and until when that is believed.
        self.lacking: dict[str, float] = {}
        self.latencies = LatencyHistogram()
        # The upstream's own limit, if it has one. All workers of the host share it.
        self.rate = rate
        # Learnt from its 429s.
        self.pace = Pace()
        # Its limits of single methods, by name or pattern, and those that hold for methods that were called.
        self.method_limits = method_limits or {}
        self._limits_of_methods: dict[str, MethodLimit | None] = {}
        # Counts what its provider bills; None if its calls cost nothing.
        self.meter = meter
        # The rules whose limits it exceeds, as texts for operators.
        self.exclusions: tuple[str, ...] = ()
        # Whether calls may be sent without the checks of `takes_calls`, and are not counted by a meter. Cleared by events that
        # add a check; `refresh` updates it.
        self.free = rate is None and meter is None and not self.method_limits and not self.withheld

    def __repr__(self) -> str:
        figures = f"{self.latency_s * 1000:.1f} ms, {self.inflight} in flight, {self.failing_share:.0%} failing"
        return f"<UpstreamHealth {self.label} {figures}>"

    # Events

    def ended(self) -> None:
        """A call that `begin` counted is over, however it ended."""
        self.inflight -= 1

    def answered(self, took_s: float) -> None:
        """A call of the short path is over and had a good reply. One in eight is enough for the averages."""
        self.inflight -= 1
        if (self.good + 1) & 7 and not self.failures_in_a_row and not self.pause_s:
            self.good += 1
        else:
            self.succeeded(took_s)

    def batch_answered(self, calls: int, took_s: float) -> None:
        """A batch that was counted as one call is over, and had a good reply to each of its calls."""
        self.inflight -= 1
        self.succeeded(took_s)
        self.good += calls - 1

    def batch_split(self, calls: int) -> None:
        """A batch under way that was counted as one call is from now on counted by its calls."""
        self.inflight += calls - 1

    def succeeded(self, took_s: float, method: str = "") -> None:
        """A call had a good reply. `method` is needed if the method may have a limit."""
        if self.method_limits and method and (limit := self.limit_of(method)) is not None:
            limit.succeeded()
        self.good += 1
        self.calls += 1
        self.failures_in_a_row = 0
        self.pause_s = 0.0
        self.trial_until = 0.0
        if self.is_soft:
            self.is_soft = False
            self.paused_until = self.rests_until
        if self.pace.is_tried:
            self.pace.rest_ended()
            self.paused_until = 0.0
        self.failing_share -= FOLLOW * self.failing_share
        self.latency_s += FOLLOW * (took_s - self.latency_s)
        self.latencies.add(took_s)

    def method_unsupported(self, method: str, now: float, *, certainly: bool) -> None:
        """It replied that it does not have the method. Methods come from the family's table, so `lacking` is bounded. A reply
        that is not `certainly` about the method, but perhaps about the params, is not remembered."""
        self.trial_until = 0.0
        if certainly:
            self.lacking[method] = now + LACKING_S

    def server_error(self) -> None:
        """It returned a server error, which the call may have caused. A trial ends; the next call is another trial."""
        self.bad += 1
        self.trial_until = 0.0
        self.pace.trial_failed()

    def failed(self, now: float, *, by_call: bool = False) -> None:
        """A call failed. `by_call`: the call itself may be the cause."""
        self.bad += 1
        self.count_failure(now, by_call=by_call)

    def count_failure(self, now: float, *, by_call: bool = False) -> None:
        """Count a failure for the breaker: a call failed, or got a server error while another upstream answered it."""
        self.calls += 1
        self.pace.trial_failed()
        self.failures_in_a_row += 1
        self.failing_share += FOLLOW * (1.0 - self.failing_share)
        failing = self.calls >= ENOUGH_CALLS and self.failing_share > FAILING_SHARE
        if self.failures_in_a_row >= FAILURES_IN_A_ROW or failing or self.pause_s:
            self.open(now, softly=by_call and not self.silent)

    def overdue(self, began: float, now: float) -> None:
        """A call timed out. An upstream that has reported its head meanwhile is healthy: the call itself is slow."""
        if self.head_at > began:
            self.server_error()
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
            return  # The call was under way when the breaker opened, so its failure is not news.
        self.pause_s = min(self.pause_s * 2 or FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self.paused_until = max(self.rests_until, now + self.pause_s)
        self.trial_until = 0.0
        self.is_soft = softly
        self.free = False

    def write_failed(self, now: float) -> None:
        """It replied to a write with an HTTP error. A write is not repeated, so no other upstream's reply shows whether the
        write or the upstream was at fault. After a few of them, writes go elsewhere for a while."""
        self.writes_failed += 1
        if self.writes_failed >= WRITE_FAILURES_IN_A_ROW:
            doublings = min(self.writes_failed - WRITE_FAILURES_IN_A_ROW, 6)
            self.writes_paused_until = now + min(FIRST_PAUSE_S * 2.0**doublings, LONGEST_PAUSE_S)

    def write_succeeded(self) -> None:
        self.writes_failed = 0

    def rest(self, now: float, for_s: float) -> None:
        """The upstream asked for a pause (429 with Retry-After): that is not a failure."""
        self.pace.limited(now, for_s, self.good)
        self.paused_until = max(self.paused_until, self.rests_until)
        self.free = False

    def limited(self, method: str, now: float, for_s: float) -> None:
        """It answered a call of the method with a 429."""
        limit = self.limit_of(method) if self.method_limits else None
        if limit is None:
            self.rest(now, for_s)
            return
        limit.limited(now, for_s)
        self.methods_rest_until = max(self.methods_rest_until, limit.pace.rests_until)

    def cordon(self, *, cordoned: bool, now: float) -> None:
        """An operator cordons or uncordons the upstream. Calls under way are completed."""
        self.cordoned = cordoned
        self.refresh(now)

    def cordon_methods(self, methods: frozenset[str], now: float) -> None:
        """An operator cordons these methods, and no others."""
        self.cordoned_methods = methods
        self.deny = self._own_deny | methods
        self.serves_all = not self.allow and not self.deny
        self.refresh(now)

    def set_standing(self, standing: Standing, now: float) -> bool:
        """Record whether its chain and branch are right. Returns whether the outcome is new."""
        if standing == self.standing:
            return False
        self.standing = standing
        self.refresh(now)
        return True

    def contradicted(self, now: float, what: str = "") -> None:
        """A reply was proved wrong or outvoted. After CONTRADICTIONS of them, the upstream gets no calls for a while."""
        self.contradicted_replies += 1
        self.last_contradiction = what
        if now - self.contradicted_at > DISTRUSTED_S:
            self.contradictions = 0
        self.contradictions += 1
        self.contradicted_at = now
        if self.contradictions >= CONTRADICTIONS:
            self.distrusted_until = now + DISTRUSTED_S
            self.refresh(now)

    def capacity_exceeded(self, now: float, until: float) -> None:
        """It said that the capacity of our plan is used up: it gets no calls until then, or until a later poll succeeds."""
        self.exhausted_at = now
        self.exhausted_until = until
        self.rest(now, LONGEST_REST_S)
        self.refresh(now)

    def budget_changed(self, *, is_over: bool) -> None:
        """Its budget was used up, or there is a new one. With a soft budget, it is chosen last."""
        self.is_over_budget = is_over
        self.tier = self._own_tier + (LAST_TIER if is_over else 0)

    def judged(self, exclusions: tuple[str, ...]) -> None:
        """It was found to exceed the limits of these rules."""
        self.exclusions = exclusions

    def promoted(self, share: float, now: float) -> None:
        """The part of calls that may choose it has changed."""
        self.share = share
        self.refresh(now)

    def refresh(self, now: float) -> None:
        """Called regularly and after changes: pauses end by the clock, so `free` and `withheld` are computed again."""
        self.withheld = self.share == 0.0 or self._is_out(now)
        if now - self.sampled_at >= SAMPLE_S:
            self.sampled_at = now
            self.pace.sample(now, self.good)
            for limit in self.method_limits.values():
                limit.sample(now)
        self.free = now >= self.paused_until and not (
            self.pause_s or self.pace.cost_s or self.rate is not None or self.meter is not None or self.withheld
        )
        if self.cordoned_methods or self.method_limits:
            self.free = False  # The short path does not check methods.

    def _is_out(self, now: float) -> bool:
        is_trusted = self.standing == "good" and now >= self.distrusted_until
        return self.cordoned or not is_trusted or now < self.exhausted_until

    def status_reported(self, *, syncing: bool, floor: int, lacked: Iterable[str], now: float) -> None:
        """It has said whether it is catching up with its chain, which block is its lowest, and which methods it lacks."""
        self.syncing = syncing
        self.bounds.floor_reported(floor)
        for method in lacked:
            self.lacking[method] = now + LACKING_S

    def client_reported(self, client: str, missing: Iterable[str], *, until: float) -> None:
        """It has named its client, and was found not to have these methods. Those that its settings allow are not removed."""
        self.client = client
        name = client.partition("/")[0].lower()
        self.words = self._own_words | {f"client={name}"} if name else self._own_words
        self.lacking |= {method: until for method in missing if method not in self.allow}

    def saw_head(self, number: int, now: float, block_hash: str = "", parent_hash: str = "") -> None:
        if number < self.head:
            self.head_fell_at = now
        self.head = number
        self.head_at = now
        self.head_hash = block_hash
        self.parent_hash = parent_hash
        if number > self.peak:
            self.peak = number

    def has_moved_since(self, asked_at: float, number: int) -> bool:
        """Whether its head was seen to move, since a poll was sent, in the other direction than to the number that the poll
        found. Replies on several connections may overtake each other."""
        if number < self.head:
            return asked_at < self.head_at
        return number > self.head and asked_at < self.head_fell_at

    def lost_blocks(self, above: int, now: float) -> None:
        """The network has gone back to this block. The upstream's own head is unknown until its next poll."""
        if self.head > above:
            self.saw_head(above, now)
        self.peak = min(self.peak, above)

    def head_poll_failed(self, now: float) -> None:
        """A poll for its head failed. Only calls open a closed breaker; but if they have failed too, or the breaker is open, it
        opens fully."""
        self.silent = True
        if self.pause_s or self.failures_in_a_row >= FAILURES_IN_A_ROW:
            self.open(now)

    def head_reported(self, took_s: float, now: float) -> None:
        """A poll for its head succeeded. If polls failed before, the next call may be a trial. The latency is lowered if the
        poll was fast: a slow upstream gets too few calls to show that it is fast again. If rules leave it no calls because of
        its failures, some of these are forgotten with each poll, so that it is tried again."""
        if self.silent:
            self.back_at = now
            if self.pause_s:
                self.paused_until = min(self.paused_until, max(now, self.rests_until))
        self.silent = False
        if self.exhausted_until and now > self.exhausted_at + LONGEST_REST_S:
            self.exhausted_until = 0.0
            self.refresh(now)
        self.latency_s = min(self.latency_s, max(took_s, self.latency_s / 2))
        if self.exclusions and self.calls == self._calls_before_poll:
            self.failing_share -= FOLLOW * self.failing_share
        self._calls_before_poll = self.calls

    # Decisions

    def takes_calls(self, now: float) -> bool:
        """Whether the breaker lets a call through; half open, one trial at a time."""
        if self.withheld or now < self.paused_until:
            return False
        if self.rate is not None and not self.rate.admits(now):
            return False
        if self.pace.cost_s and self.pace.edge_after_call(now) > now + TOLERANCE_S:
            return False
        return not self.pause_s or now >= self.trial_until

    def takes_trials(self, now: float) -> bool:
        """Whether a read of its trial may be sent to it. It may be withheld from calls because it is on trial."""
        return not self._is_out(now) and now >= self.paused_until and (self.rate is None or self.rate.admits(now))

    def affords(self, method: str, *, archive: bool = False) -> bool:
        """Whether its budget has credits for a call."""
        return self.meter is None or self.meter.affords(method, archive=archive)

    def admits(self, method: str, now: float, *, softly: bool = False) -> bool:
        """Whether its limit of the method, if it has one, allows a call. `softly`: no other upstream takes it."""
        limit = self.limit_of(method) if self.method_limits else None
        return limit is None or limit.admits(now, softly=softly)

    def limit_of(self, method: str) -> MethodLimit | None:
        """Its limit of the method. Methods come from the family's table, so this is bounded."""
        if method not in self._limits_of_methods:
            self._limits_of_methods[method] = fitting_value(self.method_limits, method)
        return self._limits_of_methods[method]

    @property
    def rests_until(self) -> float:
        return self.pace.rests_until

    def may_rest(self, now: float) -> bool:
        """Whether it, or one of its methods, rests after a 429."""
        return now < self.pace.rests_until or now < self.methods_rest_until

    def is_limited(self, method: str, now: float) -> bool:
        """Whether it takes fewer calls of the method than it could because it limits our rate."""
        if self.withheld:
            return False
        limit = self.limit_of(method) if self.method_limits else None
        return now < self.rests_until or self.pace.cost_s > 0.0 or (limit is not None and limit.is_limited(now))

    def is_tried(self, now: float) -> bool:
        """Whether a trial call is under way that soon says whether it takes calls again, as its polls suggest."""
        return (
            self.pause_s > 0.0 and self.paused_until <= now < self.trial_until and not self.withheld and not self.silent
        )

    def allows_fallback(self, now: float) -> bool:
        """Whether a call can go here that finds no upstream with a closed breaker."""
        if self.withheld or (self.rate is not None and not self.rate.admits(now)):
            return False
        if now < self.rests_until:
            return self.pace.allows_trial(now)
        return self.is_soft

    def begin_method(self, method: str, now: float) -> None:
        """Charge a call that `begin` counts to the limit of its method, if it has one."""
        limit = self.limit_of(method)
        if limit is not None:
            limit.begin(now)

    def begin(self, now: float) -> None:
        self.inflight += 1
        if self.rate is not None:
            self.rate.take(now)
        pace = self.pace
        if pace.cost_s:
            pace.edge = pace.edge_after_call(now)
            if now < pace.rests_until:
                pace.trial_began(now)
        if self.pause_s:
            self.trial_until = now + max(self.pause_s, 1.0)

    def may_serve(self, method: str) -> bool:
        return method not in self.deny and (not self.allow or method in self.allow)

    def lacks(self, method: str, now: float) -> bool:
        return self.lacking.get(method, 0.0) > now

    def score(self) -> float:
        """The expected wait, from latency, load relative to weight, and failures. Lower is better."""
        return (self.latency_s + 0.0005) * (1.0 + self.inflight / self.weight) * (1.0 + 4.0 * self.failing_share)

    def late_after_s(self) -> float:
        """The age from which a call is late. It follows the latency, so calls to a distant upstream are not all late."""
        return min(max(LATE * self.latency_s, SOONEST_LATE_S), LATEST_LATE_S)

    def quantile_s(self, share: float) -> float | None:
        """This quantile of recent latencies; None while too few are known."""
        return self.latencies.quantile_s(share)
