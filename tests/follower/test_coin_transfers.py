"""Native and internal transfers: kept if settings say so, from transactions, receipts and traces, over reorganisations."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from proxy.core.transfer_history import ERC20, INTERNAL, NATIVE
from proxy.errors import InvalidRequest
from proxy.store.postgres.index_reads import IndexReads
from proxy.store.postgres.transfers import TransferStore
from tests.chain_upstream import Event, LittleChain, coins, inner
from tests.follower.harness import NETWORK, A, B, C, FollowerHarness, everything, follower_harness, indexed_transfers
from tests.follower.test_backfill import fill
from tests.rpc_upstreams import Refused

KINDS = ["native", "internal", "erc20", "erc721", "erc1155"]


def blocks(rng: random.Random, count: int) -> list[list[Event]]:
    """Blocks with coins before, between and after tokens, some of them failed; and empty ones."""
    found = []
    for _ in range(count):
        events = [*rng.choice(everything())] if rng.random() < 0.6 else []
        for _ in range(rng.randrange(4)):
            sender, recipient = rng.sample((A, B, C), k=2)
            amount = rng.choice((1, 10**18, 2**200))
            some = rng.choice((coins, inner))(sender, recipient, amount)
            events.insert(rng.randrange(len(events) + 1), some)
        if rng.random() < 0.2:
            events.append(coins(A, B, 5, failed=True))
        found.append(events)
    return found


@asynccontextmanager
async def keeping(database: str, kinds: list[str] = KINDS, **options: Any) -> AsyncIterator[FollowerHarness]:
    async with follower_harness(database, transfers={NETWORK: kinds}, **options) as harness:
        harness.upstream.has_transactions = True
        yield harness


async def trace(harness: FollowerHarness) -> bool:
    return await harness.running.events(harness.route).tracer.trace()


async def complete(harness: FollowerHarness, category: int) -> tuple[int, int] | None:
    return (await TransferStore(IndexReads(harness.running.pool)).coverage(NETWORK)).get(category)


async def test_coins_of_transactions_and_traces_are_kept(database: str) -> None:
    async with keeping(database) as harness, harness.leading() as (follower, term):
        harness.chain.mine(*blocks(random.Random(1), 30))
        await follower.step(term)
        assert (await complete(harness, NATIVE), await complete(harness, INTERNAL)) == ((0, 30), None)
        assert await trace(harness)
        assert await indexed_transfers(database) == harness.chain.moves()
        assert await complete(harness, INTERNAL) == (0, 30)
        assert await harness.indexed() == harness.chain.holdings()
        assert harness.upstream.count("eth_getLogs") == 0


@pytest.mark.parametrize("seed", range(3))
async def test_coins_follow_the_chain_over_reorganisations(database: str, seed: int) -> None:
    rng = random.Random(seed)
    async with keeping(database) as harness, harness.leading() as (follower, term):
        for _ in range(12):
            harness.chain.drop(rng.randrange(min(6, len(harness.chain.blocks))))
            harness.chain.mine(*blocks(rng, rng.randrange(2, 8)))
            for _ in range(3):
                await follower.step(term)
            if rng.random() < 0.6:
                assert await trace(harness)
        assert await trace(harness)
        assert await indexed_transfers(database) == harness.chain.moves()
        assert await complete(harness, INTERNAL) == await complete(harness, NATIVE) == (0, harness.chain.head)


async def test_receipts_are_read_one_by_one_if_the_upstream_cannot_return_them_together(database: str) -> None:
    def refuse(_: list[Any]) -> Any:
        raise Refused(-32601, "the method eth_getBlockReceipts does not exist")

    async with keeping(database) as harness, harness.leading() as (follower, term):
        chain = harness.chain
        harness.upstream.answers["eth_getBlockReceipts"] = refuse
        harness.upstream.answers["eth_getTransactionReceipt"] = lambda params: next(
            each for block in chain.blocks for each in block.receipts() if each["transactionHash"] == params[0]
        )
        chain.mine([coins(A, B, 7), coins(B, C, 8, failed=True)], everything()[0])
        await follower.step(term)
        assert await trace(harness)
        assert await indexed_transfers(database) == chain.moves()


async def test_block_that_cannot_be_traced_is_not_complete_until_it_is_repaired(database: str) -> None:
    async with keeping(database) as harness, harness.leading(keep=1) as (follower, term):
        harness.chain.mine(*blocks(random.Random(3), 40))
        await follower.step(term)
        bad = harness.chain.blocks[5].hash

        def traced(params: list[Any]) -> Any:
            if params[0] == bad:
                raise Refused(-32000, "missing trie node")
            return harness.upstream._debug_traceBlockByHash(params)

        harness.upstream.answers["debug_traceBlockByHash"] = traced
        assert not await trace(harness)
        assert await complete(harness, INTERNAL) == (6, 40)
        harness.upstream.answers.clear()
        async with harness.running.pool.connection() as connection:
            await connection.execute("delete from trace_jobs")
        await fill(harness, 0)
        assert await complete(harness, INTERNAL) == (0, 40)
        assert await indexed_transfers(database) == harness.chain.moves()


@pytest.mark.parametrize("before", [[], ["erc20"], ["native"], ["erc20", "internal"]])
async def test_category_that_is_added_later_is_backfilled(database: str, before: list[str]) -> None:
    chain = LittleChain()
    chain.mine(*blocks(random.Random(4), 40))
    async with keeping(database, before, chain=chain) as harness, harness.leading(start=20) as (follower, term):
        await follower.step(term)
        assert await trace(harness)
    async with keeping(database, chain=chain) as harness:
        chain.mine(*blocks(random.Random(5), 20))
        async with harness.leading(start=20) as (follower, term):
            await follower.step(term)
            assert await trace(harness)
        await fill(harness, 0)
        assert await indexed_transfers(database) == chain.moves()
        for category in (NATIVE, INTERNAL, ERC20):
            assert await complete(harness, category) == (0, 60)
        assert (await fill(harness, 0)).total == 0


async def test_backfill_of_internal_transfers_says_what_upstreams_lack(database: str) -> None:
    def refuse(_: list[Any]) -> Any:
        raise Refused(-32601, "the method does not exist/is not available")

    async with keeping(database, ["internal"]) as harness:
        harness.chain.mine(*blocks(random.Random(6), 40))
        harness.upstream.answers |= dict.fromkeys(
            ("debug_traceBlockByHash", "trace_block", "debug_traceTransaction"), refuse
        )
        harness.upstream.answers["eth_getBlockByHash"] = lambda params: {"transactions": ["0x" + "77" * 32]}
        async with harness.leading(start=30) as (follower, term):
            await follower.step(term)
        with pytest.raises(InvalidRequest, match=r"cannot be traced.*remove `internal` from follower\.transfers"):
            await fill(harness, 0)
