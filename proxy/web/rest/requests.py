"""/requests: what happened to single requests, for the account that made them and, under /admin, for operators."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from proxy.chains.evm.revert_reasons import message_of
from proxy.core.access import SCOPE_BIT, Key
from proxy.core.credits import in_usd
from proxy.core.paging import Page
from proxy.core.request_records import (
    ErrorGroup,
    FilterChoice,
    RecordReader,
    RequestFilter,
    RequestRecord,
    is_delivery,
    kind_of,
)
from proxy.services.request_log import RequestLog
from proxy.web.dashboard.session_endpoint import SessionHandler, SessionRequest
from proxy.web.rest.endpoint import RestHandler, RestRequest
from proxy.web.timestamps import moment_of, time_of

# A key needs this scope to read requests of the account's other keys, and one of these to read deliveries.
ALL_REQUESTS = SCOPE_BIT["requests:read"]
FILTERS = ("network", "method", "status", "key", "account", "upstream")
DELIVERIES = ALL_REQUESTS | SCOPE_BIT["webhooks:manage"]


class RequestRecordHandlers:
    def __init__(
        self, requests: RequestLog, *, shows_upstream: bool, price_of: Callable[[str, str], int | None]
    ) -> None:
        """`shows_upstream`: whether accounts see the labels of upstreams. Operators always do. `price_of`: the price of a
        method on a network, or of an operation."""
        self._requests = requests
        self._price_of = price_of
        self._shows_upstream = shows_upstream

    def handlers(self) -> dict[str, RestHandler]:
        return {"list_requests": self.list, "read_request": self.read, "list_errors": self.errors}

    def admin_handlers(self) -> dict[str, SessionHandler]:
        return {
            "admin_list_requests": self.list_all,
            "admin_read_request": self.read_any,
            "admin_list_errors": self.all_errors,
        }

    async def list(self, request: RestRequest) -> dict[str, Any]:
        reader = _reader(request.key)
        records, total = await self._requests.page(_filter(request.query), reader, request.page)
        listed = request.listed("requests", [self._shown(each, request.key) for each in records], total)
        if request.query["choices"]:
            # An account is the only one in its list, and may not see upstreams.
            choices = _choices(await self._requests.choices(reader))
            listed["choices"] = {name: choices[name] for name in choices if name not in ("account", "upstream")}
        return listed

    async def read(self, request: RestRequest) -> dict[str, Any]:
        key, wanted = request.key, request.path["id"]
        may_read_all = key.scopes & (DELIVERIES if is_delivery(wanted) else ALL_REQUESTS)
        reader = _reader(key)
        record = await self._requests.read(wanted, reader if may_read_all else replace(reader, networks=()))
        return {**self._shown(record, key), "others": record.others}

    async def errors(self, request: RestRequest) -> dict[str, Any]:
        groups = await self._requests.errors(_span(request.query), _reader(request.key))
        return {"errors": [_shown_group(each) for each in groups]}

    async def all_errors(self, request: SessionRequest) -> dict[str, Any]:
        groups = await self._requests.errors(_span(request.query), _operator(request))
        return {"errors": [{**_shown_group(each), "upstreams": each.upstreams} for each in groups]}

    async def list_all(self, request: SessionRequest) -> dict[str, Any]:
        page: Page = request.page
        wanted = replace(_filter(request.query), upstream=request.query["upstream"])
        records, total = await self._requests.page(wanted, _operator(request), page)
        listed = {"requests": [self._priced(each) for each in records], "page": page.number, "total": total}
        if request.query["choices"]:
            listed["choices"] = _choices(await self._requests.choices(_operator(request)))
        return listed

    async def read_any(self, request: SessionRequest) -> dict[str, Any]:
        record = await self._requests.read(request.path["id"], _operator(request))
        return {**self._priced(record), "others": record.others}

    def _priced(self, record: RequestRecord) -> dict[str, Any]:
        price = self._price_of(record.network, record.method)
        return {**shown_record(record), "price": price, "cost_usd": in_usd(record.cost)}

    def _shown(self, record: RequestRecord, reader: Key) -> dict[str, Any]:
        shown = self._priced(record)
        if "cost" not in reader.directives:  # The key may not see the operator's prices.
            shown["cost_usd"] = None
        if not self._shows_upstream:
            names = {
                label: f"upstream {index}"
                for index, label in enumerate(dict.fromkeys(a[0] for a in record.attempts), 1)
            }
            for attempt in shown["attempts"]:
                attempt["upstream"] = names[attempt["upstream"]]
        return shown


def _reader(key: Key) -> RecordReader:
    return RecordReader(account=key.account.id, networks=key.only_networks, key=key.id)


def _operator(request: SessionRequest) -> RecordReader:
    return RecordReader(account=request.query["account"])


def _choices(offered: Iterable[FilterChoice]) -> dict[str, list[dict[str, str]]]:
    """The values of each filter, with names to show."""
    choices: dict[str, list[dict[str, str]]] = {name: [] for name in FILTERS}
    for name, value, shown in offered:
        choices[name].append({"value": value, "name": shown or value})
    return choices


def _filter(query: Mapping[str, Any]) -> RequestFilter:
    return replace(_span(query), **{name: query[name] for name in ("reason", "status", "code", "client_id")})


def _span(query: Mapping[str, Any]) -> RequestFilter:
    """The part of a filter that lists and counts share."""
    since, until = (moment_of(query[name], name) if query[name] else None for name in ("since", "until"))
    return RequestFilter(since=since, until=until, **{name: query[name] for name in ("network", "method", "key")})


def _shown_group(group: ErrorGroup) -> dict[str, Any]:
    return {
        "status": group.status,
        "code": group.code or None,
        "method": group.method,
        "key_id": group.key,
        "key_name": group.key_name or None,
        "account_id": group.account,
        "account_name": group.account_name or None,
        "count": group.count,
        "last_at": time_of(group.last_at),
        "example": group.example,
        "example_message": message_of(group.example),
    }


def shown_record(record: RequestRecord) -> dict[str, Any]:
    """A record as the API and the command line show it."""
    return {
        "id": record.id,
        "client_id": record.client_id or None,
        "at": time_of(datetime.datetime.fromtimestamp(record.at, datetime.UTC)),
        "account_id": record.account,
        "account_name": record.account_name or None,
        "key_id": record.key,
        "key_name": record.key_name or None,
        "network": record.network or None,
        "surface": record.surface,
        "method": record.method,
        "called": record.called or None,
        "status": record.status,
        "recorded": record.reason,
        "units": record.units,
        "cache": record.cache or None,
        "ms": round(record.took_s * 1000, 3),
        "bytes": record.bytes,
        "block": record.block or None,
        "error": record.error or None,
        "error_message": message_of(record.error) or None,
        "code": record.code or None,
        "blame": record.blame or None,
        "attempts": [
            {
                "upstream": upstream,
                "kind": kind_of(index, record.attempts),
                "after_ms": round(after_s * 1000, 3),
                "ms": round(took_s * 1000, 3),
                "outcome": outcome,
            }
            for index, (upstream, after_s, took_s, outcome) in enumerate(record.attempts)
        ],
        "params": record.params,
    }
