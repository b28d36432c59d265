"""The outcome of a seed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule of the oracle that the history broke."""

    rule: str
    at_s: float
    text: str

    def __str__(self) -> str:
        return f"{self.at_s:12.6f}  {self.rule}: {self.text}"


@dataclass(frozen=True, slots=True)
class Outcome:
    seed: int
    digest: str
    violations: tuple[Violation, ...]
    outcomes: Counter[str]
    coverage: Counter[str]
    calls: int
    virtual_s: float
    turns: int

    def __repr__(self) -> str:
        return f"<Outcome of seed {self.seed}: {self.digest}, {self.calls} calls, {len(self.violations)} violations>"
