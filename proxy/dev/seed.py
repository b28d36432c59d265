"""Seeds one account per plan, with a live key, a test key and a password, and an operator. They are the same at every start.

The database stores no secret in readable form, so a development service keeps its own in files, to show them again. If the
database does not have the secrets in the files, new ones are created.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import orjson

from proxy.core import access
from proxy.services.accounts.sign_in import hash_password, new_admin_token, verify_password
from proxy.store.postgres.keys import KeyRestrictionChange, KeyStore
from proxy.store.postgres.sessions import SessionStore

PLANS = ("free", "growth", "enterprise")


@dataclass(frozen=True, slots=True)
class Seeded:
    """The live and test key of each plan, and the dashboard's credentials."""

    keys: dict[str, dict[str, str]]
    sign_in: dict[str, str]


def pepper(path: Path) -> str:
    """Return the pepper of this data directory, created at the first start."""
    if not path.exists():
        write_private(path, secrets.token_urlsafe(32).encode())
    return path.read_text("ascii")


async def keys(store: KeyStore, path: Path) -> dict[str, dict[str, str]]:
    """Return the live and test key of each plan, creating missing ones."""
    by_plan = orjson.loads(path.read_bytes()) if path.exists() else {}
    hints = {row["hint"] for row in await store.list_keys() if row["status"] == "active"}
    for plan in PLANS:
        known = by_plan.get(plan, {})
        if not known or any(access.hint_of(key) not in hints for key in known.values()):
            by_plan[plan] = await _new_account(store, plan)
            write_private(path, orjson.dumps(by_plan, option=orjson.OPT_INDENT_2))
    return dict(by_plan)


async def sign_ins(store: SessionStore, path: Path) -> dict[str, str]:
    """Return the password of all seeded accounts and an operator's token, creating them if needed."""
    credentials = orjson.loads(path.read_bytes()) if path.exists() else {}
    if not credentials:
        credentials = {"password": secrets.token_urlsafe(12), "admin_token": new_admin_token()}
        write_private(path, orjson.dumps(credentials, option=orjson.OPT_INDENT_2))
    for plan in PLANS:
        holder = await store.find_holder(email_of(plan))
        # Setting a password ends every session, so it is set only if it differs.
        if holder is not None and not (holder.hash and verify_password(holder.hash, credentials["password"])):
            await store.set_password(holder.id, hash_password(credentials["password"]))
    if await store.find_token(credentials["admin_token"]) is None:
        await store.add_token("development", credentials["admin_token"])
    return dict(credentials)


def email_of(plan: str) -> str:
    return f"{plan}@example.com"


async def _new_account(store: KeyStore, plan: str) -> dict[str, str]:
    email = email_of(plan)
    account = await store.find_account(email) or await store.create_account(
        name=f"Development ({plan})", email=email, plan=plan
    )
    by_mode: dict[str, str] = {}
    for mode in access.MODES:
        # Wallets and tools that take only a URL can then be tried.
        in_url = KeyRestrictionChange(in_url=True)
        _, by_mode[mode] = await store.create_key(account["id"], name=f"dev {mode}", mode=mode, restrictions=in_url)
    return by_mode


def write_private(path: Path, data: bytes) -> None:
    """Write the file atomically, readable only by this user."""
    part = path.with_suffix(".part")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    part.replace(path)
