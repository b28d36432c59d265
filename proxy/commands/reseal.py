"""`reseal`: rotate the pepper, or the key of the signing secrets, while the service runs."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from proxy.commands import context
from proxy.errors import StartError
from proxy.settings import Settings
from proxy.store.postgres import peppers
from proxy.store.postgres.pool import DatabaseConnection
from proxy.store.postgres.secrets import vault_of

ABOUT = """
To rotate the pepper:

  1. Set keys.pepper to a new value and keys.previous_pepper to the old one, on every host, and reload or restart it.
     From then on each API key and admin token moves to the new pepper when it is used. Hosts that still have the old
     settings keep working.
  2. When every host has the new settings, run `reseal`. It counts the API keys and admin tokens that have not moved yet.
  3. When none is left, or the rest may stop working, run `reseal --finish`. It also encrypts the webhooks' signing secrets
     again.
  4. Remove keys.previous_pepper, and reload.

Dashboard sessions and sign-in links from before step 4 end with it. Filters (eth_newFilter) from before are
lost: clients create them again, as after a restart of the upstream.

Without a rotation, `reseal` encrypts signing secrets again after webhooks.secret_key was set for the first time. Set it on the
hosts that deliver webhooks first.
"""


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "reseal",
        help="rotate the pepper: count the API keys still on the old one, and encrypt stored secrets again",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    context.add_arguments(parser)
    parser.add_argument(
        "--finish",
        action="store_true",
        help="end the rotation: the old pepper is refused from now on, and keys and tokens that have not moved stop working",
    )
    parser.set_defaults(run=lambda args: asyncio.run(run(args)))


async def run(args: argparse.Namespace) -> int:
    settings = context.load(args)
    await context.check_database(settings)
    async with context.database(settings.database.session_url) as connection:
        if args.finish or not settings.keys.previous_pepper:
            await _reseal(connection, settings)
        await _report_keys(connection, settings, is_finish=args.finish)
    return 0


async def _reseal(connection: DatabaseConnection, settings: Settings) -> None:
    done, broken = await peppers.reseal(connection, vault_of(settings))
    print(f"secrets encrypted with the current key: {done}")
    if broken:
        raise StartError(
            [
                f"{len(broken)} secrets cannot be decrypted ({', '.join(broken[:5])}): rotate those of webhooks, turn the "
                "second factors of accounts off (`accounts second-factor-off`), then run this command again"
            ]
        )


async def _report_keys(connection: DatabaseConnection, settings: Settings, *, is_finish: bool) -> None:
    keys, tokens = await peppers.count_unmoved(connection, settings.keys.pepper)
    print(f"API keys not used since the pepper was changed: {keys}")
    print(f"admin tokens not used since the pepper was changed: {tokens}")
    if is_finish:
        await peppers.finish(connection, settings.keys.pepper, vault_of(settings))
        print("the rotation has ended: remove keys.previous_pepper from the settings and reload")
    elif settings.keys.previous_pepper:
        print("run `penstock reseal --finish` to end the rotation; keys and tokens not used by then stop working")
