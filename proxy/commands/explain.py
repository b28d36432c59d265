"""`explain`: show what happened to a request, by the id in its reply's X-Request-Id."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
from collections.abc import Iterator, Mapping
from typing import Any

from proxy.commands import context
from proxy.core.credits import in_usd
from proxy.core.request_records import AttemptKind, Blame, RecordReader, RequestRecord, kind_of
from proxy.errors import NotFound
from proxy.store.postgres.request_store import RequestStore

# Why an attempt was made.
WHY: Mapping[AttemptKind, str] = {
    "first": "",
    "retry": " (tried because the one before failed)",
    "check": "",
    "read": "",
    "hedge": " (tried because the one before was slow)",
}
BLAMED: Mapping[Blame, str] = {
    "": "of unknown cause",
    "client": "caused by the request",
    "limit": "refused by a limit",
    "chain": "caused by the call itself",
    "upstream": "caused by an upstream",
    "service": "caused by the service",
}


def register(commands: Any) -> None:
    parser = commands.add_parser("explain", help="show what happened to a request")
    context.add_arguments(parser)
    parser.add_argument(
        "id", help="the X-Request-Id of its reply, with .N for one item of a batch or message; or a webhook event's id"
    )
    parser.add_argument("--account", help="the account that made it, for an id that clients of several accounts chose")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=lambda args: asyncio.run(_explain(args)))


async def _explain(args: argparse.Namespace) -> int:
    settings = context.load(args)
    tables = context.tables_of(settings)
    pool = context.own_pool(settings, size=1)
    await pool.open()
    try:
        store = RequestStore(pool)
        record = await store.read(args.id, RecordReader(account=args.account))
    finally:
        await pool.close()
    if record is None:
        raise NotFound(
            f"there is no record of the request {args.id}: failed and slow ones are recorded, samples of the others, and those "
            f"with the header X-Explain: 1, for {settings.requests.keep_days} days"
        )
    price = tables.price_of(record.network, record.method)
    whole = {**members(record), "price": price}
    print(json.dumps(whole, indent=2) if args.json else "\n".join(_lines(record, price)))
    return 0


def members(record: RequestRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def _lines(record: RequestRecord, price: int | None) -> list[str]:
    where = f" on {record.network}" if record.network else ""
    method = record.called or record.method or record.surface
    first = f"{method}{where}: status {record.status} after {record.took_s * 1000:.1f} ms"
    return [first, *(f"  {name + ':':<13}{text}" for name, text in _facts(record, price) if text)]


def _units(count: int) -> str:
    return "1 unit" if count == 1 else f"{count} units"


def _facts(record: RequestRecord, price: int | None) -> Iterator[tuple[str, str]]:
    at = datetime.datetime.fromtimestamp(record.at, datetime.UTC)
    yield "id", f"{record.id} ({record.surface}), recorded as {record.reason}"
    yield "method", "there is no such method" if record.called else ""
    same = f": {record.others} other requests have it too" if record.others else ""
    yield "client's id", f"{record.client_id}{same}" if record.client_id else ""
    yield "time", f"{at:%Y-%m-%d %H:%M:%S.%f} UTC, at its end"
    yield "account", record.account
    yield "key", record.key
    yield "price", "" if price is None else _units(price)
    yield "charged", _units(record.units)
    yield "cost", f"{in_usd(record.cost)} US dollars at providers of upstreams" if record.cost else ""
    yield "cache", record.cache or "not used"
    for index, (upstream, after_s, took_s, outcome) in enumerate(record.attempts):
        kind = kind_of(index, record.attempts)
        yield kind, f"{upstream} after {after_s * 1000:.1f} ms, for {took_s * 1000:.1f} ms: {outcome}{WHY[kind]}"
    yield "upstreams", "" if record.attempts else "none was asked"
    yield "block", f"{record.block}: the state of the reply is of this block or a later one" if record.block else ""
    yield "reply", f"{record.bytes} bytes" if record.bytes else "size unknown"
    yield "error", f"{record.error} ({BLAMED[record.blame]})" if record.error else ""
    yield "params", record.params or ""
