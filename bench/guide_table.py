"""The figures of one worker for the guide, from the summary: the only place of the guide's figures about speed.

    python -m bench.guide_table    # writes bench/figures.md from bench/summary.md; a full run of `make bench` does so too

`docs/production.md` and `docs/benchmarks.md` include the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

BENCH = Path(__file__).resolve().parent
HEADINGS = ("Per worker (one core)", "Penstock", "Compared with nginx, which only forwards")
# Each line of the table, and the figures of the summary that it covers.
LINES: Mapping[str, tuple[str, ...]] = {
    "small calls, all features on, cache off": ("small/load", "small/wrk"),
    "small calls, several in flight per upstream connection": ("in-flight/load", "in-flight/wrk"),
    "small calls over TLS, connections kept open": ("tls",),
    "cache hits": ("hit/load", "hit/wrk"),
    "identical calls, joined": ("join/load", "join/wrk"),
    "calls in batches of 20": ("batch",),
    "replies of 100 KB, streamed": ("reply",),
    "messages to 10,000 subscribed sockets": ("fanout/10000",),
    "memory of an idle connection": ("idle",),
    "memory of a subscribed socket": ("sockets/memory",),
}
UNITS = {
    "calls/s": "per second",
    "MB/s": "MB/s",
    "messages/CPU second": "per CPU second",
    "KB/connection": "KB",
    "KB/socket": "KB",
}


def table(summary: str) -> str:
    """The table for the guide, from the text of `summary.md`."""
    measured = {cells[0]: cells for cells in _rows(summary)}
    lines = [HEADINGS, ("---",) * len(HEADINGS)]
    for about, names in LINES.items():
        found = [measured[name] for name in names]
        unit = UNITS[found[0][2]]
        lines.append((about, f"{_span([_first(cells[3]) for cells in found])} {unit}", _compared(found)))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _rows(summary: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in summary.splitlines() if line.startswith("| ")][2:]


def _first(cell: str) -> float:
    """The median of a cell such as `15,033 (8,281 – 25,038)`."""
    found = re.match(r"[\d,.]+", cell)
    assert found is not None, cell
    return float(found[0].replace(",", ""))


def _span(values: Sequence[float]) -> str:
    low, high = (_rounded(value) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _rounded(value: float) -> str:
    """Two digits are as many as the runs agree on."""
    return f"{float(f'{value:.2g}'):,.0f}" if value >= 10 else f"{value:.1f}"


def _compared(found: Sequence[Sequence[str]]) -> str:
    if not all(cells[4].startswith("nginx") for cells in found):
        return ""
    ratios = [_first(cells[5]) for cells in found]
    low, high = f"{min(ratios):.2g}", f"{max(ratios):.2g}"
    return f"{low} times" if low == high else f"{low} to {high} times"


def write(folder: Path = BENCH) -> None:
    (folder / "figures.md").write_text(table((folder / "summary.md").read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    write()
