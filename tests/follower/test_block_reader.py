"""Replies that the reader rejects: logs of other blocks, missing logs, and malformed data."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.services.follower.block_reader import EMPTY_RETRIES, ReadFailed
from tests.chain_upstream import ZERO, Event, LittleChain, erc20
from tests.follower.harness import COIN, A, FollowerHarness, everything, follower_harness
from tests.rpc_upstreams import Refused


async def test_logs_of_another_block_are_rejected(database: str) -> None:
    async with follower_harness(database) as harness, harness.leading() as (follower, term):
        harness.chain.mine(*everything())
        other = harness.chain.blocks[1].logs()
        harness.upstream.answers["eth_getLogs"] = lambda _: other
        with pytest.raises(ReadFailed):
            await follower.step(term)
        assert await harness.indexed() == {}
        del harness.upstream.answers["eth_getLogs"]
        await follower.step(term)
        assert await harness.is_complete()


@pytest.mark.parametrize("answer", [None, "0x1", [], {"number": "zz"}, {"hash": 1}, [{"address": 1}]])
async def test_malformed_reply_is_rejected(database: str, answer: object) -> None:
    async with follower_harness(database) as harness, harness.leading() as (follower, term):
        harness.chain.mine(*everything())
        for method in ("eth_getBlockByNumber", "eth_getLogs"):
            if method == "eth_getLogs" and answer == []:
                continue  # a valid reply, covered by the next test
            harness.upstream.answers[method] = lambda _: answer
            with pytest.raises(ReadFailed):
                await follower.step(term)
            del harness.upstream.answers[method]
        await follower.step(term)
        assert await harness.is_complete()


async def test_empty_logs_that_contradict_the_bloom_filter_are_fetched_again(database: str) -> None:
    async with follower_harness(database) as harness, harness.leading() as (follower, term):
        harness.chain.mine([erc20(COIN, ZERO, A, 5)])
        whole = harness.chain.blocks[1].logs()
        replies = iter([[], whole])
        harness.upstream.answers["eth_getLogs"] = lambda params: next(replies)
        await follower.step(term)
        assert await harness.is_complete()


async def test_logs_are_read_from_receipts_if_the_upstream_has_not_indexed_the_block(database: str) -> None:
    async with follower_harness(database) as harness, harness.leading() as (follower, term):
        harness.chain.mine(
            [erc20(COIN, ZERO, A, 5), Event(COIN, ("0x" + "ab" * 32,))], [Event(COIN, ("0x" + "ab" * 32,))]
        )
        harness.upstream.answers["eth_getLogs"] = lambda params: []
        await follower.step(term)
        assert await harness.is_complete()
        assert await harness.indexed() == {(A, COIN): 5}


async def test_receipts_of_another_block_are_rejected(database: str) -> None:
    async with follower_harness(database) as harness, harness.leading() as (follower, term):
        harness.chain.mine([erc20(COIN, ZERO, A, 5)])
        harness.upstream.answers["eth_getLogs"] = lambda params: []
        harness.upstream.answers["eth_getBlockReceipts"] = lambda params: [{"blockHash": "0x" + "7" * 64, "logs": []}]
        with pytest.raises(ReadFailed, match="another block"):
            await follower.step(term)
        assert (await harness.cursor() or (0,))[0] == 0


def refuse_receipts(harness: FollowerHarness) -> None:
    def refused(_: object) -> object:
        raise Refused(-32601, "the method eth_getBlockReceipts does not exist/is not available")

    harness.upstream.answers["eth_getBlockReceipts"] = refused


async def test_empty_logs_without_receipts_are_retried_until_logs_come(database: str) -> None:
    async with follower_harness(database) as harness, harness.leading() as (follower, term):
        harness.chain.mine([erc20(COIN, ZERO, A, 5)])
        refuse_receipts(harness)
        harness.upstream.answers["eth_getLogs"] = lambda params: []
        for _ in range(EMPTY_RETRIES):
            with pytest.raises(ReadFailed, match="bloom"):
                await follower.step(term)
        assert await harness.indexed() == {}
        del harness.upstream.answers["eth_getLogs"]
        await follower.step(term)
        assert await harness.is_complete()


async def test_empty_logs_without_receipts_are_accepted_after_some_retries(database: str) -> None:
    """A bloom filter may be wrong."""
    async with follower_harness(database) as harness, harness.leading() as (follower, term):
        harness.chain.mine([Event(COIN, ("0x" + "ab" * 32,))])
        refuse_receipts(harness)
        for _ in range(EMPTY_RETRIES):
            with pytest.raises(ReadFailed, match="bloom"):
                await follower.step(term)
        await follower.step(term)
        assert await harness.is_complete()


@pytest.mark.parametrize("end", [0, -1])
async def test_range_without_the_logs_at_its_end_is_rejected(database: str, end: int) -> None:
    chain = LittleChain()
    chain.mine(*(everything() * 8))
    async with follower_harness(database, chain=chain) as harness, harness.leading(keep=10) as (follower, term):
        upstream = harness.upstream

        def cut(params: list[Any]) -> list[dict[str, Any]]:
            logs = upstream._eth_getLogs(params)
            if "fromBlock" not in params[0]:
                return logs
            return [log for log in logs if log["blockNumber"] != logs[end]["blockNumber"]]

        # The first block has no logs, so the range starts at one that has some.
        await term.begin(1, bytes.fromhex(chain.blocks[0].hash[2:]))
        upstream.answers["eth_getLogs"] = cut
        with pytest.raises(ReadFailed, match="missing"):
            await follower.step(term)
        assert await harness.indexed() == {}
        del upstream.answers["eth_getLogs"]
        await follower.step(term)
        assert await harness.is_complete()
