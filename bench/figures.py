"""The results of a run: figures with a row per candidate, medians, spreads, and whether the aims were met."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from bench.cases import Aim, Case
from bench.loaders import Sample

REFERENCE = "nginx"
FOREIGN_CPU = 0.1  # report other work on the service's core above this share
FAULTS_ALLOWED = 0.001  # above this share of faults a figure is not valid


@dataclass(slots=True)
class Row:
    """One candidate in one figure: a value per round, in the figure's unit."""

    values: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    note: str = ""
    shares_core: bool = False  # the load also runs on the service's cores, so their utilisation is meaningless

    @property
    def is_valid(self) -> bool:
        total = sum(sample.requests + sample.faults for sample in self.samples)
        faults = sum(sample.faults for sample in self.samples)
        return bool(self.values) and faults <= total * FAULTS_ALLOWED

    def remarks(self) -> str:
        """Everything that limits how far the row can be trusted."""
        faults = sum(sample.faults for sample in self.samples)
        found = [self.note] if self.note else []
        if faults:
            found.append(f"{faults} faults{'' if self.is_valid else ': NOT VALID'}")
        if late := sum(sample.late for sample in self.samples):
            found.append(f"could not keep up: {late} calls still waiting")
        return "; ".join(found + self._disturbances())

    def _disturbances(self) -> list[str]:
        if not self.samples or self.shares_core:
            return []
        load_busy = median(sample.load_busy for sample in self.samples)
        service_busy = median(sample.service_busy for sample in self.samples)
        foreign = median(sample.service_busy - sample.service_share for sample in self.samples)
        found = ["the load's core was the limit"] if load_busy > 0.97 > service_busy else []
        if foreign > FOREIGN_CPU:
            found.append(f"other work had {foreign:.0%} of the service's core")
        return found


@dataclass(frozen=True, slots=True)
class Spread:
    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        return cls(median(values), min(values), max(values)) if values else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """An aim and the measured value. `holds` is None if it could not be judged; `text` then includes the reason."""

    text: str
    found: float | None
    holds: bool | None


@dataclass(slots=True)
class Figure:
    case: Case
    name: str
    title: str
    unit: str
    rows: dict[str, Row]
    aims: tuple[Aim, ...]
    method: str = ""  # how it was measured, if not the usual way
    is_estimate: bool = False  # shown, but not used to judge an aim

    def ratio(self, candidate: str, over: str = REFERENCE) -> Spread | None:
        """Compare round by round, so that a slow phase of the machine affects both sides of each ratio."""
        row, base = self.rows.get(candidate), self.rows.get(over)
        if row is None or base is None:
            return None
        return Spread.of([a / b for a, b in zip(row.values, base.values, strict=False) if b > 0])

    def verdicts(self, *, pgo: bool) -> list[Verdict]:
        return [self._judge(aim, pgo=pgo) for aim in self.aims]

    def _judge(self, aim: Aim, *, pgo: bool) -> Verdict:
        bound = aim.bound_here(pgo=pgo)
        sign = "≤" if aim.at_most else "≥"
        limit = f"{bound:,.2f}".rstrip("0").rstrip(".")
        text = f"{sign} {limit} × {aim.over}" if aim.over else f"{sign} {limit} {self.unit}"
        row = self.rows.get("penstock")
        if row is None or not row.values:
            return Verdict(f"{text}: Penstock was not measured", None, None)
        spread = self.ratio("penstock", aim.over) if aim.over else Spread.of(row.values)
        if spread is None:
            return Verdict(f"{text}: {aim.over} was not measured", None, None)
        base = self.rows.get(aim.over)
        if not row.is_valid or (base is not None and not base.is_valid):
            return Verdict(f"{text}: too many faults to judge", spread.middle, None)
        if self.is_estimate:
            return Verdict(f"{text}: {spread.middle:.2f} is only an estimate", spread.middle, None)
        holds = spread.middle <= bound if aim.at_most else spread.middle >= bound
        return Verdict(text, spread.middle, holds)
