"""`top`: the busiest keys and methods of the last minute, and the upstreams' calls per second, renewed every two seconds."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from proxy.commands import context, output
from proxy.commands.upstreams import upstreams_of
from proxy.store.postgres.fleet import FleetStore
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.usage import UsageQuery, UsageStore

EVERY_S = 2.0
CLEAR = "\x1b[H\x1b[2J"
USED_COLUMNS = ("requests", "errors", "hits", "units")
BACKFILL_COLUMNS = (
    *("network", "block", "done", "total", "blocks_s", "transfers_s", "left_s", "calls", "lag_blocks", "paused"),
)
UPSTREAM_COLUMNS = ("label", "state", "calls_s", "failed_s", "in_flight", "p99_ms", "lag_blocks")


def register(commands: Any) -> None:
    about = "show the busiest keys, methods and upstreams, live"
    parser = commands.add_parser("top", help=about, description=f"{about.capitalize()}. Ctrl-C ends it.")
    context.add_arguments(parser)
    parser.add_argument("--once", action="store_true", help="print one report and exit")
    parser.set_defaults(run=lambda args: asyncio.run(run(args)))


async def run(args: argparse.Namespace) -> int:
    async with _stores(args) as (fleet, usage, keys):
        before, at = await _counted(fleet), time.monotonic()
        while True:
            await asyncio.sleep(EVERY_S)
            now, passed_s = await _counted(fleet), time.monotonic() - at
            backfills = [each for process in await fleet.processes() for each in process.get("backfills", ())]
            clear = sys.stdout.isatty() and not args.once
            await _print(usage, keys, _rates(before, now, passed_s), backfills, clear=clear)
            before, at = now, at + passed_s
            if args.once:
                return 0


@asynccontextmanager
async def _stores(args: argparse.Namespace) -> AsyncIterator[tuple[FleetStore, UsageStore, KeyStore]]:
    async with context.opened(args) as (settings, pool):
        yield FleetStore(pool), UsageStore(pool), context.keys_of(settings, pool)


async def _counted(fleet: FleetStore) -> dict[str, dict[str, Any]]:
    return {each["label"]: each for each in await upstreams_of(fleet)}


def _rates(before: Mapping[str, Any], now: Mapping[str, Any], passed_s: float) -> list[dict[str, Any]]:
    """The upstreams with their calls per second, the busiest first. A worker that ended makes a count go down: that is 0."""

    def rate(label: str, name: str) -> float:
        gone = now[label][name] - before[label][name] if label in before else 0
        return round(max(0.0, gone / passed_s), 1)

    rows = [
        {**each, "calls_s": rate(label, "answered"), "failed_s": rate(label, "failed")} for label, each in now.items()
    ]
    return sorted(rows, key=lambda row: -row["calls_s"])


async def _print(
    usage: UsageStore,
    store: KeyStore,
    upstreams: list[dict[str, Any]],
    backfills: list[dict[str, Any]],
    *,
    clear: bool,
) -> None:
    keys, methods = await _used(usage, "key"), await _used(usage, "method")
    names = await store.name_keys([row["key"] for row in keys])
    print(CLEAR if clear else "", end="")
    print(f"{datetime.datetime.now(datetime.UTC):%H:%M:%S} UTC; keys and methods: the last two minutes\n")
    if keys:
        named = [{"account": None, "name": None, **names.get(row["key"], {}), **row} for row in keys]
        output.rows(named, ("account", "name", *USED_COLUMNS, "key"), as_json=False)
        print()
        output.rows(methods, ("method", *USED_COLUMNS), as_json=False)
    else:
        print("no calls")
    print()
    output.rows(upstreams, UPSTREAM_COLUMNS, as_json=False)
    if backfills:
        print()
        output.rows(backfills, BACKFILL_COLUMNS, as_json=False)
    sys.stdout.flush()


async def _used(usage: UsageStore, by: str) -> list[dict[str, Any]]:
    last = datetime.datetime.now(datetime.UTC)
    first = last - datetime.timedelta(minutes=2)
    lines = await usage.chart(UsageQuery(step="minute", first=first, last=last, account=None, by=by))
    # Unknown methods are counted as "other".
    return [
        {by: line.name or "all others", **{name: getattr(line.total, name) for name in USED_COLUMNS}} for line in lines
    ]
