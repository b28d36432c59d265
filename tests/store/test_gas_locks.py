"""The locks of one account's gas policies never make another account wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from proxy.core.paging import Page
from proxy.services.sponsor.policies import read_rules
from proxy.store.postgres import ledger as ledger_room
from proxy.store.postgres import sql
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.ledger import LedgerStore
from proxy.store.postgres.policies import Policy, PolicyStore
from proxy.store.postgres.pool import DatabaseConnection, Pool
from tests.store.test_ledger import COIN, DOLLAR, NETWORK, event, make, want

RULES = {"max_total_usd": "1000", "rate_limit": {"requests": 100, "per_seconds": 60}}
PAGE = Page(1, 10)
MOST = 900 * DOLLAR
# More than these steps take on a busy machine.
WAITS_S = 40.0
Step = Callable[[DatabaseConnection, Policy], Awaitable[object]]


async def reserve(connection: DatabaseConnection, policy: Policy) -> None:
    """Sponsor an operation, as `LedgerStore.reserve` does."""
    wanted = want(policy, 5, account_most=MOST)
    row = await connection.fetchrow(
        sql.ledger.reserve, wanted.policy, wanted.revision, wanted.network, wanted.entry_point, wanted.sender,
        wanted.nonce, wanted.digest, wanted.op_hash, wanted.data, wanted.worst, wanted.price, wanted.valid_until,
        wanted.fresh_until, wanted.block, wanted.at, wanted.account_most,
    )  # fmt: skip
    assert row is not None
    assert row["outcome"] == "granted"


async def settle_block(connection: DatabaseConnection, policy: Policy) -> None:
    """Write a block with an operation of the account."""
    await reserve(connection, policy)
    wanted = want(policy, 5)
    assert await ledger_room.settle(connection, NETWORK, [event(wanted, 1)], coin=COIN) != [None]


async def begin_to_create(connection: DatabaseConnection, policy: Policy) -> None:
    await connection.execute(sql.policies.lock_policies, policy.account)


async def delete(connection: DatabaseConnection, policy: Policy) -> None:
    assert await connection.fetchval(sql.policies.delete_policy, policy.id, policy.account) == policy.id


@asynccontextmanager
async def unfinished(pool: Pool, step: Step, policy: Policy) -> AsyncIterator[None]:
    """The step's locks are held until the end."""
    async with pool.connection(for_s=2 * WAITS_S) as connection:
        transaction = connection.transaction()
        await transaction.start()
        await step(connection, policy)
        yield
        await transaction.rollback()


@pytest.mark.parametrize("step", [reserve, settle_block, begin_to_create, delete])
async def test_unfinished_step_of_one_account_delays_no_step_of_another(pool: Pool, step: Step) -> None:
    store = KeyStore(pool, pepper="p" * 32, plans={"free": 10})
    accounts = [await store.create_account(name="Gas", email=f"{n}@b", plan="free") for n in range(2)]
    theirs, ours = [await make(pool, str(each["id"]), RULES) for each in accounts]
    policies, ledger = PolicyStore(pool), LedgerStore(pool)
    async with unfinished(pool, step, theirs), asyncio.timeout(WAITS_S):
        # For the same wallet and nonce as theirs.
        assert (await ledger.reserve(want(ours, 5, account_most=MOST))).kind == "granted"
        wanted = want(ours, 5, nonce=1, account_most=MOST)
        assert (await ledger.reserve(wanted)).kind == "granted"
        assert await ledger.settle(NETWORK, event(wanted, 1), coin=COIN) is not None
        changed = await policies.update(ours, name="New", status=None, given=RULES, rules=read_rules(RULES))
        another = await make(pool, ours.account, RULES)
        assert (await policies.list_of(ours.account, live=True, status=None, page=PAGE))[1] == 2
        await policies.delete(another.id, account=ours.account)
        assert (await ledger.reserve(want(changed, 5, nonce=2, account_most=MOST))).kind == "granted"
