"""`logs tail`: print requests as they are recorded: failed and slow ones, samples, and those with X-Explain."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import sys
from dataclasses import replace
from typing import Any

from proxy.commands import context
from proxy.commands.explain import members
from proxy.core.paging import Page
from proxy.core.request_records import RecordReader, RequestFilter, RequestRecord
from proxy.store.postgres.request_store import RequestStore

# Between two reads. Workers write records once a second.
EVERY_S = 1.0
# Records of the first read, and of each later one: more in a few seconds are too many to read.
FIRST, AT_ONCE = 20, 500
# Records are found by the time of their requests, and written up to this much later.
LATE_S = 5.0


def register(commands: Any) -> None:
    parser = commands.add_parser("logs", help="show requests as they happen")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    about = "print requests as they are recorded: failed and slow ones, and a sample of the others"
    tail = actions.add_parser("tail", help=about, description=f"{about.capitalize()}. Ctrl-C ends it.")
    context.add_arguments(tail)
    tail.add_argument("--account", help="only requests of this account")
    tail.add_argument("--key", help="only requests with the key of this id")
    tail.add_argument("--method", help="only calls of this method")
    tail.add_argument("--failed", action="store_true", help="only failed requests")
    tail.add_argument("--once", action="store_true", help="print the last ones and exit")
    tail.add_argument("--json", action="store_true", help="print one JSON object per line")
    tail.set_defaults(run=lambda args: asyncio.run(_tail(args)))


async def _tail(args: argparse.Namespace) -> int:
    wanted = RequestFilter(key=args.key, method=args.method, reason="failed" if args.failed else None)
    reader = RecordReader(account=args.account)
    async with context.opened(args) as (_, pool):
        store = RequestStore(pool)
        records, _ = await store.page(wanted, reader, Page(1, FIRST))
        if not records:
            print("no such request is recorded yet", file=sys.stderr, flush=True)
        seen: set[tuple[str, float]] = set()
        while True:
            for record in reversed(records):
                if (record.id, record.at) not in seen:
                    print(json.dumps(members(record)) if args.json else line_of(record), flush=True)
            if args.once:
                return 0
            seen = {(record.id, record.at) for record in records}
            await asyncio.sleep(EVERY_S)
            since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=LATE_S + EVERY_S)
            records, _ = await store.page(replace(wanted, since=since), reader, Page(1, AT_ONCE))


def line_of(record: RequestRecord) -> str:
    at = datetime.datetime.fromtimestamp(record.at, datetime.UTC)
    parts = [
        f"{at:%H:%M:%S}",
        f"{record.status}",
        f"{record.took_s * 1000:8.1f} ms",
        record.network or "-",
        record.called or record.method or record.surface,
        record.key or record.account,
        record.id,
        record.error,
    ]
    return "  ".join(part for part in parts if part)
