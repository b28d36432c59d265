"""`capture`: write the calls of clients to a file, with their arrival times, to replay them elsewhere.

While it runs, all requests of the captured accounts are recorded, and not only samples (`services/request_recorder.py`). Only
accounts that record params can be captured. The file has reads that can be repeated: writes, filters, subscriptions and calls
whose params were cut are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from proxy.commands import context
from proxy.commands.capture_file import MOST_BYTES, MOST_CALLS, CapturedCall, write_capture
from proxy.commands.progress import Progress
from proxy.errors import InvalidRequest, NotFound, StartError
from proxy.settings import Tables
from proxy.store.postgres.captures import CapturedRow, CaptureStore

USUAL_S, MOST_S = 60, 3600
USUAL_CALLS = 100_000
# Every worker knows of the capture after this long.
SETTLE_S = 2.0
# Records are written up to this long after their requests.
LATE_S = 4.0
DRAW_S = 0.5
# Params are cut at 2,048 bytes when they are recorded.
LONGEST_LINE = 4096


def register(commands: Any) -> None:
    about = "write the calls of clients to a file, to replay them elsewhere"
    parser = commands.add_parser(
        "capture",
        help=about,
        description=f"{about.capitalize()}. The file has methods, params and arrival times of reads, and neither keys nor "
        "addresses of clients. Accounts that do not record params are left out.",
    )
    context.add_arguments(parser)
    parser.add_argument("file", type=context.new_file, metavar="FILE", help="the file; it must not exist")
    parser.add_argument(
        "--account", action="append", metavar="ID", help="only this account (can be repeated; default: all)"
    )
    parser.add_argument("--seconds", type=int, default=USUAL_S, metavar="N", help=f"how long (default: {USUAL_S})")
    parser.add_argument(
        "--calls", type=int, default=USUAL_CALLS, metavar="N", help=f"at most this many (default: {USUAL_CALLS:,})"
    )
    parser.set_defaults(run=lambda args: asyncio.run(_capture(args)))


async def _capture(args: argparse.Namespace) -> int:
    if not 1 <= args.seconds <= MOST_S:
        raise InvalidRequest(f"--seconds must be between 1 and {MOST_S}")
    if not 1 <= args.calls <= MOST_CALLS:
        raise InvalidRequest(f"--calls must be between 1 and {MOST_CALLS}")
    if args.file.exists():
        raise StartError([f"{args.file}: exists already; choose another name"])
    async with context.opened(args) as (settings, pool):
        store, draft = CaptureStore(pool), CaptureDraft(context.tables_of(settings), args.calls)
        accounts = await store.start(args.account, args.seconds + SETTLE_S)
        await _check(store, args.account, accounts)
        await context.record("start_capture", subject=", ".join(accounts), after={"seconds": args.seconds})
        try:
            await _read_all(store, accounts, draft, args.seconds)
        finally:
            await store.end(accounts)
    write_capture(args.file, draft.began_at.isoformat(timespec="milliseconds"), draft.calls)
    print(f"{len(draft.calls):,} calls of {len(accounts):,} accounts written to {args.file}")
    for reason, count in sorted(draft.left_out.items()):
        print(f"{count:,} left out: {reason}")
    return 0


async def _check(store: CaptureStore, wanted: list[str] | None, accounts: list[str]) -> None:
    """All the wanted accounts must be captured, or none is."""
    lacking = [each for each in wanted or () if each not in accounts]
    if accounts and not lacking:
        return
    await store.end(accounts)
    whom = f"{', '.join(lacking)}: does not exist, is disabled or" if lacking else "no account"
    verb = "does not record params" if lacking else "records params"
    raise NotFound(f"{whom} {verb}: its owner turns that on in the dashboard, on the page Requests")


async def _read_all(store: CaptureStore, accounts: list[str], draft: CaptureDraft, seconds: int) -> None:
    """Read records while the time passes, and then those that are written late."""
    await asyncio.sleep(SETTLE_S)
    draft.began_at = await store.now()
    draft.ends_at = draft.began_at + datetime.timedelta(seconds=seconds)
    progress = Progress()
    try:
        while (now := await store.now()) < draft.ends_at + datetime.timedelta(seconds=LATE_S) and not draft.is_full:
            passed = min(float(seconds), (now - draft.began_at).total_seconds())
            progress.show(f"{passed:.0f} of {seconds} s  {draft.seen:,} calls")
            await asyncio.sleep(DRAW_S)
            draft.seen = await store.count(accounts, draft.began_at)
            if draft.seen >= draft.most:
                break
        async for row in store.rows(accounts, draft.began_at):
            draft.add(row)
            if draft.is_full:
                break
    finally:
        progress.close()


@dataclass
class CaptureDraft:
    """The calls for the file."""

    tables: Tables
    most: int
    calls: list[CapturedCall] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    # About the bytes of the file.
    size: int = 0
    seen: int = 0
    began_at: datetime.datetime = datetime.datetime.min
    ends_at: datetime.datetime = datetime.datetime.max
    # The arrivals of batches, whose items follow.
    _batches: dict[str, datetime.datetime] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        return len(self.calls) >= self.most or self.size > MOST_BYTES - LONGEST_LINE

    def add(self, row: CapturedRow) -> None:
        arrival = row.at - datetime.timedelta(milliseconds=row.ms)
        if row.surface == "batch":
            self._batches[row.id] = arrival
            return
        if row.surface == "item":
            arrival = self._batches.get(row.id.rpartition(".")[0], arrival)
        if not self.began_at <= arrival < self.ends_at:
            return
        if reason := self._reason_against(row):
            self.left_out[reason] += 1
            return
        at_ms = round((arrival - self.began_at).total_seconds() * 1000, 3)
        call = CapturedCall(at_ms, row.network, row.method, msgspec.Raw((row.params or "").encode()))
        self.calls.append(call)
        self.size += call.size

    def _reason_against(self, row: CapturedRow) -> str:
        network = self.tables.find_network(row.network)
        method = None if network is None else self.tables.methods[network.family].get(row.method)
        if method is None or " " in row.method:
            return "methods that do not exist, of bundlers, or of REST"
        if method.kind != "read" or method.private:
            return "writes, filters and subscriptions"
        if row.params is None:
            return "without params"
        try:
            msgspec.json.decode(row.params)
        except (msgspec.DecodeError, RecursionError):
            return "params above 2,048 bytes"
        return ""
