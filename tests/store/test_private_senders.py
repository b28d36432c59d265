"""Whose private transactions are: answered from memory, from Postgres once in a while, and without a delay if it is away."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.services.relays import private_senders
from proxy.services.relays.private_senders import LONGEST_LIST, PrivateSenders
from proxy.services.rpc.recent_writes import RecentWrites
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.private_transactions import PrivateTransaction, PrivateTransactionStore
from proxy.store.shared_memory.write_table import WriteTable

NETWORK, ACCOUNT, OTHER = "dev/mainnet", "acct_1", "acct_2"


class CountingStore(PrivateTransactionStore):
    """Counts its reads."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.lists = self.looks = 0

    async def newest_of(self, network: str, account: str, *, limit: int) -> frozenset[bytes]:
        self.lists += 1
        return await super().newest_of(network, account, limit=limit)

    async def is_recorded(self, sent: PrivateTransaction) -> bool:
        self.looks += 1
        return await super().is_recorded(sent)


@pytest.fixture
async def store(pool: Pool) -> CountingStore:
    async with pool.connection() as connection:
        for account in (ACCOUNT, OTHER):
            await connection.execute(
                "insert into accounts (id, name, email, plan) values ($1, 'A', 'a@b', 'free')", account
            )
    return CountingStore(pool)


@pytest.fixture
def writes() -> Iterator[WriteTable]:
    fd = os.memfd_create("writes")
    yield WriteTable(fd, 0)
    os.close(fd)


def state_of(writes: WriteTable | None = None) -> Any:
    """A network as a worker has it, as far as senders are concerned."""
    return SimpleNamespace(network_id=NETWORK, writes=None if writes is None else RecentWrites(NETWORK, (), writes))


async def record(store: PrivateTransactionStore, number: int, account: str = ACCOUNT) -> bytes:
    name = number.to_bytes(32, "big")
    await store.record(PrivateTransaction(NETWORK, name, account), key_id="key_1", raw=None, public_after=None)
    return name


async def test_flood_of_hashes_takes_one_read_of_postgres(store: CountingStore) -> None:
    name, senders, state = await record(store, 1), PrivateSenders(store), state_of()
    assert not senders.is_ruled_out(state, ACCOUNT, name), "before the first read anything is possible"
    hashes = [number.to_bytes(32, "big") for number in range(1, 2000)]
    found = await asyncio.gather(*(senders.has_sent(state, ACCOUNT, each) for each in hashes))
    assert found == [True, *[False] * (len(hashes) - 1)]
    assert (store.lists, store.looks) == (1, 0)
    assert [senders.is_ruled_out(state, ACCOUNT, each) for each in hashes[:2]] == [False, True]
    assert not await senders.has_sent(state, OTHER, name)
    assert store.lists == 2, "each account has a list of its own"


async def test_transaction_of_another_worker_is_found_at_once(store: CountingStore, writes: WriteTable) -> None:
    senders, state = PrivateSenders(store), state_of(writes)
    assert not await senders.has_sent(state, ACCOUNT, bytes(32))
    name = await record(store, 7)
    assert senders.is_ruled_out(state, ACCOUNT, name), "the list is older"
    note = RecentWrites(NETWORK, (), writes).took_privately(ACCOUNT, name)
    assert not senders.is_ruled_out(state, ACCOUNT, name)
    assert await senders.has_sent(state, ACCOUNT, name)
    assert not await senders.has_sent(state, OTHER, name)
    # Another host gets the note.
    fd = os.memfd_create("writes of another host")
    there = state_of(WriteTable(fd, 0))
    os.close(fd)
    there.writes.heard(note)
    assert await senders.has_sent(there, ACCOUNT, name)


async def test_list_is_read_again_after_a_while(store: CountingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    senders, state = PrivateSenders(store), state_of()
    assert not await senders.has_sent(state, ACCOUNT, bytes(32))
    name = await record(store, 7)
    monkeypatch.setattr(private_senders, "LIST_S", -1.0)
    assert not senders.is_ruled_out(state, ACCOUNT, name)
    monkeypatch.setattr(private_senders, "LIST_S", 5.0)
    senders._lists.clear()
    assert await senders.has_sent(state, ACCOUNT, name)
    assert store.lists == 2


async def test_transactions_beyond_the_list_are_looked_up_one_by_one(store: CountingStore) -> None:
    names = [await record(store, number) for number in range(LONGEST_LIST + 2)]
    senders, state = PrivateSenders(store), state_of()
    assert await senders.has_sent(state, ACCOUNT, names[0])
    assert store.looks == 1
    assert await senders.has_sent(state, ACCOUNT, names[-1])
    assert not await senders.has_sent(state, ACCOUNT, b"\xff" * 32)
    assert (store.lists, store.looks) == (1, 2)


async def test_postgres_that_is_away_delays_no_more_than_one_null(
    store: CountingStore, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders, state = PrivateSenders(store), state_of()
    monkeypatch.setattr(private_senders, "READ_S", 0.05)
    async with asyncio.timeout(5.0):
        async with pool.connection() as connection:
            # A lock that every read waits for.
            await connection.execute("begin; lock table private_transactions in access exclusive mode")
            assert not await senders.has_sent(state, ACCOUNT, bytes(32))
            assert store.lists == 1
            assert senders.is_ruled_out(state, ACCOUNT, bytes(32))
            assert not any(await asyncio.gather(*(senders.has_sent(state, ACCOUNT, bytes(32)) for _ in range(100))))
            assert store.lists == 1
            await connection.execute("rollback")
