"""`admin`: tokens with which operators sign in to the dashboard."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from proxy.commands import context, output
from proxy.services.accounts.sign_in import new_admin_token
from proxy.store.sessions import SessionStore

COLUMNS = ("id", "name", "hint", "created_at", "last_used_at", "revoked_at")


def register(commands: Any) -> None:
    parser = commands.add_parser("admin", help="create, list and revoke operators' tokens for the dashboard")
    tokens = parser.add_subparsers(dest="what", required=True, metavar="WHAT").add_parser(
        "token", help="create, list and revoke tokens"
    )
    actions = tokens.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = _action(actions, "create", "create a token and print it once", _create)
    create.add_argument("--name", default="operator", help="the operator's name (default: operator)")
    _action(actions, "list", "list all tokens", _list)
    revoke = _action(actions, "revoke", "revoke a token permanently and end its sessions", _revoke)
    revoke.add_argument("id", help="the token's id, such as admt_0123…")


def _action(actions: Any, name: str, about: str, act: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=about, description=f"{about.capitalize()}.")
    context.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=lambda args: asyncio.run(_with_store(args, act)))
    return parser


async def _with_store(args: argparse.Namespace, act: Any) -> int:
    async with context.session_store(args) as (store, _):
        await act(store, args)
    return 0


async def _create(store: SessionStore, args: argparse.Namespace) -> None:
    token = new_admin_token()
    output.row(await store.add_token(args.name, token), as_json=args.json, token=token)
    if not args.json:
        print("\nStore the token now: it cannot be shown again, because only its digest is stored.")


async def _list(store: SessionStore, args: argparse.Namespace) -> None:
    output.rows(await store.list_tokens(), COLUMNS, as_json=args.json)


async def _revoke(store: SessionStore, args: argparse.Namespace) -> None:
    output.row(await store.revoke_token(args.id), as_json=args.json)
