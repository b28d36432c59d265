"""`admin`: tokens that sign operators in to the dashboard."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from proxy.commands import context, output
from proxy.services.accounts.sign_in import new_admin_token
from proxy.store.postgres.sessions import SessionStore

COLUMNS = ("id", "name", "hint", "created_at", "last_used_at", "revoked_at")


def register(commands: Any) -> None:
    parser = commands.add_parser("admin", help="create, list and revoke operators' tokens for the dashboard")
    tokens = parser.add_subparsers(dest="what", required=True, metavar="WHAT").add_parser(
        "token", help="create, list and revoke tokens"
    )
    actions = tokens.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = context.add_action(actions, "create", "create a token and print it once", _create, _token_store)
    create.add_argument("--name", default="operator", help="the operator's name (default: operator)")
    context.add_action(actions, "list", "list all tokens", _list, _token_store)
    revoke = context.add_action(
        actions, "revoke", "revoke a token permanently and end its sessions", _revoke, _token_store
    )
    revoke.add_argument("id", help="the token's id, such as admt_0123…")


@asynccontextmanager
async def _token_store(args: argparse.Namespace) -> AsyncIterator[SessionStore]:
    async with context.session_store(args) as (store, _):
        yield store


async def _create(store: SessionStore, args: argparse.Namespace) -> None:
    token = new_admin_token()
    row = await store.add_token(args.name, token)
    await context.record("admin_token_create", subject=row["id"], after={"name": args.name})
    output.row(row, as_json=args.json, token=token)
    if not args.json:
        print("\nStore the token now: it cannot be shown again, because only its digest is stored.")


async def _list(store: SessionStore, args: argparse.Namespace) -> None:
    output.rows(await store.list_tokens(), COLUMNS, as_json=args.json)


async def _revoke(store: SessionStore, args: argparse.Namespace) -> None:
    row = await store.revoke_token(args.id)
    await context.record("admin_token_revoke", subject=args.id, before={"name": row["name"]})
    output.row(row, as_json=args.json)
