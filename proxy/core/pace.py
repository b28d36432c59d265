"""The pace of calls to something that limits our rate with 429s: an upstream, or one of its methods.

After a 429, the upstream or method *rests* for as long as it asks, up to LONGEST_REST_S. During a rest, a trial call is allowed
now and then; the time between trials doubles with each one that is refused. From the first 429 on, there are no more calls per
second than were answered. This pace rises slowly, and ends after PACED_S without a 429.

Everything here is arithmetic on what is passed in; time is an argument.
"""

from __future__ import annotations

from typing import final

from proxy.core.limits import CallRate

# The longest Retry-After that is obeyed. A longer one is most likely a mistake.
LONGEST_REST_S = 300.0
# The first trial during a rest. Each one that is refused doubles the time to the next, up to the whole rest.
FIRST_TRIAL_S = 0.25
# A trial call whose client has left gives no sign. After this time it no longer prevents the next trial.
LONGEST_TRIAL_S = 1.0
# The pace is PACE_PART of the calls per second that were answered lately. The first one is at least FIRST_PACE, because there
# may have been few calls, or the upstream may be busy with those of others. After another 429, the pace is at most SLOWER times
# the one before, and at least LEAST_PACE. It ends after PACED_S without a 429.
PACE_PART, FIRST_PACE, SLOWER = 0.9, 10.0, 0.7
LEAST_PACE = 1.0
PACED_S = 60.0
# The factor by which the pace rises in each second: while the limit is unknown, below the limit, and above it. The limit
# becomes known with the second 429, or is declared.
SEEKING, NEARING, BEYOND = 2.0, 1.2, 1.05
# Calls that may go out at once: the pace of this many seconds, or one call.
PACE_BURST_S = 0.5
# Answered calls are sampled at this interval, to compute the pace.
SAMPLE_S = 1.0


@final
class Pace:
    """`declared`: the most calls per second by the settings; 0.0 if they say nothing."""

    __slots__ = (
        "_limit",
        "_limited_at",
        "_sampled_at",
        "_sampled_before",
        "_sampled_before_at",
        "_sampled_good",
        "_trial_gap_s",
        "cost_s",
        "declared",
        "edge",
        "is_tried",
        "rests_until",
        "try_at",
    )

    def __init__(self, declared: float = 0.0) -> None:
        self.declared = declared
        # The seconds between two calls, or 0.0 if they are not paced; and the time up to which calls have used the pace.
        self.cost_s = 0.0
        self.edge = 0.0
        # During a rest: when the next trial is allowed, the time between the last two, and whether one is under way.
        self.rests_until = 0.0
        self.try_at = 0.0
        self._trial_gap_s = 0.0
        self.is_tried = False
        # The most calls per second, as far as is known; 0.0 if it is not. And the last 429.
        self._limit = 0.0
        self._limited_at = 0.0
        # The calls that were answered, at the last two samples.
        self._sampled_at = 0.0
        self._sampled_good = 0
        self._sampled_before_at = 0.0
        self._sampled_before = 0

    def __repr__(self) -> str:
        return f"<Pace {1.0 / self.cost_s:.3g}/s>" if self.cost_s else "<Pace none>"

    def limited(self, now: float, for_s: float, good: int) -> None:
        """There was a 429 that asks for a rest of this many seconds. `good`: the calls that were answered since the start."""
        for_s = min(for_s, LONGEST_REST_S)
        if self.is_tried:
            self.is_tried = False
            self._trial_gap_s = min(2 * self._trial_gap_s, for_s)
            self.try_at = now + self._trial_gap_s
        elif now >= self.rests_until:  # Not a call that was under way when the rest began.
            self._slow_down(now, good)
            self._trial_gap_s = min(FIRST_TRIAL_S, for_s)
            self.try_at = now + self._trial_gap_s
        self._limited_at = now
        self.rests_until = max(self.rests_until, now + for_s)

    def _slow_down(self, now: float, good: int) -> None:
        """Set the pace from the calls that were answered lately, below the last pace. If none was answered, every call is
        refused for a while, which is no sign of the limit: the pace stays."""
        elapsed_s = min(max(now - self._sampled_before_at, SAMPLE_S), 2 * SAMPLE_S)
        pace = PACE_PART * (good - self._sampled_before) / elapsed_s
        if self.cost_s and not pace:
            return
        self._limit = 1.0 / self.cost_s if self.cost_s else self.declared
        pace = pace if self.cost_s else max(pace, FIRST_PACE)
        if self._limit:
            pace = max(min(pace, SLOWER * self._limit), LEAST_PACE)
        self.cost_s = 1.0 / pace

    def sample(self, now: float, good: int) -> None:
        """Called every SAMPLE_S: sample the answered calls, and raise the pace while there is no 429."""
        self._sampled_before_at, self._sampled_before = self._sampled_at, self._sampled_good
        self._sampled_at, self._sampled_good = now, good
        if self.cost_s and now >= self.rests_until:
            rises = BEYOND if self._limit * self.cost_s <= 1.0 else NEARING
            rises = rises if self._limit else SEEKING
            self.cost_s = 0.0 if now - self._limited_at > PACED_S else self.cost_s / rises

    def rest_ended(self) -> None:
        """A trial call was answered."""
        self.is_tried = False
        self._trial_gap_s = self.rests_until = 0.0

    def trial_began(self, now: float) -> None:
        """A call is sent during a rest. If nothing is heard of it, the next one is allowed after a while."""
        self.is_tried = True
        self.try_at = now + max(2 * self._trial_gap_s, LONGEST_TRIAL_S)

    def trial_failed(self) -> None:
        """A call failed for another reason than a rate limit. If it was a trial, the next call is another one."""
        if self.is_tried:
            self.is_tried = False
            self.try_at = 0.0

    def edge_after_call(self, now: float) -> float:
        return max(self.edge, now - max(PACE_BURST_S, self.cost_s)) + self.cost_s

    def allows_trial(self, now: float) -> bool:
        return now >= self.try_at


@final
class MethodLimit:
    """An upstream's limit of a method, or of all that a pattern names. A 429 lowers the rate below that of the settings. Calls
    then cost more of the tokens that all workers and hosts share, so a rate that one of them has learned counts for all."""

    __slots__ = ("_good", "pace", "rate")

    def __init__(self, rate: CallRate, per_second: float) -> None:
        self.rate = rate
        self.pace = Pace(per_second)
        # The calls that were answered.
        self._good = 0

    def __repr__(self) -> str:
        return f"<MethodLimit {self.rate!r}, {self.pace!r}>"

    def admits(self, now: float, *, softly: bool = False) -> bool:
        """`softly`: no other upstream takes the call, so a trial during a rest is allowed."""
        if now < self.pace.rests_until and not (softly and self.pace.allows_trial(now)):
            return False
        return self.rate.admits(now)

    def begin(self, now: float) -> None:
        self.rate.take(now)
        if now < self.pace.rests_until:
            self.pace.trial_began(now)

    def succeeded(self) -> None:
        self._good += 1
        if self.pace.is_tried:
            self.pace.rest_ended()

    def limited(self, now: float, for_s: float) -> None:
        self.pace.limited(now, for_s, self._good)
        self.rate.slow_to(self.pace.cost_s)

    def sample(self, now: float) -> None:
        self.pace.sample(now, self._good)
        self.rate.slow_to(self.pace.cost_s)

    def is_limited(self, now: float) -> bool:
        return now < self.pace.rests_until or self.pace.cost_s > 0.0
