"""The full report, as text for the terminal and as JSON."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench.figures import Figure, Row, Spread, Verdict
from bench.runner import Skip

HEADINGS = ("", "median", "min .. max", "× nginx", "min .. max", "CPU µs", "p50 µs", "p99 µs", "")


def text(facts: dict[str, object], figures: Sequence[Figure], skips: Sequence[Skip]) -> str:
    """Format all figures, skips and aims for a terminal."""
    parts = [_facts_text(facts)]
    parts += [_figure_text(figure, pgo=bool(facts["python_pgo"])) for figure in figures]
    parts.append(_skips_text(skips))
    parts.append(_aims_text(figures, pgo=bool(facts["python_pgo"])))
    return "\n\n".join(part for part in parts if part)


def _facts_text(facts: dict[str, object]) -> str:
    build = "with" if facts["python_pgo"] else "WITHOUT"
    return (
        f"{facts['date']}, {facts['machine']} ({facts['cpu']}), {facts['cores']} cores, Linux {facts['kernel']}\n"
        f"{facts['layout']}; load average before: {facts['load_average_before']}\n"
        f"Python {facts['python']} built {build} PGO, the hot path {facts['hot_path']}\n"
        f"{_pairs(facts['packages'])}; {_pairs(facts['baselines'])}"
    )


def _pairs(values: object) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) if isinstance(values, dict) else ""


def _figure_text(figure: Figure, *, pgo: bool) -> str:
    rows = [HEADINGS] + [_row_cells(figure, name, row) for name, row in figure.rows.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    lines = [f"{figure.name}: {figure.title}, {figure.unit}"]
    if figure.method:
        lines.append(f"  ({figure.method})")
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)),
        ]
        lines.append("  " + "  ".join([*cells, row[-1]]).rstrip())
    return "\n".join(lines + [f"  aim {_verdict_text(verdict)}" for verdict in figure.verdicts(pgo=pgo)])


def _row_cells(figure: Figure, name: str, row: Row) -> tuple[str, ...]:
    value, ratio = Spread.of(row.values), figure.ratio(name)
    samples = row.samples
    return (
        name,
        _number(value.middle) if value else "-",
        f"{_number(value.low)} .. {_number(value.high)}" if value else "-",
        f"{ratio.middle:.2f}" if ratio else "-",
        f"{ratio.low:.2f} .. {ratio.high:.2f}" if ratio else "-",
        f"{median(s.cpu_us_per_request for s in samples):.1f}" if samples else "-",
        f"{median(s.p50_us for s in samples):,.0f}" if samples else "-",
        f"{median(s.p99_us for s in samples):,.0f}" if any(s.p99_us for s in samples) else "-",
        row.remarks(),
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def _verdict_text(verdict: Verdict) -> str:
    if verdict.holds is None:
        return f"not judged: {verdict.text}"
    return f"{'HOLDS' if verdict.holds else 'MISSED'}: {verdict.found:.2f}, aim {verdict.text}"


def _skips_text(skips: Sequence[Skip]) -> str:
    return (
        "\n".join(["skipped:", *(f"  {skip.what}: {skip.why}" for skip in skips)]) if skips else "nothing was skipped"
    )


def _aims_text(figures: Sequence[Figure], *, pgo: bool) -> str:
    lines = [f"  {figure.name:<14} {_verdict_text(v)}" for figure in figures for v in figure.verdicts(pgo=pgo)]
    return "\n".join(["aims:", *lines]) if lines else ""


def write_json(path: Path, facts: dict[str, object], figures: Sequence[Figure], skips: Sequence[Skip]) -> None:
    pgo = bool(facts["python_pgo"])
    document = {
        "about": facts,
        "figures": [_figure_json(figure, pgo=pgo) for figure in figures],
        "skipped": [{"what": skip.what, "why": skip.why} for skip in skips],
    }
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def _figure_json(figure: Figure, *, pgo: bool) -> dict[str, object]:
    return {
        "name": figure.name,
        "title": figure.title,
        "unit": figure.unit,
        "method": figure.method,
        "candidates": {name: _row_json(figure, name, row) for name, row in figure.rows.items()},
        "aims": [
            {"aim": v.text, "found": None if v.found is None else round(v.found, 4), "holds": v.holds}
            for v in figure.verdicts(pgo=pgo)
        ],
    }


def _row_json(figure: Figure, name: str, row: Row) -> dict[str, object]:
    return {
        "value": _spread_json(Spread.of(row.values)),
        "ratio_to_nginx": _spread_json(figure.ratio(name)),
        "valid": row.is_valid,
        "remarks": row.remarks(),
        "rounds": [round(value, 3) for value in row.values],
        "samples": [sample.as_json() for sample in row.samples],
    }


def _spread_json(spread: Spread | None) -> dict[str, float] | None:
    if spread is None:
        return None
    return {"median": round(spread.middle, 4), "min": round(spread.low, 4), "max": round(spread.high, 4)}
