"""Usage as columns for a chart, or as a CSV table for download."""

from __future__ import annotations

import csv
import datetime
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from proxy.core.usage import ChartLine, UsageStep, UsageSums, step_of, step_start, times_of
from proxy.errors import InvalidRequest
from proxy.services.usage import UsageQuery
from proxy.web.timestamps import moment_of, time_of

DAY = datetime.timedelta(days=1)
COLUMNS = (
    "time", "key_id", "key_name", "network", "method", "requests", "errors", "units", "hits", "p50_ms", "p99_ms",
)  # fmt: skip
# Spreadsheets treat a cell that begins with one of these as a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def wanted_of(query: Mapping[str, Any], account: str | None) -> UsageQuery:
    """The usage query of a request; by default the last day."""
    now = datetime.datetime.now(datetime.UTC)
    last = moment_of(query["to"], "to") if query["to"] else now
    first = moment_of(query["from"], "from") if query["from"] else _day_before(last)
    step: UsageStep = step_of((last - first).total_seconds()) if query["step"] == "auto" else query["step"]
    return UsageQuery(
        step=step,
        first=step_start(first, step),
        last=last,
        account=account,
        by=query.get("by", "total"),
        network=query.get("network"),
        method=query.get("method"),
        key=query.get("key"),
        top=query.get("top", 1),
    )


def _day_before(moment: datetime.datetime) -> datetime.datetime:
    try:
        return moment - DAY
    except OverflowError:
        raise InvalidRequest("parameter 'to': must be after 0001-01-02T00:00:00Z", param="to") from None


def chart_of(wanted: UsageQuery, lines: Sequence[ChartLine], labels: Mapping[str, str]) -> dict[str, Any]:
    """The chart as columns over time. With many lines this is slow: run it in a thread."""
    times = times_of(int(wanted.first.timestamp()), int(wanted.last.timestamp()), wanted.step)
    whole = _sum_of(lines)
    return {
        "from": time_of(wanted.first),
        "to": time_of(wanted.last),
        "step": wanted.step,
        "by": wanted.by,
        "times": times,
        "series": [
            {
                "name": line.name,
                "label": labels.get(line.name, line.name),
                **columns_of(line, times),
                "totals": sums_of(line.total),
            }
            for line in lines
        ],
        "total": columns_of(whole, times),
        "totals": sums_of(whole.total),
    }


def _sum_of(lines: Sequence[ChartLine]) -> ChartLine:
    whole = ChartLine("")
    for line in lines:
        for at, used in line.points.items():
            # A copy: the line itself must not change with the sum.
            whole.add(at, replace(used))
    return whole


def columns_of(line: ChartLine, times: Sequence[int]) -> dict[str, list[Any]]:
    empty = UsageSums()
    points = [line.points.get(at, empty) for at in times]
    return {
        "requests": [point.requests for point in points],
        "errors": [point.errors for point in points],
        "units": [point.units for point in points],
        "hits": [point.hits for point in points],
        "p50_ms": [point.quantile_ms(0.5) for point in points],
        "p99_ms": [point.quantile_ms(0.99) for point in points],
    }


def sums_of(used: UsageSums) -> dict[str, Any]:
    return {
        "requests": used.requests,
        "errors": used.errors,
        "caller_errors": used.errors - used.faults,
        "failures": used.faults,
        "upstream_failures": used.upstream_faults,
        "units": used.units,
        "hits": used.hits,
        "p50_ms": used.quantile_ms(0.5),
        "p99_ms": used.quantile_ms(0.99),
    }


def csv_of(rows: Iterable[tuple[Mapping[str, Any], UsageSums]]) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(COLUMNS)
    for row, used in rows:
        names, sums = [_cell(str(row[name] or "")) for name in COLUMNS[1:5]], sums_of(used)
        writer.writerow([time_of(row["at"]), *names, *(sums[name] for name in COLUMNS[5:])])
    return out.getvalue().encode()


def _cell(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULA) else text
