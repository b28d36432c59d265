"""The ledger of a run: calls and their failures, events lost or invented, and how long each break lasted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class FleetBreak:
    """A part that was broken. `recovered_s` is None if it did not recover."""

    part: str
    at_s: float
    failed_before: int
    recovered_s: float | None = None
    failed: int = 0


@dataclass
class FleetLedger:
    answered: int = 0
    # Calls without a result, by reason.
    failures: Counter[str] = field(default_factory=Counter)
    breaks: list[FleetBreak] = field(default_factory=list)
    expected: int = 0
    lost: int = 0
    invented: int = 0

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    def begin(self, part: str, at_s: float) -> FleetBreak:
        self.breaks.append(FleetBreak(part, at_s, self.failed))
        return self.breaks[-1]

    def end(self, broken: FleetBreak, now_s: float) -> None:
        broken.recovered_s = now_s - broken.at_s
        broken.failed = self.failed - broken.failed_before

    def lines(self) -> list[str]:
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.failures.most_common()) or "none"
        return [
            f"calls       {self.answered} answered, {self.failed} failed ({reasons})",
            f"events      {self.expected} expected, {self.lost} lost, {self.invented} invented",
            f"breaks      {len(self.breaks)}",
            *(
                f"  {each.at_s:6.1f} s  {each.part:12} "
                + ("did not recover" if each.recovered_s is None else f"recovered in {each.recovered_s:5.1f} s")
                + f", {each.failed} calls failed"
                for each in self.breaks
            ),
        ]

    @property
    def is_clean(self) -> bool:
        """No event was lost or invented, and everything recovered."""
        return not self.lost and not self.invented and all(each.recovered_s is not None for each in self.breaks)
