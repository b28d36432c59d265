"""The cases that crashes are explored in: what is there before, the work of the process that dies, and the end."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from proxy.compose.background import Background
from proxy.core.usage import BUCKETS, UsageSums
from proxy.services.follower.network_follower import NetworkFollower
from proxy.services.follower.sinks import StaleRead
from proxy.services.sponsor.policies import read_rules
from proxy.services.sponsor.settlement import SettlementLoop, coin_of
from proxy.settings import load
from proxy.store.postgres.blocks import BlockStore, LeaderSession
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.ledger import LandedOperation, LedgerStore, ReserveRequest
from proxy.store.postgres.policies import Policy, PolicyStore
from proxy.store.postgres.usage import UsageStore
from proxy.store.postgres.usage_spool import UsageSpool
from tests.chain_upstream import LittleChain, erc721
from tests.database import pooled
from tests.delivery.harness import DeliveryHarness, Inbox, inbox
from tests.follower.event_harness import ART, A, B, C, EventHarness
from tests.follower.harness import FollowerHarness, follower_harness, settings_of
from tests.service import until
from tests.shipped_tables import TABLES
from tests.simulation.crash_points import Work
from tests.store.test_ledger_machine import ENTRY_POINT as EVM_ENTRY_POINT
from tests.store.test_ledger_machine import PAYER, SENDERS, Landed
from tests.store.test_settling import AFTER, ShortMemory, want

# Small pools: fewer connections are opened, so that more of the writes are statements.
POOL = 2


@dataclass(frozen=True, slots=True)
class Explored:
    """One run of a case. `check` compares the end with the model."""

    work: Work
    check: Callable[[], Awaitable[None]]


Case = Callable[[str], AbstractAsyncContextManager[Explored]]


# Webhooks: every event is delivered at least once, and its delivery ends

EVENTS = 6
# A claim of a process that died is free again after this time.
LEASE_S = 1.0


async def deliver(url: str) -> None:
    """Deliver until nothing is left."""
    async with pooled(url, size=4) as pool:
        harness = DeliveryHarness(pool, Inbox())
        async with harness.delivering(lease_s=LEASE_S, timeout_s=0.5):
            await until(partial(_is_delivered, harness), every_s=0.2)


async def _is_delivered(harness: DeliveryHarness) -> bool:
    return not await harness.rows("select 1 from deliveries where state <> 'delivered' limit 1")


@asynccontextmanager
async def webhooks(url: str) -> AsyncIterator[Explored]:
    async with inbox() as received, pooled(url, size=POOL) as pool:
        harness = DeliveryHarness(pool, received)
        webhook = await harness.webhook()
        made = await harness.events(webhook, EVENTS)

        async def check() -> None:
            assert received.ids() == {*made}, "an event was lost or invented"
            assert await harness.are_all(webhook, "delivered")
            # The process that died had sent some of them. Each process sends an event once.
            assert len(received.posts) <= 2 * len(made)

        yield Explored(partial(deliver, url), check)


# Usage: counted exactly once

BATCHES, REQUESTS = 4, 3


async def send_usage(url: str, directory: Path) -> None:
    async with pooled(url, size=POOL) as pool:
        spool = UsageSpool(UsageStore(pool), directory)
        await spool.send()
        await spool.close()
        await UsageStore(pool).sum_up(0.0)


@asynccontextmanager
async def usage(url: str) -> AsyncIterator[Explored]:
    with tempfile.TemporaryDirectory(prefix="penstock-") as place:
        directory = Path(place) / "usage"
        async with pooled(url, size=POOL) as pool:
            spool = UsageSpool(UsageStore(pool), directory)
            for number in range(BATCHES):
                sums = UsageSums(REQUESTS, 0, 2 * REQUESTS, 0, [REQUESTS] + [0] * (BUCKETS - 1))
                await spool.write(f"worker {number}", 1, {(("acct_1", f"key_{number % 2}", "net/one", "m"), 7): sums})

            async def check() -> None:
                async with pool.connection() as connection:
                    counted = await connection.fetchval(
                        "select coalesce(sum(requests), 0) from usage join usage_series s on s.id = series"
                        " where step = 'minute' and s.key_id <> '' and s.method <> ''"
                    )
                assert counted == BATCHES * REQUESTS, f"{counted} requests were counted"

            yield Explored(partial(send_usage, url, directory), check)


# Gas policies: never above the limit, and every operation that landed is paid

DOLLAR = 10**12
LIMIT, WORST, COST = 100 * DOLLAR, 30 * DOLLAR, 20 * DOLLAR
OPERATIONS = 6
NETWORK, ENTRY_POINT, SENDER = "dev/mainnet", b"\x07" * 20, b"\xaa" * 20
AT = datetime.datetime(2026, 1, 15, 12, tzinfo=datetime.UTC)
# A coin of a hundred smallest units that costs a thousand dollars.
COIN, PRICE = 100, 1000 * DOLLAR


def _request(policy: Policy, nonce: int) -> ReserveRequest:
    name, now = nonce.to_bytes(32, "big"), int(AT.timestamp())
    return ReserveRequest(
        policy=policy.id,
        revision=policy.revision,
        network=NETWORK,
        entry_point=ENTRY_POINT,
        sender=SENDER,
        nonce=nonce,
        digest=name,
        op_hash=name,
        data=b"signed",
        worst=WORST,
        price=PRICE,
        valid_until=now + 270,
        fresh_until=now + 50,
        block=10,
        at=AT,
    )


async def sponsor(url: str, policy: Policy) -> None:
    """Reserve for one operation and then for several at once, of which some are refused. The first one lands."""
    async with pooled(url, size=POOL) as pool:
        ledger = LedgerStore(pool)
        await ledger.reserve(_request(policy, 0))
        await asyncio.gather(*[ledger.reserve(_request(policy, nonce)) for nonce in range(1, OPERATIONS)])
        landed = LandedOperation(
            ENTRY_POINT, SENDER, 0, (0).to_bytes(32, "big"), COST * COIN // PRICE, 11, b"\x0b" * 32, b"\x0c" * 32
        )
        await ledger.settle(NETWORK, landed, coin=COIN)


@asynccontextmanager
async def sponsorship(url: str) -> AsyncIterator[Explored]:
    async with pooled(url, size=POOL) as pool:
        keys = KeyStore(pool, pepper="p" * 32, plans={"free": 10})
        account = str((await keys.create_account(name="Gas", email="a@b", plan="free"))["id"])
        given = {"max_total_usd": str(LIMIT // DOLLAR)}
        policy = await PolicyStore(pool).create(
            account=account, network=NETWORK, live=True, name="Gas", given=given, rules=read_rules(given), most=10
        )

        async def check() -> None:
            total = await LedgerStore(pool).total(policy.id, AT.date())
            assert total.reserved + total.spent <= LIMIT, repr(total)
            # Three of them fit. What the first one did not cost stays reserved until its block is final.
            assert (total.spent, total.reserved, total.operations) == (COST, 3 * WORST - COST, 3), repr(total)

        yield Explored(partial(sponsor, url, policy), check)


# Settlement: every reservation ends, and costs what the final blocks say

LANDED, DROPPED, UNUSED = range(3)
SETTLED = DOLLAR // 4


async def settle_all(url: str) -> None:
    """Settle until nothing is left. Each look comes a minute after the one before: claims of a process that died have ended."""
    chain, minutes = ShortMemory(), itertools.count()
    chain.grow(3, Landed(LANDED.to_bytes(32, "big"), SENDERS[0], LANDED, SETTLED))
    async with pooled(url, size=POOL) as pool:
        ledger = LedgerStore(pool)
        loop = SettlementLoop(
            ledger,
            [chain],
            {chain.network.id: {PAYER}},
            now=lambda: AFTER + datetime.timedelta(minutes=next(minutes)),
        )
        while await ledger.unsettled_networks():
            await loop.look()


@asynccontextmanager
async def settlement(url: str) -> AsyncIterator[Explored]:
    """One operation lands, one did in a block that was dropped, and one never does."""
    async with pooled(url, size=POOL) as pool:
        keys, ledger, network = (
            KeyStore(pool, pepper="p" * 32, plans={"free": 10}),
            LedgerStore(pool),
            ShortMemory.network,
        )
        account = str((await keys.create_account(name="Gas", email="a@b", plan="free"))["id"])
        policy = await PolicyStore(pool).create(
            account=account, network=network.id, live=True, name="Gas", given={}, rules=read_rules({}), most=10
        )
        for nonce in (LANDED, DROPPED, UNUSED):
            assert (await ledger.reserve(want(policy, nonce))).kind == "granted"
        name = DROPPED.to_bytes(32, "big")
        gone = LandedOperation(EVM_ENTRY_POINT, SENDERS[0], DROPPED, name, SETTLED, 1, b"\x0d" * 32, name)
        assert await ledger.settle(network.id, gone, coin=coin_of(network)) is not None

        async def check() -> None:
            total = await ledger.total(policy.id, AFTER.date())
            assert (total.reserved, total.spent, total.operations) == (0, SETTLED, 1), repr(total)

        yield Explored(partial(settle_all, url), check)


# Reorganisations: delivered events of blocks that were dropped are corrected once, and the index is that of the chain

KEPT, MOVED, UNSENT, NEW = 1, 2, 3, 4


async def follow(database: str, upstream: str, tip: int) -> None:
    """Follow the chain up to this block."""
    running = Background(load(environ={}, overrides=settings_of(database, [upstream])), TABLES)
    running.blocks = BlockStore(running.pool, silent_s=LEASE_S)
    await running.open()
    try:
        harness = FollowerHarness(database, LittleChain(), [], running)
        async with harness.leading(running.events(harness.route).sink) as (follower, term):
            await until(partial(_reaches, follower, term, tip), every_s=0.02)
    finally:
        await running.close()


async def _reaches(follower: NetworkFollower, term: LeaderSession, tip: int) -> bool:
    try:
        await follower.step(term)
    except StaleRead:
        return False
    return follower.cursor.number >= tip


@asynccontextmanager
async def reorganisation(url: str) -> AsyncIterator[Explored]:
    """A transfer stays where it was, one moves to another block after it was delivered, and one is dropped before."""
    async with follower_harness(url) as harness:
        events, chain = harness.running.events(harness.route), harness.chain
        async with harness.leading(events.sink) as (follower, term):
            before = EventHarness(harness, events, follower, term)
            await before.step()
            await before.webhook("nft_transfer", contracts=["0x" + ART.hex()])
            await before.mine([erc721(ART, A, B, KEPT)], [erc721(ART, A, B, MOVED)])
            await before.deliver()
            await before.mine([erc721(ART, A, B, UNSENT)])
        delivered = {int(each["data"]["token_id"]): each["id"] for each in await before.bodies("delivered")}
        chain.drop(2)
        chain.mine([], [erc721(ART, A, C, MOVED)], [erc721(ART, A, B, NEW)])

        async def check() -> None:
            assert await harness.is_complete(), "the index is not that of the chain"
            found = await before.bodies()
            corrected = [each["data"]["takes_back"] for each in found if each["event_type"] == "correction"]
            assert corrected == [delivered[MOVED]], f"corrected {corrected} of {delivered}"
            events = [
                (int(each["data"]["token_id"]), each["data"]["to"].lower()) for each in found if "to" in each["data"]
            ]
            assert sorted(events) == [(MOVED, "0x" + C.hex()), (NEW, "0x" + B.hex())]

        yield Explored(partial(follow, url, harness.upstream.url, chain.head), check)


CASES: dict[str, Case] = {
    "webhooks": webhooks,
    "usage": usage,
    "sponsorship": sponsorship,
    "settlement": settlement,
    "reorganisation": reorganisation,
}
