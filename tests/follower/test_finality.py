"""Events that wait until their block is deep enough, or is what the chain itself calls safe or finalized."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from proxy.errors import Unavailable
from tests.chain_upstream import erc721
from tests.follower.stage import ART, A, B, C, Stage
from tests.rpc_upstreams import Refused
from tests.service import until


def calls_blocks(stage: Stage, **named: int) -> list[str]:
    """The upstream calls these blocks so, and knows no other words; which of them it was asked for."""
    upstream, asked = stage.scene.upstream, []

    def block(params: list[Any]) -> Any:
        word = params[0]
        if word not in ("safe", "finalized"):
            return upstream._eth_getBlockByNumber(params)
        asked.append(word)
        if word not in named:
            raise Refused(-32602, "invalid argument 0: hex string without 0x prefix")
        return upstream._eth_getBlockByNumber([hex(named[word])])

    upstream.answers["eth_getBlockByNumber"] = block
    return asked


@pytest.mark.parametrize(
    ("config", "depth"),
    [({"confirmations": 1}, 0), ({"confirmations": 3}, 2), ({"finality": "safe"}, 2), ({"finality": "finalized"}, 4)],
)
async def test_event_waits_for_as_many_blocks_as_it_should(stage: Stage, config: dict[str, Any], depth: int) -> None:
    """The network is final after four blocks; its upstreams know no words for it."""
    calls_blocks(stage)
    await stage.webhook("nft_transfer", contracts=["0x" + ART.hex()], **config)
    await stage.mine([erc721(ART, A, B, 1)])
    for _ in range(depth):
        await stage.events.finality.look()
        assert await stage.told() == []
        await stage.mine([])
    await stage.events.finality.look()
    (told,) = await stage.told()
    assert told["data"]["block_number"] == 1
    await stage.mine([], [])
    await stage.events.finality.look()
    assert len(await stage.told()) == 1


async def test_event_waits_for_the_word_of_the_chain_where_there_is_one(stage: Stage) -> None:
    """Blocks are not final when so many others are there, but when the chain says so."""
    for each in ("safe", "finalized"):
        await stage.webhook("nft_transfer", contracts=["0x" + ART.hex()], finality=each)
    calls_blocks(stage, safe=0, finalized=0)
    await stage.mine([erc721(ART, A, B, 1)], [erc721(ART, B, C, 1)], *[[]] * 8)
    await stage.events.finality.look()
    assert await stage.told() == []
    for blocks, told in (({"safe": 1, "finalized": 0}, [1]), ({"safe": 2, "finalized": 1}, [1, 1, 2])):
        calls_blocks(stage, **blocks)
        await stage.mine([])
        await stage.events.finality.look()
        assert sorted(each["data"]["block_number"] for each in await stage.told()) == told


async def test_chain_is_asked_for_its_word_once_for_each_head_and_only_while_somebody_waits(stage: Stage) -> None:
    asked = calls_blocks(stage, safe=0)
    await stage.webhook("nft_transfer", contracts=["0x" + ART.hex()], finality="safe")
    await stage.mine([])
    await stage.events.finality.look()
    assert asked == []
    await stage.mine([erc721(ART, A, B, 1)])
    for _ in range(3):
        await stage.events.finality.look()
    assert asked == ["safe"]
    await stage.mine([])
    await stage.events.finality.look()
    assert asked == ["safe"] * 2


async def test_events_wait_while_upstreams_that_know_the_word_are_in_trouble(stage: Stage) -> None:
    await stage.webhook("nft_transfer", contracts=["0x" + ART.hex()], finality="safe")
    await stage.mine([erc721(ART, A, B, 1)], *[[]] * 8)

    def refuse(_: list[Any]) -> Any:
        raise Refused(-32005, "rate limit exceeded")

    stage.scene.upstream.answers["eth_getBlockByNumber"] = refuse
    with pytest.raises(Unavailable):
        await stage.events.finality.look()
    assert await stage.told() == []
    calls_blocks(stage, safe=1)
    await until(lambda: finds(stage))


async def finds(stage: Stage) -> bool:
    """Upstreams that were in trouble are left alone for a moment."""
    with contextlib.suppress(Unavailable):
        await stage.events.finality.look()
    return len(await stage.told()) == 1


async def test_event_that_waits_and_whose_block_is_dropped_is_never_told(stage: Stage) -> None:
    await stage.webhook("nft_transfer", contracts=["0x" + ART.hex()], confirmations=3)
    await stage.mine([], [erc721(ART, A, B, 1)])
    stage.scene.chain.drop(1)
    await stage.mine([erc721(ART, A, C, 1)], [], [])
    await stage.step()
    (told,) = await stage.told()
    assert told["data"]["to"].lower() == "0x" + C.hex()
