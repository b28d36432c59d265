"""How many calls may be in flight at an upstream, learnt from its latency.

The operator sets the maximum. An upstream that cannot work on that many at a time queues them itself: each answer then takes
longer, and the throughput does not grow. So the limit follows the latency (a *gradient*): it grows while answers are about as
fast as with half as many calls, and shrinks in proportion when they are slower.

The latency to compare with is measured, not assumed, because it depends on what clients ask for: now and then the limit is
halved for a moment, and halved again while that makes answers take about half as long, because then the upstream still queues
calls. After the measurement, the limit continues from its value before it. Only calls that had to wait for their turn are
observed. Below the limit nothing is measured and nothing changes.
"""

from __future__ import annotations

from math import exp, log, sqrt

# The limit is never less than this share of the maximum: a few slow answers are weak evidence.
LEAST_SHARE = 0.125
# Answers may take this much longer than with half as many calls before the limit shrinks.
TOLERANCE = 1.3
# If half as many calls take less than this share of the time, the throughput is about the same, so the upstream still queues
# calls. Otherwise the latency is the time that the upstream works on a call.
QUEUED = 0.65
# A window has as many observations as the limit, and at least this many. A maximum below this is not measured.
SMALLEST_WINDOW = 8
# How often the limit is halved for a moment: after this time, or after this multiple of the latency if that is longer.
MEASURE_EVERY_S = 10.0
MEASURE_EVERY = 30.0
# After this long without an observation, clients may send other calls: a measurement in progress is abandoned.
FORGET_S = 1.0
# Shorter latencies count as this one: the logarithm needs a floor.
SHORTEST_S = 0.0001


class ConcurrencyLimit:
    """`allowed` is the limit at the moment; `latency_s` the usual latency, 0.0 until it is known."""

    __slots__ = (
        "_base_s",
        "_before_s",
        "_count",
        "_least",
        "_logs",
        "_measure_at",
        "_measures",
        "_seen_at",
        "_skip",
        "_stable",
        "allowed",
        "latency_s",
        "most",
    )

    def __init__(self, most: int) -> None:
        self.most = most
        self.allowed = most
        self.latency_s = 0.0
        self._least = max(1, int(most * LEAST_SHARE)) if most >= SMALLEST_WINDOW else most
        # The limit outside of measurements.
        self._stable = most
        # The latency with half as many calls, and when it is measured again.
        self._base_s = 0.0
        self._measure_at = 0.0
        self._measures = False
        # While it is measured: the latency before the limit was last halved.
        self._before_s = 0.0
        # Calls in flight that were sent under the previous limit. They are not observed.
        self._skip = most
        # The window: how many calls ended, and the sum of the logarithms of their latencies.
        self._count = 0
        self._logs = 0.0
        self._seen_at = 0.0

    def __repr__(self) -> str:
        return f"<ConcurrencyLimit {self.allowed} of {self.most}, {self.latency_s * 1000:.1f} ms>"

    def observe(self, took_s: float, now: float) -> None:
        """A call that had waited for its turn was answered."""
        if now - self._seen_at > FORGET_S:
            self._measures = False
            self._change(self._stable)
        self._seen_at = now
        if self._skip:
            self._skip -= 1
            return
        self._count += 1
        self._logs += log(max(took_s, SHORTEST_S))
        if self._count >= max(SMALLEST_WINDOW, self.allowed):
            self._judge(exp(self._logs / self._count), now)

    def _change(self, allowed: int) -> None:
        """Change the limit, and start a window that counts only calls sent from now on."""
        self._skip = self.allowed
        self._count = 0
        self._logs = 0.0
        self.allowed = allowed

    def _judge(self, took_s: float, now: float) -> None:
        if self._measures:
            self._measured(took_s, now)
            return
        self.latency_s = took_s
        if now < self._measure_at:
            self._follow(took_s)
        elif self.allowed > self._least:
            self._measures = True
            self._halve(took_s)
        else:
            self._end_measurement(took_s, now)

    def _halve(self, took_s: float) -> None:
        self._before_s = took_s
        self._change(max(self._least, self.allowed // 2))

    def _measured(self, took_s: float, now: float) -> None:
        if took_s < QUEUED * self._before_s and self.allowed > self._least:
            self._halve(took_s)
        else:
            self._end_measurement(took_s, now)

    def _end_measurement(self, took_s: float, now: float) -> None:
        self._measures = False
        self._base_s = took_s
        self._measure_at = now + max(MEASURE_EVERY_S, MEASURE_EVERY * took_s)
        self._follow(self.latency_s)

    def _follow(self, took_s: float) -> None:
        gradient = TOLERANCE * self._base_s / took_s
        if gradient >= 1.0:
            self._stable = min(self.most, self._stable + max(1, int(sqrt(self._stable))))
        else:
            self._stable = max(self._least, int(self._stable * max(0.5, gradient)))
        self._change(self._stable)
