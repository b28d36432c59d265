"""/admin/contradictions: replies of upstreams that others or a proof contradicted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.services.contradictions import ContradictionLog
from proxy.web.dashboard.session_endpoint import SessionHandler, SessionRequest
from proxy.web.timestamps import time_of

_MEMBERS = (
    *("network", "method", "params", "kind", "verified_by", "upstream", "operator", "reply", "digest"),
    *("other_reply", "other_digest", "reason"),
)


class ContradictionHandlers:
    def __init__(self, contradictions: ContradictionLog) -> None:
        self._contradictions = contradictions

    def handlers(self) -> dict[str, SessionHandler]:
        return {"admin_list_contradictions": self.list}

    async def list(self, _request: SessionRequest) -> dict[str, Any]:
        return {"contradictions": [_shown(row) for row in await self._contradictions.recent()]}


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "at": time_of(row["at"]),
        **{name: row[name] for name in _MEMBERS},
        "others": [{"upstream": upstream, "operator": operator} for upstream, operator in row["others"]],
    }
