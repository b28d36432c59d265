"""`accounts`: create, list, show and change accounts, and let their holders in."""

from __future__ import annotations

import argparse
import asyncio
import sys
from getpass import getpass
from typing import Any

from proxy.commands import context, output
from proxy.errors import InvalidRequest
from proxy.services.accounts.sign_in import hash_password, link_of, new_token
from proxy.settings import Settings
from proxy.store.keys import KeyStore, LimitChange
from proxy.store.sessions import SessionStore

COLUMNS = (
    "id",
    "name",
    "email",
    "plan",
    "disabled",
    "requests_per_second",
    "units_per_second",
    "requests_per_day",
    "active_keys",
    "created_at",
)


def add_limits(parser: argparse.ArgumentParser, *, day: bool) -> None:
    """Own limits; -1 goes back to what is inherited. A key, which has no day of its own, gets no more than its account."""
    said = "own limit; -1: inherit" if day else "own limit, up to the account's; -1: inherit"
    parser.add_argument("--requests-per-second", type=int, metavar="N", help=said)
    parser.add_argument("--units-per-second", type=int, metavar="N", help=said)
    if day:
        parser.add_argument("--requests-per-day", type=int, metavar="N", help="own limit; 0: none, -1: the plan's")


def own_limits(args: argparse.Namespace) -> LimitChange:
    return LimitChange(
        requests_per_second=args.requests_per_second,
        units_per_second=args.units_per_second,
        requests_per_day=getattr(args, "requests_per_day", None),
    )


def register(commands: Any) -> None:
    parser = commands.add_parser("accounts", help="create, list, show and change accounts")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = _action(actions, "create", "a new account", _create)
    create.add_argument("--name", required=True)
    create.add_argument("--email", required=True)
    create.add_argument("--plan", default="free")
    add_limits(create, day=True)
    _action(actions, "list", "all accounts", _list)
    _action(actions, "show", "one account", _show).add_argument("id")
    change = _action(actions, "set", "change an account", _set)
    change.add_argument("id")
    change.add_argument("--name")
    change.add_argument("--email")
    change.add_argument("--plan")
    add_limits(change, day=True)
    for name, about, disabled in (("disable", "refuse all its keys for now", True), ("enable", "undo disable", False)):
        _action(actions, name, about, _set_disabled(disabled=disabled)).add_argument("id")
    password = _action(
        actions, "password", "set its holder's password, and end all sessions", _password, context.session_store
    )
    password.add_argument("id")
    password.add_argument("--stdin", action="store_true", help="read it from standard input instead of asking for it")
    _action(actions, "link", "a link that signs its holder in once", _link, context.session_store).add_argument("id")


def _action(actions: Any, name: str, about: str, act: Any, store: Any = context.key_store) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=about)
    context.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=lambda args: asyncio.run(_with_store(args, act, store)))
    return parser


async def _with_store(args: argparse.Namespace, act: Any, opened: Any) -> int:
    async with opened(args) as store:
        await act(store, args)
    return 0


async def _create(store: KeyStore, args: argparse.Namespace) -> None:
    account = await store.create_account(name=args.name, email=args.email, plan=args.plan, own=own_limits(args))
    output.row(account, as_json=args.json)


async def _list(store: KeyStore, args: argparse.Namespace) -> None:
    output.rows(await store.list_accounts(), COLUMNS, as_json=args.json)


async def _show(store: KeyStore, args: argparse.Namespace) -> None:
    account = await store.read_account(args.id)
    output.row(account, as_json=args.json, used_today=await store.usage_of_today(args.id))


async def _set(store: KeyStore, args: argparse.Namespace) -> None:
    account = await store.update_account(
        args.id, name=args.name, email=args.email, plan=args.plan, own=own_limits(args)
    )
    output.row(account, as_json=args.json)


def _set_disabled(*, disabled: bool) -> Any:
    async def act(store: KeyStore, args: argparse.Namespace) -> None:
        output.row(await store.update_account(args.id, disabled=disabled), as_json=args.json)

    return act


async def _password(opened: tuple[SessionStore, Settings], args: argparse.Namespace) -> None:
    store, _ = opened
    holder = await store.read_holder(args.id)
    await store.set_password(holder.id, hash_password(_asked_for(stdin=args.stdin)))
    output.row({"id": holder.id, "password": "set"}, as_json=args.json)


def _asked_for(*, stdin: bool) -> str:
    """Twice where a person types it: nobody sees what is typed."""
    if stdin:
        return sys.stdin.readline().rstrip("\r\n")
    password = getpass("New password: ")
    if getpass("Once more: ") != password:
        raise InvalidRequest("the two are not the same")
    return password


async def _link(opened: tuple[SessionStore, Settings], args: argparse.Namespace) -> None:
    store, settings = opened
    holder, token = await store.read_holder(args.id), new_token()
    until = await store.add_link(token, holder.id, lasts_s=settings.dashboard.link_s)
    where = settings.dashboard.url or f"http://{settings.server.host}:{settings.server.port}"
    output.row({"url": link_of(where, token), "expires_at": until}, as_json=args.json)
