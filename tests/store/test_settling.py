"""Final settlement of signed operations: many due at once, unreadable logs, and unknown hashes."""

from __future__ import annotations

import datetime

import pytest

from proxy.chains.evm.facts import BlockFacts
from proxy.services.sponsor.policies import read_rules
from proxy.services.sponsor.settlement import SettlementLoop
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.ledger import CLAIMED_AT_ONCE, LedgerStore, ReserveRequest
from proxy.store.postgres.policies import Policy, PolicyStore
from proxy.store.postgres.pool import Pool
from tests.store.test_ledger_machine import (
    BEGAN,
    DOLLAR,
    ENTRY_POINT,
    FINALITY,
    NETWORK,
    PAYER,
    PRICE,
    SENDERS,
    Block,
    Landed,
    ModelChain,
)

ENDS = BEGAN + 270
AFTER = datetime.datetime.fromtimestamp(ENDS + 60, datetime.UTC)
STRANGER = b"\x77" * 20


class ShortMemory(ModelChain):
    """A node that has pruned the logs of its first blocks."""

    def __init__(self, *, forgotten: int = 0) -> None:
        super().__init__()
        self.forgotten = forgotten
        self.read: list[tuple[int, int]] = []

    async def blocks(self, first: int, last: int) -> BlockFacts:
        self.read.append((first, last))
        if first <= self.forgotten:
            raise ConnectionError("missing trie node")
        return await super().blocks(first, last)

    def grow(self, count: int, *events: Landed) -> None:
        """Mine this many blocks, the first with these events, then enough to make them final after everything has expired."""
        start = len(self.blocks_)
        self.blocks_.append(Block(b"block %d" % start, BEGAN + 1, list(events)))
        for number in range(start + 1, start + count + FINALITY):
            self.blocks_.append(Block(b"block %d" % number, ENDS + 1, []))


@pytest.fixture
def ledger(pool: Pool) -> LedgerStore:
    return LedgerStore(pool)


@pytest.fixture
async def policy(pool: Pool) -> Policy:
    keys = KeyStore(pool, pepper="p" * 32, plans={"free": 10})
    account = (await keys.create_account(name="s", email="s@example.com", plan="free"))["id"]
    return await PolicyStore(pool).create(
        account=account, network=NETWORK.id, live=True, name="s", given={}, rules=read_rules({}), most=9
    )


def want(policy: Policy, nonce: int, *, block: int = 0) -> ReserveRequest:
    return ReserveRequest(
        policy=policy.id,
        revision=policy.revision,
        network=NETWORK.id,
        entry_point=ENTRY_POINT,
        sender=SENDERS[0],
        nonce=nonce,
        digest=nonce.to_bytes(32, "big"),
        op_hash=nonce.to_bytes(32, "big"),
        data=b"signed",
        worst=DOLLAR,
        price=PRICE,
        valid_until=ENDS,
        fresh_until=BEGAN,
        block=block,
        at=datetime.datetime.fromtimestamp(BEGAN, datetime.UTC),
    )


def settling(ledger: LedgerStore, chain: ModelChain, payer: bytes = PAYER) -> SettlementLoop:
    return SettlementLoop(ledger, [chain], {NETWORK.id: {payer}}, now=lambda: AFTER)


async def totals(ledger: LedgerStore, policy: Policy) -> tuple[int, int, int]:
    found = await ledger.total(policy.id, AFTER.date())
    return found.reserved // DOLLAR, found.spent // DOLLAR, found.operations


async def test_one_pass_closes_all_due_reservations(ledger: LedgerStore, policy: Policy) -> None:
    count = 2 * CLAIMED_AT_ONCE + 3
    for nonce in range(count):
        await ledger.reserve(want(policy, nonce))
    chain = ShortMemory()
    # Only the first and the last have landed.
    chain.grow(3, *(Landed(n.to_bytes(32, "big"), SENDERS[0], n, DOLLAR) for n in (0, count - 1)))
    assert await totals(ledger, policy) == (count, 0, count)
    await settling(ledger, chain).look()
    assert await totals(ledger, policy) == (0, 2, 2)


async def test_unreadable_logs_do_not_delay_other_reservations(ledger: LedgerStore, policy: Policy) -> None:
    chain = ShortMemory(forgotten=1)
    chain.grow(40)
    await ledger.reserve(want(policy, 0, block=0))
    for nonce, block in enumerate((35, 36, 37), start=1):
        await ledger.reserve(want(policy, nonce, block=block))
    await settling(ledger, chain).look()
    assert await totals(ledger, policy) == (1, 0, 1)
    # Reservations close to each other are read together, but no read reaches far back for a single one.
    assert (1, chain.final) in chain.read
    assert {first for first, _ in chain.read} <= {1, 36, 37, 38}
    chain.forgotten = 0
    later = SettlementLoop(ledger, [chain], {}, now=lambda: AFTER + datetime.timedelta(seconds=60))
    await later.look()
    assert await totals(ledger, policy) == (0, 0, 0)


@pytest.mark.parametrize(("payer", "spent"), [(PAYER, 1), (STRANGER, 0)])
async def test_unknown_hash_is_closed_at_its_cost_if_the_paymaster_paid(
    ledger: LedgerStore, policy: Policy, payer: bytes, spent: int
) -> None:
    """Without a follower, by final settlement alone."""
    await ledger.reserve(want(policy, 0))
    chain = ShortMemory()
    chain.grow(3, Landed(b"?" * 32, SENDERS[0], 0, DOLLAR))
    await settling(ledger, chain, payer).look()
    assert await totals(ledger, policy) == (0, spent, spent)
