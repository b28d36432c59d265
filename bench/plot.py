"""The plot as SVG: one panel of bars per figure. A bar is a median, its whisker the spread of the rounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from bench.figures import Figure, Spread

WIDTH, LABELS, RIGHT = 860, 130, 190
BAR, STEP, HEAD, FOOT = 15, 22, 44, 14
INK, FAINT, OURS, OTHERS, AIM = "#1f2933", "#8793a0", "#0b7285", "#adb5bd", "#c92a2a"

# The plot has its own background, so that it is readable on a dark page.
STYLE = "text{font:12px system-ui,sans-serif;fill:" + INK + "}.t{font-weight:600}.f{fill:" + FAINT + "}"


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    spread: Spread
    text: str
    is_ours: bool


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    note: str
    bars: list[Bar]
    aim: float | None

    @property
    def height(self) -> int:
        return HEAD + STEP * len(self.bars) + FOOT


def write(path: Path, facts: dict[str, object], figures: Sequence[Figure]) -> None:
    panels = [panel for figure in figures if (panel := _panel(figure, pgo=bool(facts["python_pgo"]))).bars]
    height = 56 + sum(panel.height for panel in panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">',
        f'<style>{STYLE}</style><rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        _text(16, 24, "Penstock against its baselines, same run", "t"),
        _text(16, 42, f"{facts['date']}, {facts['cpu']}, {facts['layout']}, Python {facts['python']}", "f"),
    ]
    top = 56
    for panel in panels:
        parts.append(_draw(panel, top))
        top += panel.height
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _panel(figure: Figure, *, pgo: bool) -> Panel:
    """Show ratios to nginx if the aims are relative, else absolute values."""
    relative = all(aim.over for aim in figure.aims) and "nginx" in figure.rows
    bars = [bar for name in figure.rows if (bar := _bar(figure, name, relative=relative))]
    aim = next((a.bound_here(pgo=pgo) for a in figure.aims if a.over in ("", "nginx")), None)
    sense = "lower is better" if any(a.at_most for a in figure.aims) else "higher is better"
    unit = f"ratio to nginx ({figure.unit})" if relative else figure.unit
    unit = f"estimate, {unit}" if figure.is_estimate else unit
    aim_shown = aim if relative or not all(a.over for a in figure.aims) else None
    return Panel(figure.title, f"{unit}, {sense}{_aim_note(aim_shown)}", bars, aim_shown)


def _aim_note(aim: float | None) -> str:
    return "" if aim is None else f"; aim {aim:g} (dashed)"


def _bar(figure: Figure, name: str, *, relative: bool) -> Bar | None:
    row = figure.rows[name]
    value = Spread.of(row.values)
    spread = figure.ratio(name) if relative else value
    if value is None or spread is None:
        return None
    middle = f"{value.middle:,.0f}" if value.middle >= 100 else f"{value.middle:.2f}"
    text = f"{spread.middle:.2f}  ({middle} {figure.unit})" if relative else f"{middle} {figure.unit}"
    return Bar(name, spread, text + ("" if row.is_valid else "  NOT VALID"), name == "penstock")


def _draw(panel: Panel, top: int) -> str:
    most = _axis(panel)
    room = WIDTH - LABELS - RIGHT

    def x(value: float) -> float:
        return LABELS + room * min(1.0, max(0.0, value) / most)

    parts = [_text(16, top + 16, panel.title, "t"), _text(16, top + 33, panel.note, "f")]
    for i, bar in enumerate(panel.bars):
        y = top + HEAD + STEP * i
        parts.append(_text(LABELS - 8, y + 12, bar.label, "", anchor="end"))
        colour = OURS if bar.is_ours else OTHERS
        parts.append(
            f'<rect x="{LABELS}" y="{y}" width="{x(bar.spread.middle) - LABELS:.1f}" height="{BAR}" fill="{colour}"/>'
        )
        parts.append(_line(x(bar.spread.low), y + BAR / 2, x(bar.spread.high), y + BAR / 2, INK))
        parts.append(_text(x(bar.spread.high) + 6, y + 12, bar.text, ""))
    if panel.aim is not None:
        bottom = top + HEAD + STEP * len(panel.bars)
        parts.append(_line(x(panel.aim), top + HEAD - 4, x(panel.aim), bottom, AIM, dashed=True))
    return "\n".join(parts)


def _axis(panel: Panel) -> float:
    """End the axis at the largest bar, unless that would make the others invisible."""
    highest = sorted(bar.spread.high for bar in panel.bars)
    typical = max(highest[len(highest) // 2], panel.aim or 0.0)
    return min(max(highest[-1], panel.aim or 0.0), 5 * typical) or 1.0


def _text(x: float, y: float, text: str, kind: str, *, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dash}/>'
