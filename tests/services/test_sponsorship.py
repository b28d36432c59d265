"""Deciding and signing: what is asked of the chain and of the market, and what is refused whatever a policy says."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import AsyncIterator
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.chains.evm import user_operation
from proxy.core.access import Account, Key, Limits
from proxy.errors import Forbidden, NotFound, Unavailable
from proxy.services.gas import GasPrices
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.sponsor import policies as policies_room
from proxy.services.sponsor.costs import SponsorCosts
from proxy.services.sponsor.paymasters import Paymaster, Paymasters, Signer
from proxy.services.sponsor.policies import PolicyService
from proxy.services.sponsor.sponsorship import SponsorService
from proxy.store.keys import KeyStore
from proxy.store.ledger import LedgerStore
from proxy.store.policies import Policy, PolicyStore
from proxy.store.pool import Pool
from tests.database import database, pool, server
from tests.rpc_scene import Scene, scene

__all__ = ("database", "pool", "server")

GWEI = 10**9
NOW = 1_768_469_400.0
PLANS: dict[str, int | None] = {"free": 100 * 10**12, "enterprise": None}
DELEGATES = "0x" + "aa" * 20, "0x" + "bb" * 20
_serial = itertools.count(1)


class Coins:
    async def usd(self, network: Any, contract: str | None = None) -> Any:
        return SimpleNamespace(usd=Decimal(1000))


class Window:
    """Somebody who wants operations paid for, on a network with one upstream: fast is six gwei there."""

    def __init__(self, found: Scene, pool: Pool, account: str) -> None:
        self.scene = found
        self.network = found.route.network
        self.ledger = LedgerStore(pool)
        self.policies = PolicyService(PolicyStore(pool), self.ledger, most={"free": 9})
        self.now = NOW
        limits = Limits(1, 1, 0)
        self.key = Key(
            id="key", lineage="key", digest=b"", slot=0, live=True, scopes=~0, limits=limits, disabled=False,
            dies_at=float("inf"), account=Account(id=account, plan="free", day_limit=0),
        )  # fmt: skip
        points = self.network.chain.entry_points
        payers = [
            Paymaster(
                self.network.id, version, b"\x99" * 20, bytes.fromhex(points[version][2:]), 1, Signer(b"\x07" * 32),
                (60_000, 0), any_fee_wei=GWEI,
            )
            for version in ("0.7", "0.8")
        ]  # fmt: skip
        app = found.worker.app
        internal_calls = InternalCalls(app.rpc, app.networks)
        self.sponsoring = SponsorService(
            self.policies, self.ledger, Paymasters(payers), SponsorCosts(Coins(), GasPrices(internal_calls)), internal_calls,
            most_of_day=PLANS, wall=lambda: self.now,
        )  # fmt: skip

    async def make(self, **rules: Any) -> Policy:
        return await self.policies.create(self.key, self.network, name="x", given=rules)

    async def ask(self, policy: Policy, version: str = "0.7", **changes: Any) -> bytes:
        """What was signed."""
        given = {
            "sender": "0x" + next(_serial).to_bytes(20, "big").hex(),
            "nonce": "0x0",
            "callData": "0x1234",
            **dict.fromkeys(("callGasLimit", "verificationGasLimit", "preVerificationGas"), hex(100_000)),
            **dict.fromkeys(("maxFeePerGas", "maxPriorityFeePerGas"), hex(GWEI)),
        }
        request = self.sponsoring.read(
            self.key,
            self.network,
            {**given, **changes},
            policy_id=policy.id,
            entry_point=self.network.chain.entry_points[version],
        )
        return (await self.sponsoring.sponsor(request)).data

    async def refused(self, policy: Policy, **changes: Any) -> dict[str, Any]:
        with pytest.raises(Forbidden) as caught:
            await self.ask(policy, **changes)
        assert caught.value.details is not None
        return caught.value.details


def history(params: list[Any]) -> dict[str, Any]:
    count, newest = int(params[0], 16), int(params[1], 16)
    return {
        "oldestBlock": hex(newest - count + 1),
        "baseFeePerGas": [hex(4 * GWEI)] * (count + 1),
        "gasUsedRatio": [0.5] * count,
        "reward": [[hex(GWEI)] * 3] * count,
    }


@pytest.fixture
async def window(pool: Pool) -> AsyncIterator[Window]:
    keys = KeyStore(pool, pepper="p" * 32, plans=("free",))
    account = (await keys.create_account(name="x", email="x@example.com", plan="free"))["id"]
    async with scene(1, cache={"enabled": False, "coalesce": False}) as found:
        found.upstreams[0].answers["eth_feeHistory"] = history
        yield Window(found, pool, account)


def until_of(data: bytes) -> int:
    return int.from_bytes(data[:32], "big")


# The operator's money


async def test_fee_above_twice_the_fast_price_is_refused_whatever_the_policy_is(window: Window) -> None:
    policy = await window.make()
    assert await window.ask(policy, maxFeePerGas=hex(12 * GWEI))
    details = await window.refused(policy, maxFeePerGas=hex(12 * GWEI + 1))
    assert details == {"rule": "max_gas_price_gwei", "left": "12"}
    generous = await window.make(max_gas_price_gwei="1000000")
    assert await window.refused(generous, maxFeePerGas=hex(10**6 * GWEI)) == details
    strict = await window.make(max_gas_price_gwei="11")
    assert (await window.refused(strict, maxFeePerGas=hex(12 * GWEI)))["left"] == "11"


async def test_small_fee_is_sponsored_while_gas_prices_are_not_known(window: Window) -> None:
    policy = await window.make()
    window.scene.upstreams[0].answers["eth_feeHistory"] = lambda params: "nonsense"
    assert await window.ask(policy)
    with pytest.raises(Unavailable, match="gas prices"):
        await window.ask(policy, maxFeePerGas=hex(GWEI + 1))


async def test_account_of_a_plan_with_a_limit_is_refused_when_its_day_is_spent(window: Window) -> None:
    # An operation is 360,000 gas: at ten gwei and a thousand dollars, 3.60.
    policies = [await window.make() for _ in range(3)]
    granted = 0
    details: dict[str, Any] = {}
    while not details:
        try:
            await window.ask(policies[granted % 3], maxFeePerGas=hex(10 * GWEI))
            granted += 1
        except Forbidden as refused:
            details = refused.details or {}
    assert granted == 27
    assert details == {"rule": "sponsored_usd_per_day", "left": "2.8"}
    window.now += 86_400
    assert await window.ask(policies[0], maxFeePerGas=hex(10 * GWEI))


# What must be known first


async def test_nothing_is_signed_while_it_is_not_known_how_far_the_chain_is(window: Window) -> None:
    policy = await window.make()
    heads = window.scene.route.heads
    agreed, heads.agreed = heads.agreed, 0
    assert heads.final == -1
    with pytest.raises(Unavailable, match="how far"):
        await window.ask(policy)
    assert (await window.ledger.total(policy.id, datetime.date(2026, 1, 15))).operations == 0
    heads.agreed = agreed
    assert await window.ask(policy)


async def test_delegated_account_is_signed_for_and_known_by_what_it_delegates_to(window: Window, pool: Pool) -> None:
    policy = await window.make()
    delegate = DELEGATES[0]
    window.scene.upstreams[0].answers["eth_getCode"] = lambda params: "0xef0100" + delegate[2:]
    delegated = {"factory": user_operation.MARKER_7702, "sender": "0x" + "51" * 20, "paymasterPostOpGasLimit": "0x0"}
    first = await window.ask(policy, "0.8", **delegated)
    # The paymaster's hash does not cover it: who delegates to another is given the same, and pays under another hash.
    delegate = DELEGATES[1]
    assert await window.ask(policy, "0.8", **delegated) == first
    async with pool.connection() as connection:
        [row] = await connection.fetch("select op_hash from gas_signatures")
    paid = {**delegated, "nonce": "0x0", "callData": "0x1234", "signature": "0x"}
    paid |= dict.fromkeys(("callGasLimit", "verificationGasLimit", "preVerificationGas"), hex(100_000))
    paid |= dict.fromkeys(("maxFeePerGas", "maxPriorityFeePerGas"), hex(GWEI))
    paid |= {"paymaster": "0x" + "99" * 20, "paymasterVerificationGasLimit": hex(60_000), "paymasterData": _hex(first)}
    operation = user_operation.parse(paid, "0.8")
    point = bytes.fromhex(window.network.chain.entry_points["0.8"][2:])
    hashes = [user_operation.hash_of(operation, point, 1, delegate=bytes.fromhex(each[2:])) for each in DELEGATES]
    assert row["op_hash"] == hashes[0] != hashes[1]


# How long


async def test_signature_ends_when_the_policy_does(window: Window) -> None:
    policy = await window.make(ends_at="2026-01-15T09:31:00.5Z", expiry_seconds=200)
    assert until_of(await window.ask(policy)) == NOW + 60
    window.now = NOW + 60.2
    sender = "0x" + "52" * 20
    last = await window.ask(policy, sender=sender)
    assert until_of(last) == NOW + 60
    assert await window.ask(policy, sender=sender) == last
    window.now = NOW + 60.5
    assert (await window.refused(policy))["rule"] == "ends_at"


# Policies in memory


async def test_policies_in_memory_are_bounded_by_the_members_of_their_lists(
    window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies_room, "REMEMBERED_MEMBERS", 100)
    lists = [[f"0x{n:040x}" for n in range(count)] for count in (60, 30, 40, 150)]
    made = [await window.make(sender_denylist=each) for each in lists]
    shown = []
    for policy in made:
        for _ in range(2):
            await window.policies.ready(policy.id, account=window.key.account.id)
        shown.append(repr(window.policies))
    assert shown == [
        "<Policies 1 in memory, 60 members of lists>",
        "<Policies 2 in memory, 90 members of lists>",
        "<Policies 2 in memory, 70 members of lists>",
        "<Policies 1 in memory, 150 members of lists>",
    ]
    await window.policies.ready(made[3].id, account=window.key.account.id, fresh=True)
    await window.policies.delete(made[3].id, account=window.key.account.id)
    assert repr(window.policies) == "<Policies 0 in memory, 0 members of lists>"


async def test_change_of_a_policy_that_was_deleted_meanwhile_finds_none(window: Window) -> None:
    policy = await window.make()
    changed = await window.policies.update(policy, name="new", status=None, changes=None)
    with pytest.raises(Unavailable, match="another request"):
        await window.policies.update(policy, name="newer", status=None, changes=None)
    await window.policies.delete(policy.id, account=policy.account)
    with pytest.raises(NotFound):
        await window.policies.update(changed, name="newest", status=None, changes=None)


def _hex(data: bytes) -> str:
    return "0x" + data.hex()
