"""`keys`: create, list, show, rotate, revoke, disable, enable and change keys."""

from __future__ import annotations

import argparse
from typing import Any

from proxy.commands import context, output
from proxy.commands.accounts import add_limits, own_limits
from proxy.compose.accounts import known_uses
from proxy.core.access import ACCOUNT_SCOPES, MODES, USUAL_SCOPES
from proxy.core.directives import BY_NAME
from proxy.store.postgres.keys import NEVER, USUAL_DIRECTIVES, KeyDetailChange, KeyRestrictionChange, KeyStore
from proxy.web.timestamps import moment_of

COLUMNS = ("id", "account_id", "name", "hint", "mode", "status", "scopes", "expires_at", "created_at")
STATUS_OF = {"revoke": "revoked", "disable": "disabled", "enable": "active"}


def register(commands: Any) -> None:
    parser = commands.add_parser("keys", help="create, list, show, rotate, revoke and change keys")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _register_create(actions)
    listing = context.add_action(actions, "list", "list keys", _list)
    listing.add_argument("--account", metavar="ID", help="only the keys of this account")
    _with_id(context.add_action(actions, "show", "show a key", _show))
    rotate = context.add_action(actions, "rotate", "create a successor; the old key keeps working for a while", _rotate)
    _with_id(rotate)
    rotate.add_argument(
        "--overlap-s",
        type=float,
        default=86400.0,
        metavar="S",
        help="seconds until the old key expires (default: 86400, one day)",
    )
    for name, about in (
        ("revoke", "revoke a key permanently"),
        ("disable", "refuse a key until it is enabled"),
        ("enable", "enable a disabled key"),
    ):
        _with_id(context.add_action(actions, name, about, _set_status))
    _register_set(actions)


def _register_create(actions: Any) -> None:
    create = context.add_action(actions, "create", "create a key and print it once", _create)
    create.add_argument("--account", required=True, metavar="ID", help="the id of the key's account")
    create.add_argument("--name", default="default", help="a name for the key (default: default)")
    create.add_argument(
        "--mode", choices=MODES, default="live", help="test keys work on test networks only (default: live)"
    )
    account = ", ".join(ACCOUNT_SCOPES)
    scopes = f"allow this scope; repeatable; default: {', '.join(USUAL_SCOPES)}; for the account itself: {account}"
    create.add_argument("--scope", action="append", default=[], metavar="SCOPE", help=scopes)
    add_limits(create, day=False)
    _add_restrictions(create)


def _register_set(actions: Any) -> None:
    change = context.add_action(actions, "set", "change a key", _set)
    _with_id(change)
    change.add_argument("--name", help="the new name")
    change.add_argument(
        "--scope", action="append", metavar="SCOPE", help="allow this scope; repeatable; replaces the old scopes"
    )
    change.add_argument("--all-scopes", action="store_true", help="allow all scopes but those for the account itself")
    add_limits(change, day=False)
    _add_restrictions(change)
    change.add_argument(
        "--from-anywhere", action="store_true", help="remove the lists of allowed addresses and origins"
    )
    change.add_argument(
        "--for-anything", action="store_true", help="remove the lists of allowed networks, methods and contracts"
    )
    change.add_argument(
        "--fault", metavar="PLAN", help="spoil replies to a test key, as in latency=800ms,p=0.2; empty: no more"
    )
    change.add_argument("--usual-directives", action="store_true", help="allow all directives but upstream")


def _with_id(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", help="the key's id, such as key_0123…")


def _add_restrictions(parser: argparse.ArgumentParser) -> None:
    """Add options that restrict where the key may be used from and for what, and those that describe it."""
    parser.add_argument(
        "--allow-ip", action="append", metavar="CIDR", help="accept the key only from these addresses; repeatable"
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        metavar="ORIGIN",
        help="accept the key only from web pages of these origins; repeatable",
    )
    for option, noun, example in (
        ("--allow-network", "networks", "CHAIN/NETWORK"),
        ("--allow-method", "methods", "METHOD"),
        ("--allow-contract", "contracts", "ADDRESS"),
    ):
        parser.add_argument(
            option, action="append", metavar=example, help=f"accept the key only for these {noun}; repeatable"
        )
    parser.add_argument(
        "--allow-in-url",
        action=argparse.BooleanOptionalAction,
        help="accept the key in the URL of a request, where it is easily logged or copied (default: no)",
    )
    parser.add_argument(
        "--private-transactions",
        action=argparse.BooleanOptionalAction,
        help="send its transactions to relays only, never to the public mempool (default: no)",
    )
    parser.add_argument("--expires-at", metavar="TIME", help="end the key then, as in 2027-01-31T00:00:00Z; or never")
    parser.add_argument("--owner", metavar="TEXT", help="who answers for the key, such as a team")
    parser.add_argument("--note", metavar="TEXT", help="what the key is for")
    parser.add_argument(
        "--directive",
        action="append",
        metavar="NAME",
        help=f"allow only these directives; repeatable; one of {', '.join(BY_NAME)} (default: all but upstream)",
    )


async def _create(store: KeyStore, args: argparse.Namespace) -> None:
    row, key = await store.create_key(
        args.account,
        name=args.name,
        mode=args.mode,
        scopes=args.scope,
        own=own_limits(args),
        restrictions=_restrictions(args),
        details=_details(args),
        allowed_directives=args.directive,
    )
    await context.record("create_key", account=args.account, subject=row["id"], after=row)
    output.row(row, as_json=args.json, key=key)
    _remind(args)


async def _list(store: KeyStore, args: argparse.Namespace) -> None:
    output.rows(await store.list_keys(args.account), COLUMNS, as_json=args.json)


async def _show(store: KeyStore, args: argparse.Namespace) -> None:
    output.row(await store.read_key(args.id), as_json=args.json)


async def _rotate(store: KeyStore, args: argparse.Namespace) -> None:
    row, key = await store.rotate_key(args.id, overlap_s=args.overlap_s)
    await context.record("rotate_key", account=row["account_id"], subject=args.id, after={"successor": row["id"]})
    output.row(row, as_json=args.json, key=key)
    _remind(args)


async def _set_status(store: KeyStore, args: argparse.Namespace) -> None:
    before = await store.read_key(args.id)
    row = await store.set_key_status(args.id, STATUS_OF[args.action])
    operation = "revoke_key" if row["status"] == "revoked" else "update_key"
    await context.record(operation, account=row["account_id"], subject=args.id, before=before, after=row)
    output.row(row, as_json=args.json)


async def _set(store: KeyStore, args: argparse.Namespace) -> None:
    scopes = [] if args.all_scopes else args.scope
    before = await store.read_key(args.id)
    row = await store.update_key(
        args.id,
        name=args.name,
        scopes=scopes,
        own=own_limits(args),
        restrictions=_restrictions(args, anywhere=args.from_anywhere, anything=args.for_anything),
        details=_details(args),
        allowed_directives=USUAL_DIRECTIVES if args.usual_directives else args.directive,
        fault=args.fault,
    )
    await context.record("update_key", account=row["account_id"], subject=args.id, before=before, after=row)
    output.row(row, as_json=args.json)


def _restrictions(args: argparse.Namespace, *, anywhere: bool = False, anything: bool = False) -> KeyRestrictionChange:
    change = KeyRestrictionChange(
        ips=() if anywhere else args.allow_ip,
        origins=() if anywhere else args.allow_origin,
        networks=() if anything else args.allow_network,
        methods=() if anything else args.allow_method,
        contracts=() if anything else args.allow_contract,
        in_url=args.allow_in_url,
        private=args.private_transactions,
    )
    if change.networks or change.methods:
        known_uses(context.tables_of(context.load(args))).check(change)
    return change


def _details(args: argparse.Namespace) -> KeyDetailChange:
    given = args.expires_at
    expires_at = given if given is None else NEVER if given == "never" else moment_of(given, "--expires-at")
    return KeyDetailChange(owner=args.owner, note=args.note, expires_at=expires_at)


def _remind(args: argparse.Namespace) -> None:
    if not args.json:
        print("\nStore the key now: it cannot be shown again, because only its digest is stored.")
