"""`operations`: list the user operations sent through the bundler API and their status."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from proxy.commands import context, output
from proxy.store.postgres.operations import OperationStore

COLUMNS = ("hash", "network", "key_id", "sender", "status", "block", "transaction", "seen_at", "changed_at")
_BYTES = ("hash", "sender", "entry_point", "block_hash", "transaction")
MOST = 10_000


def register(commands: Any) -> None:
    parser = commands.add_parser("operations", help="list user operations and their status")
    context.add_arguments(parser)
    parser.add_argument(
        "--key", metavar="ID", help="only operations of this key and of its predecessors and successors"
    )
    parser.add_argument("--limit", type=int, default=50, metavar="N", help="list the newest N operations (default: 50)")
    parser.add_argument("--json", action="store_true", help="print JSON, including the operations themselves")
    parser.set_defaults(run=lambda args: asyncio.run(_list(args)))


async def _list(args: argparse.Namespace) -> int:
    async with context.key_store(args) as keys:
        lineage = None if args.key is None else (await keys.read_key(args.key))["lineage_id"]
    settings = context.load(args)
    pool = context.own_pool(settings, size=1)
    await pool.open()
    try:
        rows = await OperationStore(pool).list_of(lineage, limit=max(1, min(args.limit, MOST)))
    finally:
        await pool.close()
    output.rows([_shown(row) for row in rows], COLUMNS, as_json=args.json)
    return 0


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """Convert bytes and the nonce, which can exceed 64 bits, to hex."""
    shown = {name: f"0x{row[name].hex()}" for name in _BYTES if row[name] is not None}
    return {**row, **shown, "nonce": hex(int(row["nonce"]))}
