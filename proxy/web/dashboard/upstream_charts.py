"""/admin/upstreams/{id}/history, /admin/upstream-changes and /admin/methods: upstreams over time and by method."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from proxy.services.method_matrix import MatrixCell, MatrixRow, MethodMatrix
from proxy.services.upstream_history import UpstreamHistory
from proxy.web.dashboard.session_endpoint import SessionHandler, SessionRequest
from proxy.web.timestamps import moment_of, time_of

_COLUMNS = ("p50_ms", "p99_ms", "error_rate", "lag_blocks", "breaker_open")
_DAY = datetime.timedelta(days=1)
_SPANS = {"hour": datetime.timedelta(hours=1), "day": _DAY}


class UpstreamChartHandlers:
    def __init__(self, history: UpstreamHistory, matrix: MethodMatrix) -> None:
        self._history = history
        self._matrix = matrix

    def handlers(self) -> dict[str, SessionHandler]:
        return {
            "admin_read_upstream_history": self.read,
            "admin_list_upstream_changes": self.changes,
            "admin_list_methods": self.methods,
        }

    async def read(self, request: SessionRequest) -> dict[str, Any]:
        query = request.query
        last = moment_of(query["to"], "to") if query["to"] else datetime.datetime.now(datetime.UTC)
        first = moment_of(query["from"], "from") if query["from"] else last - _DAY
        step_s, points = await self._history.read(request.path["id"], first, last)
        newest = points[-1] if points else {"label": None, "network": None}
        return {
            "id": request.path["id"],
            "label": newest["label"],
            "network": newest["network"],
            "step_s": step_s,
            "times": [point["at"].timestamp() for point in points],
            **{name: [point[name] for point in points] for name in _COLUMNS},
        }

    async def changes(self, _request: SessionRequest) -> dict[str, Any]:
        return {"changes": [_change(row) for row in await self._history.changes()]}

    async def methods(self, request: SessionRequest) -> dict[str, Any]:
        matrix = await self._matrix.read(_SPANS[request.query["span"]])
        return {
            "networks": [
                {
                    "network": network,
                    "methods": [_row(method, row) for method, row in methods.items()],
                }
                for network, methods in matrix.items()
            ]
        }


def _row(method: str, row: MatrixRow) -> dict[str, Any]:
    calls = row.calls
    return {
        "method": method,
        "calls": calls.requests,
        "caller_errors": calls.errors - calls.faults,
        "failures": calls.faults,
        "upstream_failures": calls.upstream_faults,
        "p50_ms": calls.quantile_ms(0.5),
        "p99_ms": calls.quantile_ms(0.99),
        "upstreams": [_cell(label, cell) for label, cell in sorted(row.cells.items())],
    }


def _cell(label: str, cell: MatrixCell) -> dict[str, Any]:
    return {
        "upstream": label,
        "calls": cell.calls,
        "failures": cell.failures,
        "p50_ms": cell.p50_ms,
        "p99_ms": cell.p99_ms,
    }


def _change(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": row["upstream"],
        "network": row["network"],
        "label": row["label"],
        "at": time_of(row["at"]),
        "before": row["before"],
        "state": row["state"],
    }
