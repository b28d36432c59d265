"""The ledger of a run: calls, writes, heads and events, what of them was lost, and how long each break lasted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class FleetBreak:
    """A part that was broken. `recovered_s` is None if it did not recover. `in_flight`: the calls without a reply in that
    moment, on all gateways. `writes_s`: when writes were acknowledged again."""

    part: str
    at_s: float
    failed_before: int
    in_flight: int = 0
    recovered_s: float | None = None
    failed: int = 0
    writes_s: float | None = None

    @property
    def kind(self) -> str:
        return self.part.rstrip("0123456789")

    def line(self) -> str:
        recovered = "did not recover" if self.recovered_s is None else f"recovered in {self.recovered_s:5.1f} s"
        calls = f"{self.failed} calls failed of {self.in_flight} in flight"
        writes = "" if self.writes_s is None else f", writes again in {self.writes_s:.1f} s"
        return f"  {self.at_s:6.1f} s  {self.part:12} {recovered}, {calls}{writes}"


@dataclass
class FleetLedger:
    answered: int = 0
    in_flight: int = 0
    # Calls without a result, by reason.
    failures: Counter[str] = field(default_factory=Counter)
    breaks: list[FleetBreak] = field(default_factory=list)
    expected: int = 0
    lost: int = 0
    invented: int = 0
    # Acknowledged writes, those of them that a later read did not show, and writes without an acknowledgement.
    writes: int = 0
    writes_lost: int = 0
    writes_failed: int = 0
    # Heads of a subscription that resumes after each disconnect.
    heads: int = 0
    gaps: int = 0
    repeated: int = 0
    reconnects: int = 0

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    def begin(self, part: str, at_s: float) -> FleetBreak:
        self.breaks.append(FleetBreak(part, at_s, self.failed, self.in_flight))
        return self.breaks[-1]

    def end(self, broken: FleetBreak, now_s: float) -> None:
        broken.recovered_s = now_s - broken.at_s
        broken.failed = self.failed - broken.failed_before

    def lines(self) -> list[str]:
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.failures.most_common()) or "none"
        return [
            f"calls       {self.answered} answered, {self.failed} failed ({reasons})",
            f"events      {self.expected} expected, {self.lost} lost, {self.invented} invented",
            f"writes      {self.writes} acknowledged, {self.writes_lost} of them lost, {self.writes_failed} refused",
            f"heads       {self.heads} on a socket, {self.gaps} gaps, {self.repeated} repeated, {self.reconnects} reconnects",
            f"breaks      {len(self.breaks)}",
            *(self._of_kind(kind) for kind in sorted({each.kind for each in self.breaks})),
            *(each.line() for each in self.breaks),
        ]

    def _of_kind(self, kind: str) -> str:
        """The worst figures of all breaks of a kind of part."""
        found = [each for each in self.breaks if each.kind == kind]
        longest = max((each.recovered_s or 0.0 for each in found), default=0.0)
        writes = max((each.writes_s or 0.0 for each in found), default=0.0)
        return (
            f"  {kind:10}  {len(found)} times, recovered in {longest:.1f} s at most, writes again in {writes:.1f} s at most, "
            f"{sum(each.failed for each in found)} calls failed of {sum(each.in_flight for each in found)} in flight"
        )

    @property
    def is_clean(self) -> bool:
        """Nothing acknowledged was lost, no event or head was lost or invented, and everything recovered."""
        losses = self.lost + self.invented + self.writes_lost + self.gaps + self.repeated
        return not losses and all(each.recovered_s is not None for each in self.breaks)
