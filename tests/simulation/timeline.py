"""A history that a person can read: as text, and as a sequence diagram."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tests.simulation.history import Event
from tests.simulation.outcome import Outcome

# The diagram's measures in pixels.
LANE, ROW, TOP = 190, 16, 40


def text_of(events: Sequence[Event], *, last: int | None = None, until: Outcome | None = None) -> str:
    """The events, or the last of them before the first violation."""
    if until is not None and until.violations:
        end_s = until.violations[0].at_s
        events = [event for event in events if event.at_s <= end_s]
    return "\n".join(f"  {event}" for event in (events if last is None else events[-last:]))


def svg_of(events: Sequence[Event], last: int = 300) -> str:
    """A lane for each part of the simulation, time from top to bottom."""
    events = events[-last:]
    lanes = {name: place for place, name in enumerate(dict.fromkeys(event.who for event in events))}
    width, height = LANE * len(lanes) + 100, TOP + ROW * (len(events) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="monospace" font-size="10">'
    ]
    for name, place in lanes.items():
        x = 100 + LANE * place
        parts.append(f'<text x="{x}" y="20" font-weight="bold">{escape(name)}</text>')
        parts.append(f'<line x1="{x - 6}" y1="{TOP - 10}" x2="{x - 6}" y2="{height}" stroke="#ccc"/>')
    for row, event in enumerate(events):
        y, x = TOP + ROW * (row + 1), 100 + LANE * lanes[event.who]
        colour = "#c00" if event.who == "oracle" else "#b60" if event.what.startswith("fault") else "#000"
        parts.append(f'<text x="4" y="{y}" fill="#888">{event.at_s:.6f}</text>')
        parts.append(f'<text x="{x}" y="{y}" fill="{colour}">{escape(event.what[:60])}</text>')
    return "\n".join((*parts, "</svg>"))
