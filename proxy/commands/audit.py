"""`audit`: the log of changes and sign-ins in all accounts and by all operators."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from proxy.commands import context, output
from proxy.services.accounts.action_log import ActionFilter, ActionLog
from proxy.store.postgres.actions import ActionStore
from proxy.web.timestamps import moment_of

COLUMNS = ("at", "who", "action", "account", "subject", "changes")


def register(commands: Any) -> None:
    parser = commands.add_parser("audit", help="list changes and sign-ins of accounts and operators")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listed = context.add_action(actions, "list", "list changes and sign-ins, newest first", _list, _log)
    listed.add_argument("--account", metavar="ID", help="only those of this account")
    listed.add_argument("--by", choices=("holder", "key", "operator"), help="only those of people, keys or operators")
    listed.add_argument("--name", help="only those of this email address, key id or operator")
    listed.add_argument("--operation", metavar="ID", help="only this operation, such as admin_update_account")
    listed.add_argument("--since", metavar="TIME", help="only those from this time on, such as 2026-01-15T09:30Z")
    listed.add_argument("--until", metavar="TIME", help="only those before this time")
    listed.add_argument("--limit", type=int, default=50, metavar="N", help="at most this many (default: 50)")
    listed.add_argument("--cursor", type=int, metavar="ID", help="only those older than the entry with this id")


@asynccontextmanager
async def _log(args: argparse.Namespace) -> AsyncIterator[ActionLog]:
    async with context.opened(args) as (_, pool):
        yield ActionLog(ActionStore(pool))


async def _list(log: ActionLog, args: argparse.Namespace) -> None:
    wanted = ActionFilter(
        account=args.account,
        by=args.by,
        name=args.name,
        action=args.operation,
        since=moment_of(args.since, "--since") if args.since else None,
        until=moment_of(args.until, "--until") if args.until else None,
        before_id=args.cursor,
    )
    actions, after = await log.search(wanted, max(1, args.limit))
    output.rows(actions if args.json else [_shown(row) for row in actions], COLUMNS, as_json=args.json)
    if after is not None and not args.json:
        print(f"\nThere are more: continue with --cursor {after}")


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "at": row["at"],
        "who": " ".join(filter(None, (row["by"], row["name"]))),
        "action": row["action"],
        "account": row["account_name"] or row["account_id"],
        "subject": row["subject"] or None,
        "changes": "; ".join(_changes(row["before"], row["after"])) or None,
    }


def _changes(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> list[str]:
    if before is not None and after is not None:
        return [f"{name} {value} → {after.get(name)}" for name, value in before.items()]
    return [f"{name} {value}" for name, value in (after or before or {}).items()]
