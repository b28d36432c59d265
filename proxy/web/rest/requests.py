"""/requests: what happened to single requests, for the account that made them and, under /admin, for operators."""

from __future__ import annotations

import datetime
from typing import Any

from proxy.core.paging import Page
from proxy.core.request_records import RequestFilter, RequestRecord, kind_of
from proxy.errors import InvalidRequest
from proxy.services.request_log import RequestLog
from proxy.web.dashboard.session_endpoint import SessionHandler, SessionRequest
from proxy.web.rest.endpoint import RestHandler, RestRequest
from proxy.web.timestamps import time_of


class RequestRecordHandlers:
    def __init__(self, requests: RequestLog, *, shows_upstream: bool) -> None:
        """`shows_upstream`: whether accounts see the labels of upstreams. Operators always do."""
        self._requests = requests
        self._shows_upstream = shows_upstream

    def handlers(self) -> dict[str, RestHandler]:
        return {"list_requests": self.list, "read_request": self.read}

    def admin_handlers(self) -> dict[str, SessionHandler]:
        return {"admin_list_requests": self.list_all, "admin_read_request": self.read_any}

    async def list(self, request: RestRequest) -> dict[str, Any]:
        found, total = await self._requests.page(_filter(request.query), request.key.account.id, request.page)
        return request.listed("requests", [self._shown(each) for each in found], total)

    async def read(self, request: RestRequest) -> dict[str, Any]:
        return self._shown(await self._requests.read(request.path["id"], request.key.account.id))

    async def list_all(self, request: SessionRequest) -> dict[str, Any]:
        page: Page = request.page
        found, total = await self._requests.page(_filter(request.query), request.query["account"], page)
        return {"requests": [shown_record(each) for each in found], "page": page.number, "total": total}

    async def read_any(self, request: SessionRequest) -> dict[str, Any]:
        return shown_record(await self._requests.read(request.path["id"], None))

    def _shown(self, record: RequestRecord) -> dict[str, Any]:
        shown = shown_record(record)
        if not self._shows_upstream:
            names = {
                label: f"upstream {place}"
                for place, label in enumerate(dict.fromkeys(a[0] for a in record.attempts), 1)
            }
            for attempt in shown["attempts"]:
                attempt["upstream"] = names[attempt["upstream"]]
        return shown


def _filter(query: Any) -> RequestFilter:
    since = query["since"]
    try:
        moment = None if since is None else datetime.datetime.fromisoformat(since)
    except ValueError:
        raise InvalidRequest("parameter 'since': must be a time such as 2026-01-31T12:00:00Z") from None
    if moment is not None and moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    names = ("network", "method", "reason", "status", "key")
    return RequestFilter(since=moment, **{name: query[name] for name in names})


def shown_record(record: RequestRecord) -> dict[str, Any]:
    """A record as the API and the command line show it."""
    return {
        "id": record.id,
        "at": time_of(datetime.datetime.fromtimestamp(record.at, datetime.UTC)),
        "account_id": record.account,
        "key_id": record.key,
        "network": record.network or None,
        "surface": record.surface,
        "method": record.method,
        "status": record.status,
        "recorded": record.reason,
        "units": record.units,
        "cache": record.cache or None,
        "ms": round(record.took_s * 1000, 3),
        "bytes": record.bytes,
        "block": record.block or None,
        "error": record.error or None,
        "blame": record.blame or None,
        "attempts": [
            {
                "upstream": upstream,
                "kind": kind_of(place, record.attempts),
                "after_ms": round(after_s * 1000, 3),
                "ms": round(took_s * 1000, 3),
                "outcome": outcome,
            }
            for place, (upstream, after_s, took_s, outcome) in enumerate(record.attempts)
        ],
        "params": record.params,
    }
