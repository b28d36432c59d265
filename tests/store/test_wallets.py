"""Wallets and operations in Postgres: no duplicates under concurrency, enforced limits, and reorganisations."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
from typing import Any

import orjson
import pytest

from proxy.chains.evm import operations, user_operation
from proxy.chains.evm.facts import BlockFacts, ChainLog, Header
from proxy.core.paging import Page
from proxy.services.bundler.cleanup import OperationCleanup
from proxy.services.bundler.inclusions import InclusionSink
from proxy.services.wallets import DeploymentSink
from proxy.store.postgres.blocks import BlockId, Followed
from proxy.store.postgres.operations import OperationStore, SentOperation
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.wallets import Deployment, Wallet, WalletStore
from tests.bundler_harness import EP07, OPERATION, SENDER
from tests.service import until
from tests.shipped_tables import TABLES

NOW = datetime.datetime(2026, 1, 15, 9, 30, tzinfo=datetime.UTC)
ACCOUNT, LINEAGE = "acct_1", "key_1"
NETWORK = "dev/mainnet"
FOLLOWED = Followed(NETWORK, 1, 0, None)


@pytest.fixture
async def store(pool: Pool) -> WalletStore:
    async with pool.connection() as connection:
        for account in (ACCOUNT, "acct_2"):
            await connection.execute(
                "insert into accounts (id, name, email, plan) values ($1, 'A', 'a@b', 'free')", account
            )
    return WalletStore(pool)


def wallet(number: int, network: str = NETWORK) -> Wallet:
    return Wallet(
        network=network,
        address=number.to_bytes(20, "big"),
        owner=b"\x01" * 20,
        salt=number,
        version="0.7",
        factory=b"\x02" * 20,
        created_at=NOW,
    )


async def create(store: WalletStore, number: int, **more: Any) -> str:
    options = {"account": ACCOUNT, "lineage": LINEAGE, "most": 1000, "network": NETWORK, **more}
    made = wallet(number, options.pop("network"))
    outcome, found = await store.create(wallet=made, **options)
    assert outcome == "full" or found is not None
    return outcome


async def test_wallet_is_created_once_under_concurrency(store: WalletStore) -> None:
    outcomes = await asyncio.gather(*(create(store, 1) for _ in range(20)))
    assert sorted(outcomes) == ["known"] * 19 + ["new"]
    _, total = await store.page(LINEAGE, Page(1, 25))
    assert total == 1


async def test_account_never_has_more_wallets_than_its_plan_allows(store: WalletStore) -> None:
    tries = (create(store, number, most=5, lineage=f"key_{number % 3}") for number in range(30))
    outcomes = await asyncio.gather(*tries)
    assert sorted(outcomes) == ["full"] * 25 + ["new"] * 5
    assert await create(store, 99, most=5, account="acct_2", lineage="key_9") == "new"


async def test_full_account_still_gets_its_existing_wallets(store: WalletStore) -> None:
    assert await create(store, 1, most=1) == "new"
    assert await create(store, 1, most=1) == "known"
    assert await create(store, 2, most=1) == "full"
    assert await create(store, 1, most=1, network="dev/testnet") == "full"


async def test_concurrent_creation_of_one_wallet_takes_one_place(store: WalletStore, pool: Pool) -> None:
    async with pool.connection() as connection, asyncio.TaskGroup() as group, connection.transaction():
        await connection.execute("select pg_advisory_xact_lock(hashtextextended('wallets of ' || $1, 0))", ACCOUNT)
        tries = [group.create_task(create(store, 1, most=1)) for _ in range(2)]
        waiting = "select count(*) = 2 from pg_locks where locktype = 'advisory' and not granted"
        await until(lambda: connection.fetchval(waiting))
    assert sorted(each.result() for each in tries) == ["known", "new"]


async def test_wallet_belongs_to_its_lineage(store: WalletStore) -> None:
    await create(store, 1)
    assert await create(store, 1, lineage="key_2") == "new"
    assert await store.find("key_3", wallet(1).address) == []
    assert [found.address for found in await store.find("key_2", wallet(1).address)] == [wallet(1).address]
    assert (await store.page("key_3", Page(1, 25)))[1] == 0


async def test_pages_are_ordered_and_have_the_total(store: WalletStore) -> None:
    for number in range(7):
        await create(store, number, network=NETWORK if number % 2 else "dev/testnet")
    whole = [w.address[-1] for page in (1, 2, 3) for w in (await store.page(LINEAGE, Page(page, 3)))[0]]
    assert whole == [6, 5, 4, 3, 2, 1, 0]
    some, total = await store.page(LINEAGE, Page(1, 2), networks=[NETWORK])
    assert ([w.address[-1] for w in some], total) == ([5, 3], 3)
    assert await store.page(LINEAGE, Page(9, 25)) == ([], 7)


# Blocks


def block(number: int, *logs: ChainLog) -> BlockFacts:
    header = Header(hex(number), "0x" + f"{number:064x}", "0x" + f"{number - 1:064x}", hex(1_800_000_000 + number))
    hashed = number.to_bytes(32, "big")
    return BlockFacts(number, number, bytes(32), hashed, 1_800_000_000 + number, header, list(logs), [], 0)


def log(number: int, address: bytes, *topics: str, data: str = "0x") -> ChainLog:
    return ChainLog(
        address="0x" + address.hex(),
        topics=list(topics),
        block_number=hex(number),
        block_hash="0x" + f"{number:064x}",
        transaction_hash="0x" + "dd" * 32,
        log_index="0x0",
        data=data,
    )


def deployment_log(number: int, of: int) -> ChainLog:
    return log(number, wallet(of).address, operations.INITIALIZED, "0x" + "00" * 32, "0x" + "00" * 32)


async def deployed(store: WalletStore, number: int) -> tuple[int | None, datetime.datetime | None]:
    (found,) = await store.find(LINEAGE, wallet(number).address)
    assert (found.deploy_tx is None) == (found.deploy_block is None)
    return found.deploy_block, found.deployed_at


async def test_deployment_is_marked_and_cleared_when_its_block_is_removed(store: WalletStore, pool: Pool) -> None:
    births = DeploymentSink()
    for number in (1, 2):
        await create(store, number)
    async with pool.connection() as connection:
        await births.write(
            connection,
            FOLLOWED,
            [block(10, deployment_log(10, 1)), block(11, deployment_log(11, 2), deployment_log(11, 3))],
        )
        assert await deployed(store, 1) == (10, datetime.datetime.fromtimestamp(1_800_000_010, datetime.UTC))
        assert (await deployed(store, 2))[0] == 11
        await births.undo(connection, FOLLOWED, BlockId(10, bytes(32)), [BlockId(11, bytes(32))])
        assert (await deployed(store, 1))[0] == 10
        assert await deployed(store, 2) == (None, None)
        await births.write(connection, FOLLOWED, [block(11), block(12, deployment_log(12, 2))])
        assert (await deployed(store, 2))[0] == 12
        await births.settle(connection, FOLLOWED, 12)
        await births.forget(connection, FOLLOWED)
        assert await deployed(store, 1) == (None, None)


async def test_block_range_marks_deployments_without_a_time(store: WalletStore, pool: Pool) -> None:
    await create(store, 1)
    await create(store, 1, network="dev/testnet", lineage="key_2")
    piece = dataclasses.replace(block(20, deployment_log(15, 1)), first=10, header=None)
    async with pool.connection() as connection:
        await DeploymentSink().write(connection, FOLLOWED, [piece])
    assert await deployed(store, 1) == (15, None)
    (other,) = await store.find("key_2", wallet(1).address)
    assert other.deploy_tx is None  # on another network


async def test_deployment_is_marked_for_every_lineage(store: WalletStore, pool: Pool) -> None:
    await create(store, 1)
    async with pool.connection() as connection:
        await DeploymentSink().write(connection, FOLLOWED, [block(10, deployment_log(10, 1))])
    assert await create(store, 1, lineage="key_2") == "new"
    (mine,) = await store.find(LINEAGE, wallet(1).address)
    (theirs,) = await store.find("key_2", wallet(1).address)
    assert theirs == dataclasses.replace(mine, created_at=theirs.created_at)
    assert await create(store, 1, network="dev/testnet") == "new"
    assert [found.deploy_block for found in await store.find(LINEAGE, wallet(1).address)] == [10, None]


async def test_follower_clears_deployments_read_from_replaced_blocks(store: WalletStore, pool: Pool) -> None:
    """The read was ahead of the follower, so the follower undoes no block."""
    for number in (1, 2, 3):
        await create(store, number)
        seen = Deployment(wallet(number).address, b"\xdd" * 32, 9 + number, b"\xbb" * 32, NOW)
        await store.mark_deployed(NETWORK, seen)
    async with pool.connection() as connection:
        await DeploymentSink().write(connection, FOLLOWED, [block(10, deployment_log(10, 1)), block(11)])
    assert [(await deployed(store, number))[0] for number in (1, 2, 3)] == [10, None, 12]


async def test_read_clears_only_the_deployment_that_it_saw(store: WalletStore, pool: Pool) -> None:
    """The same transaction may meanwhile be in another block."""
    await create(store, 1)
    async with pool.connection() as connection:
        await DeploymentSink().write(connection, FOLLOWED, [block(10, deployment_log(10, 1))])
        (old,) = await store.find(LINEAGE, wallet(1).address)
        await DeploymentSink().undo(connection, FOLLOWED, BlockId(9, bytes(32)), [BlockId(10, bytes(32))])
        await DeploymentSink().write(connection, FOLLOWED, [block(11, deployment_log(11, 1))])
    await store.unmark_deployed(old)
    (new,) = await store.find(LINEAGE, wallet(1).address)
    assert new.deploy_block == 11
    await store.unmark_deployed(new)
    assert await deployed(store, 1) == (None, None)


# Operations


def event(number: int, name: bytes, *, success: bool = True, by: str = EP07, sender: str = "0x") -> ChainLog:
    topics = (operations.INCLUDED, "0x" + name.hex(), "0x" + sender[2:].lower().rjust(64, "0"), "0x" + "00" * 32)
    data = "0x" + f"{3:064x}{int(success):064x}{2**200:064x}{5:064x}"
    return log(number, bytes.fromhex(by[2:]), *topics, data=data)


def sent(name: bytes, lineage: str = LINEAGE) -> SentOperation:
    operation = user_operation.parse(OPERATION, "0.7")
    return SentOperation(NETWORK, name, lineage, "key_7", bytes.fromhex(EP07[2:]), operation, b'{"nonce":"0x3"}')


async def test_status_of_an_operation_is_stored_per_key(pool: Pool) -> None:
    store, inclusions = OperationStore(pool), InclusionSink(TABLES.chains)
    one, two = b"\x01" * 32, b"\x02" * 32
    for name, lineage in ((one, LINEAGE), (two, LINEAGE), (one, "key_2")):
        await store.record(sent(name, lineage))

    async def statuses(lineage: str) -> dict[bytes, tuple[str, int | None]]:
        return {row["hash"]: (row["status"], row["block"]) for row in await store.list_of(lineage, limit=10)}

    assert await statuses(LINEAGE) == {one: ("seen", None), two: ("seen", None)}
    await store.mark_sent(sent(one))
    await store.mark_refused(sent(two), b'{"code":-32500,"message":"\\u0000"}')
    assert await statuses(LINEAGE) == {one: ("sent", None), two: ("failed", None)}
    assert await statuses("key_2") == {one: ("seen", None)}
    async with pool.connection() as connection:
        forged = event(30, one, by="0x" + "99" * 20)
        await inclusions.write(connection, FOLLOWED, [block(30, forged, event(30, b"\x03" * 32))])
        assert await statuses(LINEAGE) == {one: ("sent", None), two: ("failed", None)}
        await inclusions.write(connection, FOLLOWED, [block(31, event(31, one), event(31, two, success=False))])
        assert await statuses(LINEAGE) == {one: ("included", 31), two: ("failed", 31)}
        assert await statuses("key_2") == {one: ("included", 31)}
        row = await store.read(NETWORK, one)
        assert row is not None
        assert (row["cost_wei"], row["transaction"].hex(), row["nonce"]) == (2**200, "dd" * 32, 3)
        await inclusions.undo(connection, FOLLOWED, BlockId(30, bytes(32)), [BlockId(31, bytes(32))])
        assert await statuses(LINEAGE) == {one: ("sent", None), two: ("sent", None)}
        await inclusions.write(connection, FOLLOWED, [block(31, event(31, one))])
        await inclusions.settle(connection, FOLLOWED, 40)
        await inclusions.forget(connection, FOLLOWED)
    assert await statuses(LINEAGE) == {one: ("sent", None), two: ("sent", None)}
    assert await store.read("dev/testnet", one) is None


async def test_operation_is_replaced_while_another_uses_its_nonce(pool: Pool) -> None:
    store, inclusions = OperationStore(pool), InclusionSink(TABLES.chains)
    one, two = b"\x01" * 32, b"\x02" * 32
    later = dataclasses.replace(sent(b"\x03" * 32).operation, nonce=4)
    await store.record(sent(one))
    await store.record(sent(two))
    await store.mark_sent(sent(two))
    await store.record(dataclasses.replace(sent(b"\x03" * 32), operation=later))

    async def statuses_of() -> list[tuple[str, int | None, bool]]:
        rows = sorted(await store.list_of(LINEAGE, limit=10), key=lambda row: bytes(row["hash"]))
        return [(row["status"], row["block"], row["error"] is not None) for row in rows]

    async with pool.connection() as connection:
        await inclusions.write(connection, FOLLOWED, [block(31, event(31, one, sender=SENDER))])
        assert await statuses_of() == [("included", 31, False), ("failed", 31, True), ("seen", None, False)]
        row = await store.read(NETWORK, two)
        assert row is not None
        assert orjson.loads(row["error"]) == {
            "message": "another operation has used its nonce",
            "user_operation_hash": "0x" + one.hex(),
        }
        await store.record(sent(two))
        assert (await statuses_of())[1] == ("failed", 31, True)
        await inclusions.undo(connection, FOLLOWED, BlockId(30, bytes(32)), [BlockId(31, bytes(32))])
        assert (await statuses_of())[:2] == [("sent", None, False)] * 2


async def test_refusal_is_stored_although_another_operation_used_the_nonce(pool: Pool) -> None:
    store, inclusions = OperationStore(pool), InclusionSink(TABLES.chains)
    one, two = b"\x01" * 32, b"\x02" * 32
    for name in (one, two):
        await store.record(sent(name))
    async with pool.connection() as connection:
        await inclusions.write(connection, FOLLOWED, [block(31, event(31, one, success=False, sender=SENDER))])
    for name in (one, two):
        await store.mark_refused(sent(name), b'{"code":-32500}')
    rows = {row["hash"]: (row["status"], row["block"], row["error"]) for row in await store.list_of(LINEAGE, limit=10)}
    assert rows == {one: ("failed", 31, None), two: ("failed", None, '{"code":-32500}')}


async def test_old_operations_are_deleted_and_unsent_ones_sooner(pool: Pool) -> None:
    store = OperationStore(pool)
    names = {name: bytes([index]) * 32 for index, name in enumerate(("seen", "refused", "sent", "included"))}
    for name in names.values():
        await store.record(sent(name))
    await store.mark_refused(sent(names["refused"]), b"{}")
    await store.mark_sent(sent(names["sent"]))

    async def left(days: int) -> list[str]:
        async with pool.connection() as connection:
            await inclusions.write(connection, FOLLOWED, [block(31, event(31, names["included"]))])
            await connection.execute("update operations set changed_at = now() - make_interval(days => $1)", days)
        while await OperationCleanup(store, keep_days=90, keep_unsent_days=7).purge():
            pass
        rows = await store.list_of(LINEAGE, limit=10)
        return sorted(name for name, hashed in names.items() if hashed in [row["hash"] for row in rows])

    inclusions = InclusionSink(TABLES.chains)
    assert await left(6) == ["included", "refused", "seen", "sent"]
    assert await left(8) == ["included", "sent"]
    assert await left(91) == []


async def test_old_operations_are_deleted_in_batches(pool: Pool) -> None:
    store = OperationStore(pool)
    for index in range(5):
        await store.record(sent(bytes([index]) * 32))
    async with pool.connection() as connection:
        await connection.execute("update operations set changed_at = now() - interval '99 days', status = 'sent'")
    bites = [await store.purge(keep_days=90, keep_unsent_days=7, at_once=2) for _ in range(3)]
    assert bites == [True, True, False]
    assert await store.list_of(LINEAGE, limit=10) == []


@pytest.mark.parametrize(
    "odd",
    [
        log(1, b"\x01" * 20, operations.INCLUDED),
        log(1, b"\x01" * 20, operations.INCLUDED, "0x", "0x", "0x", data="0x" + "00" * 128),
        log(1, b"\x01" * 20, operations.INCLUDED, *["0x" + "ff" * 32] * 3, data="0x" + "00" * 128),
        log(1, b"\x01" * 20, operations.INCLUDED, *["0x" + "00" * 32] * 3, data="0x" + "00" * 127),
        log(1, b"\x01" * 20, operations.INCLUDED, *["0x" + "00" * 32] * 3, data="zz"),
        log(1, b"\x01" * 20),
    ],
)
def test_malformed_log_is_not_an_event(odd: ChainLog) -> None:
    assert operations.included(odd) is None
    assert operations.born(odd) is None
