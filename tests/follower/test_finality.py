"""Events wait until their block has enough confirmations, or is safe or finalized."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from proxy.errors import Unavailable
from tests.chain_upstream import erc721
from tests.follower.event_harness import ART, A, B, C, EventHarness
from tests.rpc_upstreams import Refused
from tests.service import until


def tag_blocks(harness: EventHarness, **named: int) -> list[str]:
    """Make the upstream return these blocks for the tags and refuse other tags. Returns the list of requested tags."""
    upstream, requested = harness.inner.upstream, []

    def block(params: list[Any]) -> Any:
        tag = params[0]
        if tag not in ("safe", "finalized"):
            return upstream._eth_getBlockByNumber(params)
        requested.append(tag)
        if tag not in named:
            raise Refused(-32602, "invalid argument 0: hex string without 0x prefix")
        return upstream._eth_getBlockByNumber([hex(named[tag])])

    upstream.answers["eth_getBlockByNumber"] = block
    return requested


@pytest.mark.parametrize(
    ("config", "depth"),
    [({"confirmations": 1}, 0), ({"confirmations": 3}, 2), ({"finality": "safe"}, 2), ({"finality": "finalized"}, 4)],
)
async def test_event_waits_for_the_configured_depth(harness: EventHarness, config: dict[str, Any], depth: int) -> None:
    """The network is final after four blocks, and its upstreams do not support the tags."""
    tag_blocks(harness)
    await harness.webhook("nft_transfer", contracts=["0x" + ART.hex()], **config)
    await harness.mine([erc721(ART, A, B, 1)])
    for _ in range(depth):
        await harness.events.finality.release()
        assert await harness.bodies() == []
        await harness.mine([])
    await harness.events.finality.release()
    (body,) = await harness.bodies()
    assert body["data"]["block_number"] == 1
    await harness.mine([], [])
    await harness.events.finality.release()
    assert len(await harness.bodies()) == 1


async def test_event_waits_for_the_tag_if_the_upstream_supports_it(harness: EventHarness) -> None:
    """The tag decides, not the depth."""
    for each in ("safe", "finalized"):
        await harness.webhook("nft_transfer", contracts=["0x" + ART.hex()], finality=each)
    tag_blocks(harness, safe=0, finalized=0)
    await harness.mine([erc721(ART, A, B, 1)], [erc721(ART, B, C, 1)], *[[]] * 8)
    await harness.events.finality.release()
    assert await harness.bodies() == []
    for blocks, bodies in (({"safe": 1, "finalized": 0}, [1]), ({"safe": 2, "finalized": 1}, [1, 1, 2])):
        tag_blocks(harness, **blocks)
        await harness.mine([])
        await harness.events.finality.release()
        assert sorted(each["data"]["block_number"] for each in await harness.bodies()) == bodies


async def test_tag_is_queried_once_per_head_and_only_while_events_wait(harness: EventHarness) -> None:
    requested = tag_blocks(harness, safe=0)
    await harness.webhook("nft_transfer", contracts=["0x" + ART.hex()], finality="safe")
    await harness.mine([])
    await harness.events.finality.release()
    assert requested == []
    await harness.mine([erc721(ART, A, B, 1)])
    for _ in range(3):
        await harness.events.finality.release()
    assert requested == ["safe"]
    await harness.mine([])
    await harness.events.finality.release()
    assert requested == ["safe"] * 2


async def test_events_wait_while_upstreams_fail(harness: EventHarness) -> None:
    await harness.webhook("nft_transfer", contracts=["0x" + ART.hex()], finality="safe")
    await harness.mine([erc721(ART, A, B, 1)], *[[]] * 8)

    def refuse(_: list[Any]) -> Any:
        raise Refused(-32005, "rate limit exceeded")

    harness.inner.upstream.answers["eth_getBlockByNumber"] = refuse
    with pytest.raises(Unavailable):
        await harness.events.finality.release()
    assert await harness.bodies() == []
    tag_blocks(harness, safe=1)
    await until(lambda: is_released(harness))


async def is_released(harness: EventHarness) -> bool:
    """Failed upstreams are not called for a moment."""
    with contextlib.suppress(Unavailable):
        await harness.events.finality.release()
    return len(await harness.bodies()) == 1


async def test_waiting_event_of_a_dropped_block_is_never_delivered(harness: EventHarness) -> None:
    await harness.webhook("nft_transfer", contracts=["0x" + ART.hex()], confirmations=3)
    await harness.mine([], [erc721(ART, A, B, 1)])
    harness.inner.chain.drop(1)
    await harness.mine([erc721(ART, A, C, 1)], [], [])
    await harness.step()
    (body,) = await harness.bodies()
    assert body["data"]["to"].lower() == "0x" + C.hex()
