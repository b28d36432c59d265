"""Which accounts have sent which transactions privately.

Every null for a transaction's hash raises that question, so it is answered from memory. Transactions of the last minute are in
the notes of recent writes, which the workers of all hosts share; older ones are in a list of the account's newest transactions,
which is read from Postgres every few seconds at most. While Postgres is away, nulls are passed on without a delay.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from proxy.core.lru_cache import LruCache
from proxy.errors import Fault
from proxy.services.accounts.metering import meter_of_task
from proxy.services.rpc.network_state import NetworkState
from proxy.store.postgres.private_transactions import PrivateTransaction, PrivateTransactionStore

T = TypeVar("T")

# How old a list may be. Notes of writes are kept for longer.
LIST_S = 5.0
# Transactions in one list. An account with more pays for a look at each older hash.
LONGEST_LIST = 500
LOOK_UNITS = 1
# Hashes in all lists together: 10 MB.
MOST_HASHES = 100_000
# How long one read of Postgres may take, and for how long no other begins after one that failed.
READ_S, PAUSE_S = 0.5, 1.0


@dataclass(frozen=True, slots=True)
class _SentList:
    read_at: float
    hashes: frozenset[bytes]

    @property
    def is_whole(self) -> bool:
        return len(self.hashes) < LONGEST_LIST

    def has(self, transaction: bytes) -> bool | None:
        """None: it may be older than those of the list."""
        return True if transaction in self.hashes else False if self.is_whole else None


class PrivateSenders:
    def __init__(self, store: PrivateTransactionStore) -> None:
        self._store = store
        self._lists: LruCache[tuple[str, str], _SentList] = LruCache(MOST_HASHES, lambda _, each: 1 + len(each.hashes))
        # Reads of lists under way, one for each account and network.
        self._reads: dict[tuple[str, str], asyncio.Future[None]] = {}
        self._paused_until = 0.0

    def __repr__(self) -> str:
        return f"<PrivateSenders {len(self._lists)} lists, {len(self._reads)} reads>"

    def is_ruled_out(self, state: NetworkState, account: str, transaction: bytes) -> bool:
        """Whether the account has certainly not sent the transaction, as far as can be said without a read."""
        now = time.monotonic()
        if _is_noted(state, account, transaction, now):
            return False
        known = self._list(state, account, now)
        return now < self._paused_until if known is None else known.has(transaction) is False

    async def has_sent(self, state: NetworkState, account: str, transaction: bytes) -> bool:
        if _is_noted(state, account, transaction, time.monotonic()):
            return True
        while (known := self._list(state, account, now := time.monotonic())) is None and now >= self._paused_until:
            await self._read_once(state, account)
        has_sent = False if known is None else known.has(transaction)
        return await self._look(state, account, transaction) if has_sent is None else has_sent

    def _list(self, state: NetworkState, account: str, now: float) -> _SentList | None:
        sent = self._lists.get((state.network_id, account))
        return None if sent is None or now - sent.read_at > LIST_S else sent

    async def _read_once(self, state: NetworkState, account: str) -> None:
        """Read the account's list, or wait for the read that is under way."""
        name = (state.network_id, account)
        if (under_way := self._reads.get(name)) is not None:
            await asyncio.wait((under_way,))
            return
        done = self._reads[name] = asyncio.get_running_loop().create_future()
        try:
            now = time.monotonic()
            hashes = await self._in_time(self._store.newest_of(*name, limit=LONGEST_LIST))
            if hashes is not None:
                self._lists[name] = _SentList(now, hashes)
        finally:
            del self._reads[name]
            done.set_result(None)

    async def _look(self, state: NetworkState, account: str, transaction: bytes) -> bool:
        if (meter := meter_of_task.get()) is not None:
            await meter.pay(LOOK_UNITS)
        sent = PrivateTransaction(state.network_id, transaction, account)
        return bool(await self._in_time(self._store.is_recorded(sent)))

    async def _in_time(self, read: Coroutine[Any, Any, T]) -> T | None:
        """The result of a read; None if Postgres is away."""
        if time.monotonic() < self._paused_until:
            read.close()
            return None
        try:
            async with asyncio.timeout(READ_S):
                return await read
        except (Fault, TimeoutError):
            self._paused_until = time.monotonic() + PAUSE_S
            return None


def _is_noted(state: NetworkState, account: str, transaction: bytes, now: float) -> bool:
    return state.writes is not None and state.writes.is_private(account, transaction, now)
