"""The latest refusals of a policy: newest first, and bounded under a flood."""

from __future__ import annotations

import datetime

import pytest

from proxy.chains.evm import policy
from proxy.services.sponsor.policies import EVM_FORMATS
from proxy.services.sponsor.refusals import MOST_POLICIES, RefusalLog
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.policies import PolicyStore
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.refusals import MOST_STORED, RefusalStore

SENDER = bytes(20)
BEGAN = datetime.datetime(2026, 1, 15, 9, 30, tzinfo=datetime.UTC)


class Clock:
    def __init__(self) -> None:
        self.now = BEGAN

    def __call__(self) -> datetime.datetime:
        self.now += datetime.timedelta(seconds=1)
        return self.now


@pytest.fixture
async def policy_id(pool: Pool) -> str:
    account = await KeyStore(pool, pepper="p" * 32, plans={"free": 10}).create_account(
        name="a", email="a@b", plan="free"
    )
    made = await PolicyStore(pool).create(
        account=account["id"],
        network="dev/mainnet",
        live=True,
        name="p",
        given={},
        rules=policy.parse({}, EVM_FORMATS),
        most=5,
    )
    return made.id


@pytest.fixture
def refusals(pool: Pool) -> RefusalLog:
    return RefusalLog(RefusalStore(pool), now=Clock())


async def test_latest_refusals_come_first_with_their_rule(refusals: RefusalLog, policy_id: str) -> None:
    refusals.note(policy_id, SENDER, "max_gas_usd", "too dear")
    refusals.note(policy_id, SENDER, "status", "the policy is paused")
    assert await refusals.latest(policy_id, 10) == []
    await refusals.flush()
    found = await refusals.latest(policy_id, 10)
    assert [(each.rule, each.message) for each in found] == [
        ("status", "the policy is paused"),
        ("max_gas_usd", "too dear"),
    ]
    assert [each.sender for each in found] == [SENDER, SENDER]
    assert await refusals.latest("gp_another", 10) == []


async def test_stored_refusals_are_bounded(refusals: RefusalLog, pool: Pool, policy_id: str) -> None:
    for flood in range(3):
        for number in range(MOST_STORED + 30):
            refusals.note(policy_id, SENDER, "status", f"{flood}.{number}")
        await refusals.flush()
    async with pool.connection() as connection:
        assert await connection.fetchval("select count(*) from gas_refusals") == MOST_STORED
    assert (await refusals.latest(policy_id, 1))[0].message == f"2.{MOST_STORED + 29}"


async def test_unwritten_refusals_are_bounded(refusals: RefusalLog) -> None:
    for number in range(MOST_POLICIES + 10):
        refusals.note(f"gp_{number}", SENDER, "status", "no")
    assert f" {MOST_POLICIES} policies" in repr(refusals)
