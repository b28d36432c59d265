"""Waits until the development chain is indexed, so that balances and NFTs come from this chain and not an earlier one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
import asyncpg

from proxy.store.postgres.pool import AWAY, DatabaseConnection

# A few blocks take a moment. If it takes longer, indexing continues after the start.
WITHIN_S = 15.0
POLL_S = 0.05
_CURSORS = "select block, block_hash from followed_networks where network = any($1) and block is not null"


async def is_indexed(database_url: str, chain_url: str, networks: Sequence[str]) -> bool:
    """Wait until the networks are indexed; return False after the timeout, or if the database or chain does not answer."""
    try:
        async with asyncio.timeout(WITHIN_S), aiohttp.ClientSession() as session:
            connection = await asyncpg.connect(database_url)
            try:
                await _until_indexed(connection, session, chain_url, networks)
            finally:
                connection.terminate()
    except (aiohttp.ClientError, KeyError, *AWAY):
        return False
    return True


async def _until_indexed(
    connection: DatabaseConnection, session: aiohttp.ClientSession, chain_url: str, networks: Sequence[str]
) -> None:
    newest = int((await _block(session, chain_url, "latest"))["number"], 16)
    while True:
        cursors = await connection.fetch(_CURSORS, networks)
        indexed = [await _is_at(session, chain_url, row) for row in cursors if row["block"] >= newest]
        if sum(indexed) == len(networks):
            return
        await asyncio.sleep(POLL_S)


async def _is_at(session: aiohttp.ClientSession, chain_url: str, cursor: asyncpg.Record) -> bool:
    """Return whether the block belongs to this chain, which is a new one at every start."""
    block = await _block(session, chain_url, hex(cursor["block"]))
    return block is not None and block["hash"] == "0x" + cursor["block_hash"].hex()


async def _block(session: aiohttp.ClientSession, chain_url: str, which: str) -> Any:
    call = {"jsonrpc": "2.0", "id": 1, "method": "eth_getBlockByNumber", "params": [which, False]}
    async with session.post(chain_url, json=call) as response:
        return (await response.json())["result"]
