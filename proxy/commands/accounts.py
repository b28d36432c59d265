"""`accounts`: create, list, show, change and delete accounts, and give their holders access to the dashboard."""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from getpass import getpass
from typing import Any

from proxy.commands import context, output
from proxy.core.dashboard_links import token_link
from proxy.errors import InvalidRequest
from proxy.services.accounts.removal import AccountRemoval
from proxy.services.accounts.sign_in import hash_password, new_token
from proxy.settings import Settings
from proxy.store.postgres.keys import KeyStore, LimitChange
from proxy.store.postgres.members import MemberStore
from proxy.store.postgres.second_factors import SecondFactorStore
from proxy.store.postgres.secrets import vault_of
from proxy.store.postgres.sessions import SessionStore
from proxy.store.postgres.webhooks import WebhookStore

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
MEMBER_COLUMNS = ("id", "email", "role", "has_second_factor", "joined_at", "seen_at")


def add_limits(parser: argparse.ArgumentParser, *, day: bool) -> None:
    """Add options for the limits of an account (`day=True`) or of a key, which has no daily limit."""
    default = "the plan's limit" if day else "the account's limit, which is also the maximum"
    parser.add_argument("--requests-per-second", type=int, metavar="N", help=f"requests per second (-1: use {default})")
    parser.add_argument(
        "--units-per-second", type=int, metavar="N", help=f"compute units per second (-1: use {default})"
    )
    if day:
        parser.add_argument(
            "--requests-per-day",
            type=int,
            metavar="N",
            help="requests per day (0: unlimited, -1: use the plan's limit)",
        )


def own_limits(args: argparse.Namespace) -> LimitChange:
    return LimitChange(
        requests_per_second=args.requests_per_second,
        units_per_second=args.units_per_second,
        requests_per_day=getattr(args, "requests_per_day", None),
    )


def register(commands: Any) -> None:
    parser = commands.add_parser("accounts", help="create, list, show, change and delete accounts")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = context.add_action(actions, "create", "create an account", _create)
    create.add_argument("--name", required=True, help="the name of the customer or team")
    create.add_argument("--email", required=True, help="the holder's email address, for signing in and for notices")
    create.add_argument("--plan", default="free", help="a plan of config/plans.toml (default: free)")
    add_limits(create, day=True)
    context.add_action(actions, "list", "list all accounts", _list)
    _with_id(context.add_action(actions, "show", "show an account and its requests today", _show))
    change = context.add_action(actions, "set", "change an account", _set)
    _with_id(change)
    change.add_argument("--name", help="the new name")
    change.add_argument("--email", help="the new email address")
    change.add_argument("--plan", help="the new plan, one of config/plans.toml")
    add_limits(change, day=True)
    for name, about, disabled in (
        ("disable", "refuse all keys of an account until it is enabled", True),
        ("enable", "enable a disabled account", False),
    ):
        _with_id(context.add_action(actions, name, about, _set_disabled(disabled=disabled)))
    delete = context.add_action(
        actions, "delete", "delete an account with its keys, webhooks, policies and personal data", _delete, removal
    )
    _with_id(delete)
    delete.add_argument("--yes", action="store_true", help="do not ask: this cannot be undone")
    _register_people(actions)


def _register_people(actions: Any) -> None:
    password = context.add_action(
        actions,
        "password",
        "set the holder's dashboard password and end all sessions",
        _password,
        context.session_store,
    )
    _with_id(password)
    password.add_argument("--stdin", action="store_true", help="read the password from standard input without a prompt")
    _with_id(
        context.add_action(actions, "link", "create a link that signs the holder in once", _link, context.session_store)
    )
    _with_id(context.add_action(actions, "members", "list the people of an account", _members, member_store))
    remove = context.add_action(
        actions, "remove-member", "remove a member from an account and end their sessions", _remove_member, member_store
    )
    _with_id(remove)
    remove.add_argument("member", help="the member's id, such as mem_0123…")
    about = "turn two-factor sign-in off, for a holder who has lost the app and the recovery codes"
    _with_id(context.add_action(actions, "second-factor-off", about, _second_factor_off, second_factors))


def _with_id(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", help="the account's id, such as acct_0123…")


async def _create(store: KeyStore, args: argparse.Namespace) -> None:
    account = await store.create_account(name=args.name, email=args.email, plan=args.plan, own=own_limits(args))
    await context.record("admin_create_account", account=account["id"], after=account)
    output.row(account, as_json=args.json)


async def _list(store: KeyStore, args: argparse.Namespace) -> None:
    output.rows(await store.list_accounts(), COLUMNS, as_json=args.json)


async def _show(store: KeyStore, args: argparse.Namespace) -> None:
    account = await store.read_account(args.id)
    output.row(account, as_json=args.json, used_today=await store.usage_of_today(args.id))


async def _set(store: KeyStore, args: argparse.Namespace) -> None:
    before = await store.read_account(args.id)
    account = await store.update_account(
        args.id, name=args.name, email=args.email, plan=args.plan, own=own_limits(args)
    )
    await context.record("admin_update_account", account=args.id, before=before, after=account)
    output.row(account, as_json=args.json)


def _set_disabled(*, disabled: bool) -> Any:
    async def act(store: KeyStore, args: argparse.Namespace) -> None:
        before = await store.read_account(args.id)
        account = await store.update_account(args.id, disabled=disabled)
        await context.record("admin_update_account", account=args.id, before=before, after=account)
        output.row(account, as_json=args.json)

    return act


@asynccontextmanager
async def removal(args: argparse.Namespace) -> AsyncIterator[tuple[AccountRemoval, KeyStore]]:
    async with context.opened(args) as (settings, pool):
        keys = context.keys_of(settings, pool)
        yield AccountRemoval(keys, WebhookStore(pool)), keys


async def _delete(opened: tuple[AccountRemoval, KeyStore], args: argparse.Namespace) -> None:
    removals, keys = opened
    account = await keys.read_account(args.id)
    if not args.yes and _typed(f"Type {account['email'] or args.id} to delete this account: ") != (
        account["email"] or args.id
    ):
        raise InvalidRequest("nothing was deleted: the text differs. Use --yes to skip the question")
    await removals.remove(args.id)
    await context.record("admin_delete_account", subject=args.id)
    output.row({"id": args.id, "deleted": True}, as_json=args.json)


def _typed(question: str) -> str:
    """The line that a person types; empty without a terminal."""
    return input(question).strip() if sys.stdin.isatty() else ""


async def _password(opened: tuple[SessionStore, Settings], args: argparse.Namespace) -> None:
    store, _ = opened
    holder = await store.read_holder(args.id)
    await store.set_password(holder.id, hash_password(_read_password(stdin=args.stdin)))
    await context.record("account_set_password", account=holder.account, subject=holder.email)
    output.row({"id": holder.id, "password": "set"}, as_json=args.json)


def _read_password(*, stdin: bool) -> str:
    """Read the password, twice if it is typed, because typing is invisible."""
    if stdin:
        return sys.stdin.readline().rstrip("\r\n")
    password = getpass("New password: ")
    if getpass("Repeat the password: ") != password:
        raise InvalidRequest("the two passwords differ; the old one was kept")
    return password


@asynccontextmanager
async def member_store(args: argparse.Namespace) -> AsyncIterator[MemberStore]:
    async with context.opened(args) as (_, pool):
        yield MemberStore(pool)


async def _members(store: MemberStore, args: argparse.Namespace) -> None:
    output.rows(await store.members(args.id), MEMBER_COLUMNS, as_json=args.json)


async def _remove_member(store: MemberStore, args: argparse.Namespace) -> None:
    email = await store.remove(args.id, args.id, args.member)
    await context.record("remove_member", account=args.id, subject=email)
    output.row({"id": args.member, "email": email, "removed": True}, as_json=args.json)


@asynccontextmanager
async def second_factors(args: argparse.Namespace) -> AsyncIterator[tuple[SecondFactorStore, SessionStore]]:
    async with context.opened(args) as (settings, pool):
        yield SecondFactorStore(pool, vault_of(settings)), SessionStore(pool, pepper=settings.keys.pepper)


async def _second_factor_off(opened: tuple[SecondFactorStore, SessionStore], args: argparse.Namespace) -> None:
    store, people = opened
    if not await store.remove(args.id):
        raise InvalidRequest(f"the account {args.id} has no two-factor sign-in")
    holder = await people.read_holder(args.id)
    await context.record("remove_second_factor", account=holder.account, subject=holder.email)
    output.row({"id": args.id, "second_factor": "off"}, as_json=args.json)


async def _link(opened: tuple[SessionStore, Settings], args: argparse.Namespace) -> None:
    store, settings = opened
    holder, token = await store.read_holder(args.id), new_token()
    until = await store.add_link(token, holder.id, lasts_s=settings.dashboard.link_s)
    await context.record("admin_make_link", account=holder.account, subject=holder.email)
    where = settings.dashboard.url or f"{settings.server.tls.scheme}://{settings.server.host}:{settings.server.port}"
    output.row({"url": token_link(where, "token", token), "expires_at": until}, as_json=args.json)
