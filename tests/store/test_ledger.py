"""The ledger of gas policies: exact under concurrency, and never above a policy's limits."""

from __future__ import annotations

import asyncio
import datetime
import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from proxy.core.paging import Page
from proxy.errors import Forbidden, NotFound
from proxy.services.sponsor.policies import read_rules
from proxy.store.postgres import ledger as ledger_room
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.ledger import LandedOperation, LedgerStore, ReserveOutcome, ReserveRequest
from proxy.store.postgres.policies import Policy, PolicyStore
from proxy.store.postgres.pool import Pool
from tests.database import pooled

NETWORK = "dev/mainnet"
ENTRY_POINT = b"\x07" * 20
ALICE, BOB = b"\xaa" * 20, b"\xbb" * 20
DOLLAR = 10**12
AT = datetime.datetime(2026, 1, 15, 12, tzinfo=datetime.UTC)
NOW = int(AT.timestamp())
# A coin that costs a thousand dollars and has a hundred smallest units.
COIN = 100
PRICE = 1000 * DOLLAR
_serial = itertools.count(1)


@pytest.fixture
def ledger(pool: Pool) -> LedgerStore:
    return LedgerStore(pool)


@pytest.fixture
async def account(pool: Pool) -> str:
    store = KeyStore(pool, pepper="p" * 32, plans={"free": 10})
    return str((await store.create_account(name="Gas", email="a@b", plan="free"))["id"])


async def make(pool: Pool, account: str, rules: Mapping[str, Any] | None = None, *, most: int = 10) -> Policy:
    given = rules or {}
    return await PolicyStore(pool).create(
        account=account, network=NETWORK, live=True, name="Gas", given=given, rules=read_rules(given), most=most
    )


def want(policy: Policy, worst: int, *, sender: bytes = ALICE, nonce: int = 0, **changes: Any) -> ReserveRequest:
    """A request to reserve this many dollars for a unique operation."""
    serial = next(_serial)
    given: dict[str, Any] = {
        "policy": policy.id,
        "revision": policy.revision,
        "network": NETWORK,
        "entry_point": ENTRY_POINT,
        "sender": sender,
        "nonce": nonce,
        "digest": serial.to_bytes(32, "big"),
        "op_hash": serial.to_bytes(32, "big"),
        "data": b"signed %d" % serial,
        "worst": worst * DOLLAR,
        "price": PRICE,
        "valid_until": NOW + 270,
        "fresh_until": NOW + 50,
        "block": 10,
        "at": AT,
    }
    return ReserveRequest(**{**given, **changes})


def event(wanted: ReserveRequest, dollars: int, *, block: int = 11, **changes: Any) -> LandedOperation:
    given: dict[str, Any] = {
        "entry_point": wanted.entry_point,
        "sender": wanted.sender,
        "nonce": wanted.nonce,
        "op_hash": wanted.op_hash,
        "cost_wei": dollars * COIN // 1000,
        "block": block,
        "block_hash": b"h" * 32,
        "transaction": b"t" * 32,
    }
    return LandedOperation(**{**given, **changes})


async def settle(pool: Pool, *events: LandedOperation) -> list[bool]:
    """Settle events and return for each whether a reservation pays for it."""
    async with pool.connection() as connection:
        return [paying is not None for paying in await ledger_room.settle(connection, NETWORK, events, coin=COIN)]


async def reopen_above(pool: Pool, block: int) -> None:
    async with pool.connection() as connection:
        await ledger_room.reopen_above(connection, NETWORK, block)


async def totals(ledger: LedgerStore, policy: Policy) -> tuple[int, int, int]:
    """Return reserved and spent dollars, and the number of operations."""
    found = await ledger.total(policy.id, AT.date())
    return found.reserved // DOLLAR, found.spent // DOLLAR, found.operations


async def test_reservation_is_reported_and_settled_at_its_actual_cost(
    ledger: LedgerStore, pool: Pool, account: str
) -> None:
    policy = await make(pool, account)
    wanted = want(policy, 50)
    assert (await ledger.reserve(wanted)).kind == "granted"
    assert await totals(ledger, policy) == (50, 0, 1)
    assert await settle(pool, event(wanted, 20)) == [True]
    # The rest stays reserved until the block is final.
    assert await totals(ledger, policy) == (30, 20, 1)
    [due] = await ledger.claim_due(NETWORK, final_block=11, final_time=NOW, at=AT)
    await ledger.close(due.id, final_block=11)
    assert await totals(ledger, policy) == (0, 20, 1)


async def test_cost_is_rounded_up_at_the_recorded_price(ledger: LedgerStore, pool: Pool, account: str) -> None:
    policy = await make(pool, account)
    wanted = want(policy, 1, price=333)
    await ledger.reserve(wanted)
    await settle(pool, event(wanted, 0, cost_wei=1))
    assert (await ledger.total(policy.id, AT.date())).spent == 4


async def test_same_operation_gets_the_existing_signature_at_no_extra_cost(
    ledger: LedgerStore, pool: Pool, account: str
) -> None:
    policy = await make(pool, account, {"max_total_usd": "50", "rate_limit": {"requests": 1, "per_seconds": 60}})
    first = want(policy, 50)
    granted = await ledger.reserve(first)
    again = await ledger.reserve(want(policy, 50, digest=first.digest))
    assert again == ReserveOutcome("same", 0, granted.data, granted.worst, granted.valid_until)
    assert await totals(ledger, policy) == (50, 0, 1)


async def test_same_operation_is_signed_again_before_it_expires(ledger: LedgerStore, pool: Pool, account: str) -> None:
    policy = await make(pool, account)
    first = want(policy, 50, valid_until=NOW + 20)
    await ledger.reserve(first)
    again = await ledger.reserve(want(policy, 50, digest=first.digest))
    assert again.kind == "granted"
    assert again.valid_until == NOW + 270
    assert await totals(ledger, policy) == (50, 0, 1)


async def test_changed_operation_with_the_same_nonce_replaces_its_reservation(
    ledger: LedgerStore, pool: Pool, account: str
) -> None:
    policy = await make(pool, account, {"max_total_usd": "60"})
    await ledger.reserve(want(policy, 40))
    assert (await ledger.reserve(want(policy, 55))).kind == "granted"
    assert await totals(ledger, policy) == (55, 0, 1)
    # Either of the two can land: a smaller one does not reduce the reservation.
    assert (await ledger.reserve(want(policy, 10))).kind == "granted"
    assert await totals(ledger, policy) == (55, 0, 1)
    refused = await ledger.reserve(want(policy, 61))
    assert (refused.kind, refused.left) == ("max_total_usd", 5 * DOLLAR)


async def test_signature_that_lands_determines_the_cost(ledger: LedgerStore, pool: Pool, account: str) -> None:
    policy = await make(pool, account)
    small, large = want(policy, 10), want(policy, 40)
    await ledger.reserve(small)
    await ledger.reserve(large)
    await settle(pool, event(small, 10))
    assert await totals(ledger, policy) == (30, 10, 1)


async def test_spent_nonce_is_not_sponsored_again_by_any_policy(ledger: LedgerStore, pool: Pool, account: str) -> None:
    policy, other = await make(pool, account), await make(pool, account)
    wanted = want(policy, 10)
    await ledger.reserve(wanted)
    await settle(pool, event(wanted, 10))
    assert (await ledger.reserve(want(policy, 10))).kind == "used"
    assert (await ledger.reserve(want(other, 10))).kind == "used"
    assert (await ledger.reserve(want(policy, 10, entry_point=b"\x06" * 20))).kind == "granted"


async def test_two_policies_each_pay_for_their_own_signature(ledger: LedgerStore, pool: Pool, account: str) -> None:
    one, other = await make(pool, account), await make(pool, account)
    first, second = want(one, 10), want(other, 10)
    await ledger.reserve(first)
    await ledger.reserve(second)
    assert (await ledger.reserve(want(other, 10, nonce=1, op_hash=first.op_hash))).kind == "twice"
    await settle(pool, event(second, 7 * 10))
    assert await totals(ledger, one) == (10, 0, 1)
    assert (await totals(ledger, other))[1] == 70


async def test_reorganisation_reopens_settled_reservations(ledger: LedgerStore, pool: Pool, account: str) -> None:
    policy = await make(pool, account, {"max_total_usd": "50"})
    wanted = want(policy, 50)
    await ledger.reserve(wanted)
    await settle(pool, event(wanted, 20))
    assert (await ledger.reserve(want(policy, 1, nonce=1))).kind == "max_total_usd"
    await reopen_above(pool, 11)
    assert await totals(ledger, policy) == (30, 20, 1)
    await reopen_above(pool, 10)
    assert await totals(ledger, policy) == (50, 0, 1)
    await settle(pool, event(wanted, 30, block=12))
    assert await totals(ledger, policy) == (20, 30, 1)


async def test_settling_twice_counts_once_and_a_later_block_replaces_an_earlier(
    ledger: LedgerStore, pool: Pool, account: str
) -> None:
    policy = await make(pool, account)
    wanted = want(policy, 50)
    await ledger.reserve(wanted)
    assert await settle(pool, event(wanted, 20), event(wanted, 20), event(wanted, 30, block=12)) == [True] * 3
    assert await totals(ledger, policy) == (20, 30, 1)
    assert await settle(pool, event(wanted, 10, op_hash=b"?" * 32, nonce=1)) == [False]


async def test_replacing_block_replaces_the_cost(ledger: LedgerStore, pool: Pool, account: str) -> None:
    policy = await make(pool, account)
    wanted = want(policy, 50)
    await ledger.reserve(wanted)
    await settle(pool, event(wanted, 20), event(wanted, 30, block_hash=b"i" * 32))
    assert await totals(ledger, policy) == (20, 30, 1)


# Operations that land under an unsigned hash: the hash of entry point 0.8 includes the sender's current delegate

OTHER_HASH = b"?" * 32


async def test_unknown_hash_is_paid_from_the_reservation_of_its_nonce(
    ledger: LedgerStore, pool: Pool, account: str
) -> None:
    policy = await make(pool, account, {"max_total_usd": "50"})
    wanted = want(policy, 50)
    await ledger.reserve(wanted)
    assert await settle(pool, event(wanted, 30, op_hash=OTHER_HASH)) == [True]
    assert await totals(ledger, policy) == (20, 30, 1)
    # Settling again changes nothing; a removed block makes it reserved again.
    assert await settle(pool, event(wanted, 30, op_hash=OTHER_HASH)) == [True]
    await reopen_above(pool, 10)
    assert await totals(ledger, policy) == (50, 0, 1)
    await settle(pool, event(wanted, 30, op_hash=OTHER_HASH))
    [due] = await ledger.claim_due(NETWORK, final_block=11, final_time=NOW, at=AT)
    assert (due.entry_point, due.sender, due.nonce) == (wanted.entry_point, wanted.sender, wanted.nonce)
    assert OTHER_HASH in due.hashes
    await ledger.close(due.id, final_block=11)
    assert await totals(ledger, policy) == (0, 30, 1)
    assert (await ledger.reserve(want(policy, 1))).kind == "used"
    # Nothing was signed for any other nonce.
    others: list[dict[str, Any]] = [{"sender": BOB}, {"nonce": 1}, {"entry_point": b"\x06" * 20}]
    for other in others:
        assert await settle(pool, event(wanted, 30, op_hash=b"!" * 32, **other)) == [False]


async def test_unknown_hash_costs_the_highest_price_up_to_the_reserved_amount(
    ledger: LedgerStore, pool: Pool, account: str
) -> None:
    policy = await make(pool, account)
    await ledger.reserve(want(policy, 50, price=PRICE))
    wanted = want(policy, 60, price=2 * PRICE)
    await ledger.reserve(wanted)
    await ledger.reserve(want(policy, 10, price=PRICE // 2))
    await settle(pool, event(wanted, 20, op_hash=OTHER_HASH))
    assert await totals(ledger, policy) == (20, 40, 1)
    await settle(pool, event(wanted, 50, block=12, op_hash=OTHER_HASH))
    assert await totals(ledger, policy) == (0, 60, 1)


async def test_same_policy_always_pays_for_an_unknown_hash(ledger: LedgerStore, pool: Pool, account: str) -> None:
    small, large, other = [await make(pool, account) for _ in range(3)]
    first, second = want(small, 10), want(large, 40)
    for each in (first, second, want(other, 40)):
        await ledger.reserve(each)
    for block in (11, 12):
        assert await settle(pool, event(first, 10, block=block, op_hash=OTHER_HASH)) == [True]
        assert await totals(ledger, large) == (30, 10, 1)
    assert await totals(ledger, small) == (10, 0, 1)
    assert await totals(ledger, other) == (40, 0, 1)


# The daily sponsorship limit of an account


async def test_daily_limit_of_an_account_covers_all_its_policies(ledger: LedgerStore, pool: Pool, account: str) -> None:
    one, other = await make(pool, account), await make(pool, account)
    most: dict[str, Any] = {"account_most": 100 * DOLLAR}
    first = want(one, 60, **most)
    assert (await ledger.reserve(first)).kind == "granted"
    refused = await ledger.reserve(want(other, 41, **most))
    assert (refused.kind, refused.left) == ("sponsored_usd_per_day", 40 * DOLLAR)
    assert (await ledger.reserve(want(other, 40, sender=BOB, **most))).kind == "granted"
    # A more expensive one with the same nonce takes the difference; the spending of a deleted policy still counts.
    assert (await ledger.reserve(want(one, 61, **most))).kind == "sponsored_usd_per_day"
    await PolicyStore(pool).delete(one.id, account=account)
    assert (await ledger.reserve(want(other, 1, nonce=1, **most))).kind == "sponsored_usd_per_day"
    tomorrow = AT + datetime.timedelta(days=1)
    assert (await ledger.reserve(want(other, 1, nonce=1, at=tomorrow, **most))).kind == "granted"
    # The unused part is released when the block is final.
    await settle(pool, event(first, 20))
    assert (await ledger.reserve(want(other, 40, nonce=2, **most))).kind == "sponsored_usd_per_day"
    [due] = await ledger.claim_due(NETWORK, final_block=11, final_time=NOW, at=AT)
    await ledger.close(due.id, final_block=11)
    assert (await ledger.reserve(want(other, 40, nonce=2, **most))).kind == "granted"


async def test_daily_limit_of_an_account_holds_under_concurrency(database: str, pool: Pool, account: str) -> None:
    policies = [await make(pool, account) for _ in range(5)]
    async with pooled(database, size=8) as one, pooled(database, size=8) as other:
        stores = itertools.cycle([LedgerStore(one), LedgerStore(other)])
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(
                    store.reserve(want(policies[n % 5], 1, nonce=n, account_most=10 * DOLLAR + DOLLAR // 2))
                )
                for n, store in zip(range(100), stores, strict=False)
            ]
    outcomes = Counter(task.result().kind for task in asked)
    assert outcomes == {"granted": 10, "sponsored_usd_per_day": 90}


# Release of unused reservations


async def test_unused_reservation_leaves_nothing_behind(ledger: LedgerStore, pool: Pool, account: str) -> None:
    limit = {"requests": 1, "per_seconds": 60, "scope": "user"}
    policy = await make(pool, account, {"rate_limit": limit})
    senders = [bytes([n]) * 20 for n in range(1, 11)]
    for sender in senders:
        await ledger.reserve(want(policy, 1, sender=sender))
    for due in await ledger.claim_due(NETWORK, final_block=99, final_time=NOW + 271, at=AT):
        await ledger.release(due.id, final_time=NOW + 271)
    later = AT + datetime.timedelta(seconds=60)
    for nonce, sender in enumerate((*senders[:5], ALICE)):
        await ledger.reserve(want(policy, 1, sender=sender, nonce=nonce, at=later))
    async with pool.connection() as connection:
        metered = await connection.fetch("select distinct sender from gas_meters where sender <> ''")
        rated = await connection.fetch("select sender from gas_rates")
    assert {row[0] for row in metered} == {row[0] for row in rated} == {*senders[:5], ALICE}


async def test_expired_reservation_is_released_only_by_a_later_final_block(
    ledger: LedgerStore, pool: Pool, account: str
) -> None:
    policy = await make(pool, account)
    await ledger.reserve(want(policy, 50))
    until = NOW + 270
    assert not await ledger.claim_due(NETWORK, final_block=99, final_time=until, at=AT)
    [due] = await ledger.claim_due(NETWORK, final_block=99, final_time=until + 1, at=AT)
    # Claimed: no other worker gets it for a while.
    assert not await ledger.claim_due(NETWORK, final_block=99, final_time=until + 1, at=AT)
    await ledger.release(due.id, final_time=until)
    assert await totals(ledger, policy) == (50, 0, 1)
    await ledger.release(due.id, final_time=until + 1)
    await ledger.release(due.id, final_time=until + 1)
    assert await totals(ledger, policy) == (0, 0, 0)
    assert (await ledger.reserve(want(policy, 50))).kind == "granted"


async def test_reservation_lasts_as_long_as_its_last_signature(ledger: LedgerStore, pool: Pool, account: str) -> None:
    policy = await make(pool, account)
    await ledger.reserve(want(policy, 50))
    await ledger.reserve(want(policy, 10, valid_until=NOW + 400))
    await ledger.reserve(want(policy, 20, valid_until=NOW + 300))
    assert not await ledger.claim_due(NETWORK, final_block=99, final_time=NOW + 400, at=AT)
    [due] = await ledger.claim_due(NETWORK, final_block=99, final_time=NOW + 401, at=AT)
    assert len(due.hashes) == 3
    await ledger.release(due.id, final_time=NOW + 401)
    assert await totals(ledger, policy) == (0, 0, 0)


async def test_two_hundred_concurrent_requests_with_budget_for_ten_grant_ten(
    database: str, pool: Pool, account: str
) -> None:
    policy = await make(pool, account, {"max_total_usd": "10.9"})
    async with pooled(database, size=8) as one, pooled(database, size=8) as other:
        stores = itertools.cycle([LedgerStore(pool), LedgerStore(one), LedgerStore(other)])
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(store.reserve(want(policy, 1, sender=bytes([n % 50]) * 20, nonce=n)))
                for n, store in zip(range(200), stores, strict=False)
            ]
    outcomes = [task.result().kind for task in asked]
    assert outcomes.count("granted") == 10
    assert outcomes.count("max_total_usd") == 190
    assert await totals(LedgerStore(pool), policy) == (10, 0, 10)


async def test_two_hundred_concurrent_requests_for_one_operation_sign_once(
    ledger: LedgerStore, pool: Pool, account: str
) -> None:
    policy = await make(pool, account)
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(ledger.reserve(want(policy, 1, digest=b"d" * 32))) for _ in range(200)]
    assert len({task.result().data for task in asked}) == 1
    assert await totals(ledger, policy) == (1, 0, 1)


async def test_limits_per_user_are_separate(ledger: LedgerStore, pool: Pool, account: str) -> None:
    policy = await make(pool, account, {"max_per_user_usd": "10", "max_per_user_per_day": 2})
    assert (await ledger.reserve(want(policy, 9))).kind == "granted"
    refused = await ledger.reserve(want(policy, 2, nonce=1))
    assert (refused.kind, refused.left) == ("max_per_user_usd", DOLLAR)
    assert (await ledger.reserve(want(policy, 1, nonce=1))).kind == "granted"
    assert (await ledger.reserve(want(policy, 0, nonce=2))).kind == "max_per_user_per_day"
    assert (await ledger.reserve(want(policy, 10, sender=BOB))).kind == "granted"
    tomorrow = AT + datetime.timedelta(days=1)
    assert (await ledger.reserve(want(policy, 0, nonce=2, at=tomorrow))).kind == "granted"
    assert (await ledger.reserve(want(policy, 1, nonce=3, at=tomorrow))).kind == "max_per_user_usd"


@pytest.mark.parametrize(
    ("reset", "same", "later"),
    [
        ("daily", "2026-01-15T23:59:59", "2026-01-16T00:00:00"),
        ("weekly", "2026-01-18T23:59:59", "2026-01-19T00:00:00"),
        ("monthly", "2026-01-31T23:59:59", "2026-02-01T00:00:00"),
        ("never", "2036-01-15T12:00:00", None),
    ],
)
async def test_total_resets_at_the_end_of_its_period(
    ledger: LedgerStore, pool: Pool, account: str, reset: str, same: str, later: str | None
) -> None:
    policy = await make(pool, account, {"max_total_usd": "10", "reset": reset})
    assert (await ledger.reserve(want(policy, 10))).kind == "granted"
    at = datetime.datetime.fromisoformat(same + "+00:00")
    assert (await ledger.reserve(want(policy, 1, nonce=1, at=at))).kind == "max_total_usd"
    if later is not None:
        at = datetime.datetime.fromisoformat(later + "+00:00")
        assert (await ledger.reserve(want(policy, 10, nonce=1, at=at))).kind == "granted"
        assert (await ledger.reserve(want(policy, 1, nonce=2, at=at))).kind == "max_total_usd"


@pytest.mark.parametrize("scope", ["policy", "user"])
async def test_rate_limit_counts_in_windows(ledger: LedgerStore, pool: Pool, account: str, scope: str) -> None:
    limit = {"requests": 2, "per_seconds": 60, "scope": scope}
    policy = await make(pool, account, {"rate_limit": limit})
    kinds = [(await ledger.reserve(want(policy, 1, nonce=n))).kind for n in range(3)]
    assert kinds == ["granted", "granted", "rate_limit"]
    other = await ledger.reserve(want(policy, 1, sender=BOB))
    assert other.kind == ("granted" if scope == "user" else "rate_limit")
    later = AT + datetime.timedelta(seconds=59, milliseconds=500)
    refused = await ledger.reserve(want(policy, 1, nonce=3, at=later))
    assert (refused.kind, refused.left) == ("rate_limit", 1)
    later = AT + datetime.timedelta(seconds=60)
    assert (await ledger.reserve(want(policy, 1, nonce=3, at=later))).kind == "granted"


async def test_old_policy_revision_is_reported_as_stale(ledger: LedgerStore, pool: Pool, account: str) -> None:
    policies = PolicyStore(pool)
    policy = await make(pool, account)
    given = {"max_total_usd": "5"}
    newer = await policies.update(policy, name=None, status=None, given=given, rules=read_rules(given))
    assert (await ledger.reserve(want(policy, 10))).kind == "stale"
    assert (await ledger.reserve(want(newer, 10))).kind == "max_total_usd"
    await policies.delete(policy.id, account=account)
    assert (await ledger.reserve(want(newer, 1))).kind == "absent"
    with pytest.raises(NotFound):
        await policies.read(policy.id, account=account)


async def test_signature_of_a_deleted_policy_is_still_settled(ledger: LedgerStore, pool: Pool, account: str) -> None:
    policy = await make(pool, account)
    wanted = want(policy, 10)
    await ledger.reserve(wanted)
    await PolicyStore(pool).delete(policy.id, account=account)
    await settle(pool, event(wanted, 10))
    assert await totals(ledger, policy) == (0, 10, 1)


async def test_plan_limits_policies_under_concurrent_creation(pool: Pool, account: str) -> None:
    made = await asyncio.gather(*(make(pool, account, most=3) for _ in range(12)), return_exceptions=True)
    assert sum(isinstance(each, Policy) for each in made) == 3
    assert all(isinstance(each, Policy | Forbidden) for each in made)


async def test_report_lists_days_and_users(ledger: LedgerStore, pool: Pool, account: str) -> None:
    policy = await make(pool, account, {"reset": "daily"})
    tomorrow = AT + datetime.timedelta(days=1)
    first = want(policy, 30)
    await ledger.reserve(first)
    await ledger.reserve(want(policy, 5, nonce=1, at=tomorrow))
    await ledger.reserve(want(policy, 50, sender=BOB, at=tomorrow))
    await settle(pool, event(first, 20))
    days = [(day.day, m.reserved // DOLLAR, m.spent // DOLLAR) for day, m in await ledger.days(policy.id, limit=9)]
    assert days == [(16, 55, 0), (15, 10, 20)]
    users, total = await ledger.users(policy.id, tomorrow.date(), Page(1, 1))
    assert total == 2
    assert [(u.sender, u.meter.reserved // DOLLAR, u.meter.used // DOLLAR, u.operations_today) for u in users] == [
        (BOB, 50, 50, 1)
    ]
    assert (await ledger.total(policy.id, tomorrow.date())).used // DOLLAR == 55
