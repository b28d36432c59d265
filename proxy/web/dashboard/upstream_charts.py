"""/admin/upstreams/{id}/history and /admin/upstream-changes: the health of upstreams over time, for operators."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from proxy.services.upstream_history import UpstreamHistory
from proxy.web.dashboard.session_endpoint import SessionHandler, SessionRequest
from proxy.web.timestamps import moment_of, time_of

_COLUMNS = ("p50_ms", "p99_ms", "error_rate", "lag_blocks", "breaker_open")
_DAY = datetime.timedelta(days=1)


class UpstreamChartHandlers:
    def __init__(self, history: UpstreamHistory) -> None:
        self._history = history

    def handlers(self) -> dict[str, SessionHandler]:
        return {"admin_read_upstream_history": self.read, "admin_list_upstream_changes": self.changes}

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


def _change(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": row["upstream"],
        "network": row["network"],
        "label": row["label"],
        "at": time_of(row["at"]),
        "before": row["before"],
        "state": row["state"],
    }
