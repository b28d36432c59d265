"""Exemplars: trace ids that the latency metrics of calls refer to."""

from __future__ import annotations


class Exemplars:
    """The trace and the latency of the last traced call, for each network and method."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], tuple[str, float, float]] = {}

    def __repr__(self) -> str:
        return f"<Exemplars {len(self._last)}>"

    def note(self, labels: tuple[str, str], seconds: float, trace_id: str, now: float) -> None:
        """`labels`: the network and the method."""
        self._last[labels] = trace_id, seconds, now

    def rows(self) -> list[tuple[str, str, str, float, float]]:
        return [(*labels, *last) for labels, last in self._last.items()]
