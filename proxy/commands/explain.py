"""`explain`: show what happened to a request, by the id in its reply's X-Request-Id."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
from typing import Any

from proxy.commands import context
from proxy.core.request_records import EVENT_PREFIX, RequestRecord, kind_of
from proxy.errors import NotFound
from proxy.store.request_store import RequestStore


def register(commands: Any) -> None:
    parser = commands.add_parser("explain", help="show what happened to a request")
    context.add_arguments(parser)
    parser.add_argument(
        "id", help="the X-Request-Id of its reply, with .N for one item of a batch or message; or a webhook event's id"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=lambda args: asyncio.run(_explain(args)))


async def _explain(args: argparse.Namespace) -> int:
    pool = context.own_pool(context.load(args), size=1)
    await pool.open()
    try:
        store = RequestStore(pool)
        is_delivery = args.id.startswith(EVENT_PREFIX)
        record = await (store.read_delivery if is_delivery else store.read)(args.id, None)
    finally:
        await pool.close()
    if record is None:
        raise NotFound(f"there is no record of the request {args.id}: it was not recorded, or is too old")
    print(json.dumps(members(record), indent=2) if args.json else "\n".join(_lines(record)))
    return 0


def members(record: RequestRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


def _lines(record: RequestRecord) -> list[str]:
    at = datetime.datetime.fromtimestamp(record.at, datetime.UTC)
    found = [
        f"{record.method or record.surface} on {record.network or 'no network'}: status {record.status} after "
        f"{record.took_s * 1000:.1f} ms, at {at:%Y-%m-%d %H:%M:%S} UTC ({record.reason})",
        f"  account {record.account}, key {record.key}, {record.units} units, {record.bytes} bytes",
    ]
    if record.cache:
        found.append(f"  cache: {record.cache}")
    if record.block:
        found.append(f"  answered from block {record.block} or later")
    for place, (upstream, after_s, took_s, outcome) in enumerate(record.attempts):
        kind = kind_of(place, record.attempts)
        found.append(f"  {kind} attempt: {upstream} after {after_s * 1000:.1f} ms, {took_s * 1000:.1f} ms: {outcome}")
    if record.error:
        found.append(f"  error ({record.blame}): {record.error}")
    if record.params is not None:
        found.append(f"  params: {record.params}")
    return found
