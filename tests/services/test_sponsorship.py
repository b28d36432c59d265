"""SponsorService: its reads of the chain and of prices, and what is refused whatever the policy allows."""

from __future__ import annotations

import asyncio
import datetime
import itertools
from collections.abc import AsyncIterator
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.chains.evm import abi, user_operation
from proxy.chains.evm.address import checksum
from proxy.chains.evm.signer import Signer
from proxy.core.access import Account, Key
from proxy.core.limits import BucketRates
from proxy.core.paging import Page
from proxy.errors import Forbidden, InvalidRequest, NotFound, Unavailable
from proxy.services.gas import GasPrices
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.sponsor import policies as policies_room
from proxy.services.sponsor.account_versions import AccountVersions
from proxy.services.sponsor.costs import SponsorCosts
from proxy.services.sponsor.paymasters import Paymaster, Paymasters
from proxy.services.sponsor.policies import MOST_ENTRIES, PolicyService
from proxy.services.sponsor.sponsorship import SponsorService
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.ledger import LedgerStore
from proxy.store.postgres.policies import Policy, PolicyStore
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.wallets import Wallet, WalletStore
from proxy.turn_queue import TurnQueue
from tests.isolation.loop_steps import LONGEST_STEP_S, LoopSteps
from tests.rpc_harness import RpcHarness, rpc_harness

GWEI = 10**9
NOW = 1_768_469_400.0
PLANS: dict[str, int | None] = {"free": 100 * 10**12, "enterprise": None}
DELEGATES = "0x" + "aa" * 20, "0x" + "bb" * 20
_serial = itertools.count(1)


class FixedCoinPrice:
    async def usd(self, network: Any, contract: str | None = None) -> Any:
        return SimpleNamespace(usd=Decimal(1000))


class Sponsor:
    """A SponsorService on a network with one upstream, on which the fast gas price is six gwei."""

    def __init__(self, harness: RpcHarness, pool: Pool, account: str) -> None:
        self.harness = harness
        self.network = harness.route.network
        self.ledger = LedgerStore(pool)
        self.policies = PolicyService(
            PolicyStore(pool), self.ledger, TurnQueue(asyncio.get_running_loop()), most={"free": 9}
        )
        self.now = NOW
        self.key = Key(
            id="key", lineage="key", digest=b"", live=True, scopes=~0, rate=BucketRates(0, 1, 1), disabled=False,
            expires_at=float("inf"), account=Account(id=account, plan="free", day_limit=0),
        )  # fmt: skip
        points = self.network.chain.entry_points
        payers = [
            Paymaster(
                self.network.id, version, b"\x99" * 20, bytes.fromhex(points[version][2:]), 1, Signer(b"\x07" * 32),
                (60_000, 0), any_fee_wei=GWEI,
            )
            for version in ("0.7", "0.8")
        ]  # fmt: skip
        app = harness.worker.app
        internal_calls = InternalCalls(app.rpc.forwarder, app.networks)
        self.service = SponsorService(
            self.policies, self.ledger, Paymasters(payers),
            AccountVersions(WalletStore(pool), internal_calls, Paymasters(payers), default="0.7"),
            SponsorCosts(FixedCoinPrice(), GasPrices(internal_calls)), internal_calls,
            daily_limits=PLANS, wall=lambda: self.now,
        )  # fmt: skip

    async def make(self, **rules: Any) -> Policy:
        return await self.policies.create(self.key, self.network, name="x", given=rules)

    async def request(self, policy: Policy, version: str = "0.7", **changes: Any) -> bytes:
        """The signed paymaster data."""
        given = {
            "sender": "0x" + next(_serial).to_bytes(20, "big").hex(),
            "nonce": "0x0",
            "callData": "0x1234",
            **dict.fromkeys(("callGasLimit", "verificationGasLimit", "preVerificationGas"), hex(100_000)),
            **dict.fromkeys(("maxFeePerGas", "maxPriorityFeePerGas"), hex(GWEI)),
        }
        request = await self.service.read(
            self.key,
            self.network,
            {**given, **changes},
            policy_id=policy.id,
            entry_point=self.network.chain.entry_points[version],
        )
        return (await self.service.sponsor(request)).data

    async def version(self, **given: Any) -> str:
        """The entry point that a request without one is about."""
        fields = {
            "nonce": "0x0",
            "callData": "0x",
            **dict.fromkeys(("callGasLimit", "verificationGasLimit", "preVerificationGas"), hex(100_000)),
            **dict.fromkeys(("maxFeePerGas", "maxPriorityFeePerGas"), hex(GWEI)),
        }
        request = await self.service.read(
            self.key, self.network, {**fields, **given}, policy_id="gp_1", entry_point=None
        )
        return request.paymaster.version

    async def refused(self, policy: Policy, **changes: Any) -> dict[str, Any]:
        with pytest.raises(Forbidden) as caught:
            await self.request(policy, **changes)
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
async def sponsor(pool: Pool) -> AsyncIterator[Sponsor]:
    keys = KeyStore(pool, pepper="p" * 32, plans={"free": 10})
    account = (await keys.create_account(name="x", email="x@example.com", plan="free"))["id"]
    async with rpc_harness(1, cache={"enabled": False, "coalesce": False}) as harness:
        harness.upstreams[0].answers["eth_feeHistory"] = history
        yield Sponsor(harness, pool, account)


def until_of(data: bytes) -> int:
    return int.from_bytes(data[:32], "big")


def after_of(data: bytes) -> int:
    return int.from_bytes(data[32:64], "big")


# The operator's money


async def test_fee_above_twice_the_fast_price_is_refused_whatever_the_policy_is(sponsor: Sponsor) -> None:
    policy = await sponsor.make()
    assert await sponsor.request(policy, maxFeePerGas=hex(12 * GWEI))
    details = await sponsor.refused(policy, maxFeePerGas=hex(12 * GWEI + 1))
    assert details == {"rule": "max_gas_price_gwei", "left": "12"}
    generous = await sponsor.make(max_gas_price_gwei="1000000")
    assert await sponsor.refused(generous, maxFeePerGas=hex(10**6 * GWEI)) == details
    strict = await sponsor.make(max_gas_price_gwei="11")
    assert (await sponsor.refused(strict, maxFeePerGas=hex(12 * GWEI)))["left"] == "11"


async def test_small_fee_is_sponsored_while_gas_prices_are_unknown(sponsor: Sponsor) -> None:
    policy = await sponsor.make()
    sponsor.harness.upstreams[0].answers["eth_feeHistory"] = lambda params: "nonsense"
    assert await sponsor.request(policy)
    with pytest.raises(Unavailable, match="gas prices"):
        await sponsor.request(policy, maxFeePerGas=hex(GWEI + 1))


async def test_account_is_refused_once_its_plans_daily_limit_is_spent(sponsor: Sponsor) -> None:
    # An operation takes 360,000 gas. At ten gwei and 1,000 USD per coin that costs 3.60 USD.
    policies = [await sponsor.make() for _ in range(3)]
    granted = 0
    details: dict[str, Any] = {}
    while not details:
        try:
            await sponsor.request(policies[granted % 3], maxFeePerGas=hex(10 * GWEI))
            granted += 1
        except Forbidden as refused:
            details = refused.details or {}
    assert granted == 27
    assert details == {"rule": "sponsored_usd_per_day", "left": "2.8"}
    sponsor.now += 86_400
    assert await sponsor.request(policies[0], maxFeePerGas=hex(10 * GWEI))


# Required reads


async def test_nothing_is_signed_while_the_head_of_the_chain_is_unknown(sponsor: Sponsor) -> None:
    policy = await sponsor.make()
    heads = sponsor.harness.route.heads
    agreed, heads.agreed = heads.agreed, 0
    assert heads.final == -1
    with pytest.raises(Unavailable, match="head of"):
        await sponsor.request(policy)
    assert (await sponsor.ledger.total(policy.id, datetime.date(2026, 1, 15))).operations == 0
    heads.agreed = agreed
    assert await sponsor.request(policy)


async def test_recorded_hash_of_a_delegated_account_covers_its_delegate(sponsor: Sponsor, pool: Pool) -> None:
    policy = await sponsor.make()
    delegate = DELEGATES[0]
    sponsor.harness.upstreams[0].answers["eth_getCode"] = lambda params: "0xef0100" + delegate[2:]
    delegated = {"factory": user_operation.MARKER_7702, "sender": "0x" + "51" * 20, "paymasterPostOpGasLimit": "0x0"}
    first = await sponsor.request(policy, "0.8", **delegated)
    # The paymaster's hash does not cover the delegate: after a change of delegate the same signature is returned, although the
    # operation's own hash is another one.
    delegate = DELEGATES[1]
    assert await sponsor.request(policy, "0.8", **delegated) == first
    async with pool.connection() as connection:
        [row] = await connection.fetch("select op_hash from gas_signatures")
    paid = {**delegated, "nonce": "0x0", "callData": "0x1234", "signature": "0x"}
    paid |= dict.fromkeys(("callGasLimit", "verificationGasLimit", "preVerificationGas"), hex(100_000))
    paid |= dict.fromkeys(("maxFeePerGas", "maxPriorityFeePerGas"), hex(GWEI))
    paid |= {"paymaster": "0x" + "99" * 20, "paymasterVerificationGasLimit": hex(60_000), "paymasterData": _hex(first)}
    operation = user_operation.parse(paid, "0.8")
    point = bytes.fromhex(sponsor.network.chain.entry_points["0.8"][2:])
    hashes = [user_operation.hash_of(operation, point, 1, delegate=bytes.fromhex(each[2:])) for each in DELEGATES]
    assert row["op_hash"] == hashes[0] != hashes[1]


# Validity


async def test_signature_ends_when_the_policy_does(sponsor: Sponsor) -> None:
    policy = await sponsor.make(ends_at="2026-01-15T09:31:00.5Z", expiry_seconds=200)
    assert until_of(await sponsor.request(policy)) == NOW + 60
    sponsor.now = NOW + 60.2
    sender = "0x" + "52" * 20
    last = await sponsor.request(policy, sender=sender)
    assert until_of(last) == NOW + 60
    assert await sponsor.request(policy, sender=sender) == last
    sponsor.now = NOW + 60.5
    assert (await sponsor.refused(policy))["rule"] == "ends_at"


# The cache of policies


async def test_cached_policies_are_bounded_by_their_list_entries(
    sponsor: Sponsor, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies_room, "MAX_CACHED_ENTRIES", 250)
    turns, account = TurnQueue(asyncio.get_running_loop()), sponsor.key.account.id
    policies = PolicyService(PolicyStore(pool), sponsor.ledger, turns, most={"free": 9})
    lists = [[f"0x{n:040x}" for n in range(count)] for count in (60, 30, 40, 250)]
    made = [await sponsor.make(sender_denylist=each) for each in lists]
    shown = []
    for policy in made:
        for _ in range(2):
            await policies.effective(policy.id, account=account)
        shown.append(repr(policies))
    assert shown == [
        "<PolicyService <LruCache 1 entries, 110 of 250>>",
        "<PolicyService <LruCache 2 entries, 190 of 250>>",
        "<PolicyService <LruCache 2 entries, 170 of 250>>",
        "<PolicyService <LruCache 2 entries, 170 of 250>>",
    ]
    await policies.effective(made[2].id, account=account, fresh=True)
    for policy in made:
        await policies.delete(policy.id, account=account)
    assert repr(policies) == "<PolicyService <LruCache 0 entries, 0 of 250>>"


async def test_update_of_a_deleted_policy_is_not_found(sponsor: Sponsor) -> None:
    policy = await sponsor.make()
    changed = await sponsor.policies.update(policy, name="new", status=None, changes=None)
    with pytest.raises(Unavailable, match="another request"):
        await sponsor.policies.update(policy, name="newer", status=None, changes=None)
    await sponsor.policies.delete(policy.id, account=policy.account)
    with pytest.raises(NotFound):
        await sponsor.policies.update(changed, name="newest", status=None, changes=None)


def _hex(data: bytes) -> str:
    return "0x" + data.hex()


# The entry point of an account


def sender() -> str:
    return "0x" + next(_serial).to_bytes(20, "big").hex()


@pytest.fixture
def accounts(sponsor: Sponsor) -> dict[str, str]:
    """Entry points by account: what deployed accounts report."""
    found: dict[str, str] = {}

    def entry_point(params: list[Any]) -> str:
        assert params[0]["data"] == "0x" + abi.call("entryPoint()").hex()
        reported = found.get(params[0]["to"])
        return "0x" if reported is None else "0x" + reported[2:].lower().rjust(64, "0")

    sponsor.harness.upstreams[0].answers["eth_call"] = entry_point
    return found


async def recorded(sponsor: Sponsor, pool: Pool, version: str) -> str:
    made = Wallet(
        network=sponsor.network.id,
        address=next(_serial).to_bytes(20, "big"),
        owner=b"\1" * 20,
        salt=next(_serial),
        version=version,
        factory=b"\2" * 20,
        created_at=datetime.datetime.now(datetime.UTC),
    )
    account = sponsor.key.account.id
    await WalletStore(pool).create(account=account, lineage="another", wallet=made, most=1000)
    return "0x" + made.address.hex()


@pytest.mark.parametrize("version", ["0.7", "0.8"])
async def test_entry_point_of_a_wallet_that_was_created_here_is_known(
    sponsor: Sponsor, accounts: dict[str, str], pool: Pool, version: str
) -> None:
    assert await sponsor.version(sender=await recorded(sponsor, pool, version)) == version


@pytest.mark.parametrize("version", ["0.7", "0.8"])
async def test_entry_point_is_that_of_the_factory(sponsor: Sponsor, accounts: dict[str, str], version: str) -> None:
    factory = sponsor.network.chain.factories[version]
    assert await sponsor.version(sender=sender(), factory=factory.lower(), factoryData="0x") == version


@pytest.mark.parametrize("version", ["0.7", "0.8"])
async def test_entry_point_is_the_one_that_the_account_reports(
    sponsor: Sponsor, accounts: dict[str, str], version: str
) -> None:
    name = sender()
    accounts[name] = sponsor.network.chain.entry_points[version]
    assert await sponsor.version(sender=name) == version


async def test_unknown_account_gets_the_default_version(sponsor: Sponsor, accounts: dict[str, str]) -> None:
    unknown = "0x" + "cc" * 20
    for fields in ({}, {"factory": unknown, "factoryData": "0x"}, {"initCode": unknown}, {"initCode": "0x"}):
        assert await sponsor.version(sender=sender(), **fields) == "0.7"


async def test_wallet_of_an_entry_point_without_a_paymaster_is_not_sponsored_by_another(
    sponsor: Sponsor, accounts: dict[str, str], pool: Pool
) -> None:
    wallet = await recorded(sponsor, pool, "0.6")
    with pytest.raises(NotFound, match=r"for entry point 0\.6, only for 0\.7, 0\.8"):
        await sponsor.version(sender=wallet)
    newer = await recorded(sponsor, pool, "0.8")
    assert await sponsor.version(sender=newer, initCode="0x") == "0.8"


# Time


@pytest.mark.parametrize(("age_s", "back_s"), [(0, 30), (12, 30), (31, 32), (7200, 7201)])
async def test_signature_holds_in_the_latest_block_however_old_that_is(
    sponsor: Sponsor, age_s: int, back_s: int
) -> None:
    block = {**sponsor.harness.chain.block(1000), "timestamp": hex(int(NOW) - age_s)}
    sponsor.harness.upstreams[0].answers["eth_getBlockByNumber"] = lambda _: block
    data = await sponsor.request(await sponsor.make(), "0.8")
    assert after_of(data) == NOW - back_s
    assert NOW < until_of(data) <= NOW + 270


async def test_upstream_cannot_extend_a_signature_by_a_block_of_the_future(sponsor: Sponsor) -> None:
    block = {**sponsor.harness.chain.block(1000), "timestamp": hex(int(NOW) + 10**6)}
    sponsor.harness.upstreams[0].answers["eth_getBlockByNumber"] = lambda _: block
    data = await sponsor.request(await sponsor.make(), "0.8")
    assert NOW < until_of(data) <= NOW + 270


# Long lists


def long_rules() -> dict[str, list[str]]:
    """As many addresses as a policy may have, each with its checksum."""
    listed = [checksum(number.to_bytes(20, "big")) for number in range(1 << 150, (1 << 150) + MOST_ENTRIES)]
    return {"sender_allowlist": listed[::2], "sender_denylist": listed[1::2]}


async def test_policy_with_the_longest_lists_is_read_in_short_steps(sponsor: Sponsor) -> None:
    policies, key, rules = sponsor.policies, sponsor.key, long_rules()
    longest_s, listed = list[float](), list[Policy]()
    for _ in range(5):
        checksum.cache_clear()
        with LoopSteps.measured() as steps:
            made = await policies.create(key, sponsor.network, name="long", given=rules)
            await policies.effective(made.id, account=key.account.id, fresh=True)
            listed, _ = await policies.page(key, Page(1, 25), status=None)
            await policies.delete(made.id, account=key.account.id)
        longest_s.append(steps.longest_s)
    assert min(longest_s) < LONGEST_STEP_S
    assert [len(each) for each in listed[0].rules.values()] == [100, 100]


async def test_lists_of_a_policy_are_bounded_together(sponsor: Sponsor) -> None:
    rules = long_rules()
    made = await sponsor.make(sender_allowlist=rules["sender_allowlist"])
    made = await sponsor.policies.update(
        made, name=None, status=None, changes={"sender_denylist": rules["sender_denylist"]}
    )
    with pytest.raises(InvalidRequest, match="20000 entries together"):
        await sponsor.policies.update(made, name=None, status=None, changes={"allowed_methods": ["a()"]})
