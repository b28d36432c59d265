"""Who is asked at the moment, and since when: one upstream, and perhaps a second beside it. And who had troubles of its own."""

from __future__ import annotations

from proxy.core.routing import UpstreamHealth
from proxy.wire.upstream import Upstream


class FlightAttempts:
    """The two attempts of a flight that may be under way at once. A flight begins them itself: one more call costs 0.1 µs."""

    __slots__ = ("_accused", "_asked_at", "_first", "_first_at", "_second", "_second_at")

    _first: Upstream | None
    _first_at: float
    _second: Upstream | None
    _second_at: float
    # When the attempt that ended last was begun.
    _asked_at: float
    # Who complained, while nobody has answered.
    _accused: tuple[UpstreamHealth, ...]

    def is_carried_by(self, upstream: Upstream) -> bool:
        return upstream is self._first or upstream is self._second

    def _is_under_way(self) -> bool:
        return self._first is not None or self._second is not None

    def _under_way(self) -> list[Upstream]:
        return [upstream for upstream in (self._first, self._second) if upstream is not None]

    def _newest(self, now: float) -> tuple[Upstream | None, float]:
        """The one that was asked last, and how long ago."""
        first, second = self._first, self._second
        if first is None or (second is not None and self._second_at > self._first_at):
            return second, now - self._second_at
        return first, now - self._first_at

    def _ended(self, upstream: Upstream) -> float:
        """One attempt is over; when it began."""
        upstream.health.inflight -= 1
        if upstream is self._first:
            self._first = None
            self._asked_at = self._first_at
        else:
            self._second = None
            self._asked_at = self._second_at
        return self._asked_at

    def accuse(self, upstream: Upstream) -> None:
        """It says that it is unwell. Anybody can send a call that makes every upstream say so: nobody is blamed for that."""
        upstream.health.complained()
        self._accused += (upstream.health,)

    def _blame(self, now: float) -> None:
        """Another one has answered: it was not the call."""
        for health in self._accused:
            health.blamed(now)
        self._accused = ()
