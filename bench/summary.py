"""The summary: one Markdown line per figure, short enough to keep in the repository."""

from collections.abc import Sequence
from pathlib import Path

from bench.figures import REFERENCE, Figure, Spread, Verdict

INTRODUCTION = """\
# Benchmark summary

`make bench` writes this file and [report.svg](report.svg). Values are medians over the rounds, with the smallest and the
largest round in brackets. A ratio compares Penstock with the baseline of the same round; for times and memory, lower is
better. [README.md](README.md) explains the method.
"""
HEADINGS = ("Figure", "Measured", "Unit", "Penstock", "Baseline", "Penstock ÷ baseline", "Aim", "Met")


def write(path: Path, facts: dict[str, object], figures: Sequence[Figure]) -> None:
    path.write_text(text(facts, figures))


def text(facts: dict[str, object], figures: Sequence[Figure]) -> str:
    rows = [_cells(figure, pgo=bool(facts["python_pgo"])) for figure in figures]
    table = [HEADINGS, ("---",) * len(HEADINGS), *rows]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table]
    return "\n".join([INTRODUCTION, _conditions(facts), "", *lines]) + "\n"


def _conditions(facts: dict[str, object]) -> str:
    build = "with" if facts["python_pgo"] else "without"
    return (
        f"{facts['date']}; {facts['cpu']}, {facts['cores']} cores, {facts['layout']}; Python {facts['python']} built {build} "
        f"PGO, hot path {facts['hot_path']}; {facts['rounds']} rounds of {facts['seconds']} s."
    )


def _cells(figure: Figure, *, pgo: bool) -> tuple[str, ...]:
    ours = figure.rows.get("penstock")
    base = _baseline(figure)
    ratio = figure.ratio("penstock", base) if base else None
    verdicts = figure.verdicts(pgo=pgo)
    return (
        figure.name,
        figure.title,
        figure.unit,
        _spread(Spread.of(ours.values) if ours else None),
        f"{base}: {_spread(Spread.of(figure.rows[base].values))}" if base else "",
        _spread(ratio),
        "; ".join(verdict.text for verdict in verdicts),
        "; ".join(_met(verdict) for verdict in verdicts),
    )


def _baseline(figure: Figure) -> str:
    """The candidate that the first relative aim names, else nginx; empty if neither was measured."""
    names = [*(aim.over for aim in figure.aims if aim.over), REFERENCE]
    return next((name for name in names if name in figure.rows), "")


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return ""
    if spread.low == spread.high:
        return number(spread.middle)
    return f"{number(spread.middle)} ({number(spread.low)} – {number(spread.high)})"


def _met(verdict: Verdict) -> str:
    if verdict.holds is None:
        return "not judged"
    return "yes" if verdict.holds else f"no: {number(verdict.found or 0.0)}"


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
