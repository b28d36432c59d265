"""A seeded account on each plan, with a live and a test key, the same at every start.

Keys cannot be read back from the database; a development service keeps its own in a file beside it, so that they can be
shown again. The file is only believed while the database knows the keys.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import orjson

from proxy.core import access
from proxy.store.keys import KeyStore

PLANS = ("free", "growth", "enterprise")


def pepper(path: Path) -> str:
    """The pepper of this data directory, made at the first start."""
    if not path.exists():
        write_private(path, secrets.token_urlsafe(32).encode())
    return path.read_text("ascii")


async def keys(store: KeyStore, path: Path) -> dict[str, dict[str, str]]:
    """For each plan its live and test key."""
    found = orjson.loads(path.read_bytes()) if path.exists() else {}
    hints = {row["hint"] for row in await store.list_keys() if row["status"] == "active"}
    for plan in PLANS:
        known = found.get(plan, {})
        if not known or any(access.hint_of(key) not in hints for key in known.values()):
            found[plan] = await _new_account(store, plan)
            write_private(path, orjson.dumps(found, option=orjson.OPT_INDENT_2))
    return dict(found)


async def _new_account(store: KeyStore, plan: str) -> dict[str, str]:
    email = f"{plan}@example.com"
    account = await store.find_account(email) or await store.create_account(
        name=f"Development ({plan})", email=email, plan=plan
    )
    made: dict[str, str] = {}
    for mode in access.MODES:
        _, made[mode] = await store.create_key(account["id"], name=f"dev {mode}", mode=mode)
    return made


def write_private(path: Path, data: bytes) -> None:
    """Whole or not at all, and for our eyes only."""
    part = path.with_suffix(".part")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    part.replace(path)
