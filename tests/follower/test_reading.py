"""What of an upstream's answers is believed: logs of other blocks, logs that are said not to be there, and nonsense."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.services.follower.block_reader import DOUBTS, ReadFailed
from tests.chain_upstream import ZERO, Event, LittleChain, erc20
from tests.follower.scene import COIN, A, Scene, everything, scene
from tests.rpc_upstreams import Refused


async def test_logs_of_another_block_are_not_believed(database: str) -> None:
    async with scene(database) as stage, stage.leading() as (following, term):
        stage.chain.mine(*everything())
        other = stage.chain.blocks[1].logs()
        stage.upstream.answers["eth_getLogs"] = lambda _: other
        with pytest.raises(ReadFailed):
            await following.step(term)
        assert await stage.record() == {}
        del stage.upstream.answers["eth_getLogs"]
        await following.step(term)
        assert await stage.is_whole()


@pytest.mark.parametrize("answer", [None, "0x1", [], {"number": "zz"}, {"hash": 1}, [{"address": 1}]])
async def test_nonsense_from_an_upstream_is_no_answer(database: str, answer: object) -> None:
    async with scene(database) as stage, stage.leading() as (following, term):
        stage.chain.mine(*everything())
        for method in ("eth_getBlockByNumber", "eth_getLogs"):
            if method == "eth_getLogs" and answer == []:
                continue  # a good answer; the next test is about it
            stage.upstream.answers[method] = lambda _: answer
            with pytest.raises(ReadFailed):
                await following.step(term)
            del stage.upstream.answers[method]
        await following.step(term)
        assert await stage.is_whole()


async def test_empty_logs_of_a_block_whose_bloom_has_some_are_asked_for_again(database: str) -> None:
    async with scene(database) as stage, stage.leading() as (following, term):
        stage.chain.mine([erc20(COIN, ZERO, A, 5)])
        whole = stage.chain.blocks[1].logs()
        said = iter([[], whole])
        stage.upstream.answers["eth_getLogs"] = lambda params: next(said)
        await following.step(term)
        assert await stage.is_whole()


async def test_receipts_tell_the_logs_of_a_block_that_an_upstream_has_not_indexed(database: str) -> None:
    async with scene(database) as stage, stage.leading() as (following, term):
        stage.chain.mine(
            [erc20(COIN, ZERO, A, 5), Event(COIN, ("0x" + "ab" * 32,))], [Event(COIN, ("0x" + "ab" * 32,))]
        )
        stage.upstream.answers["eth_getLogs"] = lambda params: []
        await following.step(term)
        assert await stage.is_whole()
        assert await stage.record() == {(A, COIN): 5}


async def test_receipts_of_another_block_are_not_believed(database: str) -> None:
    async with scene(database) as stage, stage.leading() as (following, term):
        stage.chain.mine([erc20(COIN, ZERO, A, 5)])
        stage.upstream.answers["eth_getLogs"] = lambda params: []
        stage.upstream.answers["eth_getBlockReceipts"] = lambda params: [{"blockHash": "0x" + "7" * 64, "logs": []}]
        with pytest.raises(ReadFailed, match="another block"):
            await following.step(term)
        assert (await stage.cursor() or (0,))[0] == 0


def refuse_receipts(stage: Scene) -> None:
    def refused(_: object) -> object:
        raise Refused(-32601, "the method eth_getBlockReceipts does not exist/is not available")

    stage.upstream.answers["eth_getBlockReceipts"] = refused


async def test_upstream_without_receipts_that_denies_logs_is_doubted_until_it_has_them(database: str) -> None:
    async with scene(database) as stage, stage.leading() as (following, term):
        stage.chain.mine([erc20(COIN, ZERO, A, 5)])
        refuse_receipts(stage)
        stage.upstream.answers["eth_getLogs"] = lambda params: []
        for _ in range(DOUBTS):
            with pytest.raises(ReadFailed, match="bloom"):
                await following.step(term)
        assert await stage.record() == {}
        del stage.upstream.answers["eth_getLogs"]
        await following.step(term)
        assert await stage.is_whole()


async def test_upstream_without_receipts_that_always_denies_logs_is_believed_in_the_end(database: str) -> None:
    """A bloom filter may be wrong."""
    async with scene(database) as stage, stage.leading() as (following, term):
        stage.chain.mine([Event(COIN, ("0x" + "ab" * 32,))])
        refuse_receipts(stage)
        for _ in range(DOUBTS):
            with pytest.raises(ReadFailed, match="bloom"):
                await following.step(term)
        await following.step(term)
        assert await stage.is_whole()


@pytest.mark.parametrize("end", [0, -1])
async def test_range_without_the_logs_at_its_end_is_not_believed(database: str, end: int) -> None:
    chain = LittleChain()
    chain.mine(*(everything() * 8))
    async with scene(database, chain=chain) as stage, stage.leading(keep=10) as (following, term):
        upstream = stage.upstream

        def cut(params: list[Any]) -> list[dict[str, Any]]:
            logs = upstream._eth_getLogs(params)
            if "fromBlock" not in params[0]:
                return logs
            return [log for log in logs if log["blockNumber"] != logs[end]["blockNumber"]]

        # The first block has no logs: the range begins at one that has.
        await term.begin(1, bytes.fromhex(chain.blocks[0].hash[2:]))
        upstream.answers["eth_getLogs"] = cut
        with pytest.raises(ReadFailed, match="missing"):
            await following.step(term)
        assert await stage.record() == {}
        del upstream.answers["eth_getLogs"]
        await following.step(term)
        assert await stage.is_whole()
