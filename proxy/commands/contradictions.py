"""`contradictions`: replies of upstreams that others or a proof contradicted, with both replies."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson

from proxy.commands import context, output
from proxy.services.contradictions import ContradictionLog
from proxy.store.postgres.contradictions import ContradictionStore
from proxy.web.timestamps import moment_of

COLUMNS = ("at", "network", "method", "kind", "verified_by", "upstream", "operator", "digest", "other_digest")


def register(commands: Any) -> None:
    parser = commands.add_parser("contradictions", help="list and export contradicted replies of upstreams")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    shown = context.add_action(actions, "list", "list contradicted replies, newest first", _list, _log)
    exported = context.add_action(
        actions, "export", "print contradicted replies with both replies as JSON lines, newest first", _export, _log
    )
    for action in (shown, exported):
        action.add_argument("--network", metavar="CHAIN/NETWORK", help="only those of this network")
        action.add_argument("--since", metavar="TIME", help="only those from this time on, such as 2026-01-15T09:30Z")


@asynccontextmanager
async def _log(args: argparse.Namespace) -> AsyncIterator[ContradictionLog]:
    async with context.opened(args) as (_, pool):
        yield ContradictionLog(ContradictionStore(pool))


async def _read(log: ContradictionLog, args: argparse.Namespace) -> list[dict[str, Any]]:
    since: datetime.datetime | None = moment_of(args.since, "--since") if args.since else None
    return await log.read(args.network, since)


async def _list(log: ContradictionLog, args: argparse.Namespace) -> None:
    output.rows(await _read(log, args), COLUMNS, as_json=args.json)


async def _export(log: ContradictionLog, args: argparse.Namespace) -> None:
    for row in await _read(log, args):
        print(orjson.dumps(row, option=orjson.OPT_UTC_Z).decode())
