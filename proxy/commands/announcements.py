"""`announcements`: short notices that every dashboard shows."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from proxy.commands import context, output
from proxy.services.announcements import LEVELS, Announcements, moment_after
from proxy.store.postgres.announcements import AnnouncementStore

COLUMNS = ("id", "level", "starts_at", "ends_at", "by_whom", "text")


def register(commands: Any) -> None:
    parser = commands.add_parser("announcements", help="show a notice in every dashboard, list and remove notices")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = context.add_action(actions, "add", "add a notice", _add, _announcements)
    add.add_argument("text", help="the notice, at most 500 characters")
    add.add_argument("--level", choices=LEVELS, default="info", help="its level (default: info)")
    add.add_argument(
        "--from", dest="starts", metavar="TIME", help="show it from this time on, given like --until (default: now)"
    )
    add.add_argument(
        "--until", required=True, metavar="TIME", help="show it until this time: 2026-01-15T09:30Z, or 90m, 2h or 3d"
    )
    context.add_action(actions, "list", "list the last 100 notices", _list, _announcements)
    remove = context.add_action(actions, "remove", "remove a notice", _remove, _announcements)
    remove.add_argument("id", type=int, help="the notice's id")


@asynccontextmanager
async def _announcements(args: argparse.Namespace) -> AsyncIterator[Announcements]:
    async with context.opened(args) as (_, pool):
        yield Announcements(AnnouncementStore(pool))


async def _add(announcements: Announcements, args: argparse.Namespace) -> None:
    now = datetime.datetime.now(datetime.UTC)
    starts = moment_after(args.starts, now) if args.starts else None
    ends = moment_after(args.until, now)
    row = await announcements.add(args.level, args.text, starts=starts, ends=ends, by=context.COMMAND_LINE.name)
    await context.record("admin_create_announcement", subject=str(row["id"]), after=row)
    output.row(row, as_json=args.json)


async def _list(announcements: Announcements, args: argparse.Namespace) -> None:
    output.rows(await announcements.all(), COLUMNS, as_json=args.json)


async def _remove(announcements: Announcements, args: argparse.Namespace) -> None:
    row = await announcements.remove(args.id)
    await context.record("admin_delete_announcement", subject=str(args.id), before=row)
    output.row(row, as_json=args.json)
