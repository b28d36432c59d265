"""Verified replies on a real chain: honest ones pass, and no lie of an upstream does."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import orjson
import pytest

from proxy.core.access import Limits
from proxy.core.fleet import seen
from proxy.core.verification import digest_of
from tests.http_client import Reply
from tests.lying_upstream import LyingUpstream, changed, lying_upstreams, truth
from tests.real_harness import ADDRESS, BASE, DEV, RealHarness
from tests.real_nodes import RealNode, hardhat_nodes
from tests.service import node_session, until
from tests.web.worker import running_worker

LIES = int(os.environ.get("RANDOM_LIES", "60"))
PROOF = {"X_Verify": "proof"}
QUORUM = {"X_Verify": "quorum 2/3"}


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[RealNode]]:
    with hardhat_nodes(3) as found:
        yield found


class VerifiedHarness(RealHarness):
    liars: list[LyingUpstream]

    async def verified(self, method: str, params: list[Any], headers: dict[str, str]) -> Reply:
        return await self.call(method, params, **headers)

    def distrusted(self) -> list[str]:
        return [state for state in self.states if state == "distrusted"]


@asynccontextmanager
async def harness_of(nodes: list[RealNode], **sections: Any) -> AsyncIterator[VerifiedHarness]:
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(node_session())
        for node in nodes:
            node.session = session
            await node.follow(BASE)
        liars = await stack.enter_async_context(lying_upstreams([node.url for node in nodes]))
        running = await stack.enter_async_context(running_worker({DEV: [each.url for each in liars]}, **sections))
        harness = VerifiedHarness(running, DEV, nodes, [])
        harness.liars = liars
        await harness.look()
        yield harness


@pytest.fixture
async def harness(nodes: list[RealNode]) -> AsyncIterator[VerifiedHarness]:
    async with harness_of(nodes) as found:
        yield found


@pytest.fixture
async def alone(nodes: list[RealNode]) -> AsyncIterator[VerifiedHarness]:
    async with harness_of(nodes[:1]) as found:
        yield found


def provable(harness: RealHarness) -> list[tuple[str, list[Any]]]:
    head = hex(harness.head)
    return [
        ("eth_getBalance", [ADDRESS, "latest"]),
        ("eth_getBalance", ["0x" + "99" * 20, head]),
        ("eth_getTransactionCount", [ADDRESS, head]),
        ("eth_getCode", [ADDRESS, "latest"]),
        ("eth_getStorageAt", [ADDRESS, "0x0", "latest"]),
        ("eth_getStorageAt", [ADDRESS, "0x7", head]),
        ("eth_getBlockByNumber", ["latest", False]),
        ("eth_getBlockByNumber", [hex(harness.head - 3), True]),
        ("eth_getTransactionByHash", [harness.transaction]),
        ("eth_getTransactionReceipt", [harness.transaction]),
        ("eth_getLogs", [{"fromBlock": hex(harness.head - 6), "toBlock": head}]),
        ("eth_getLogs", [{"fromBlock": hex(harness.head - 6), "address": ADDRESS}]),
    ]


def is_part_of(found: Any, whole: Any) -> bool:
    """Whether every member that was found is that of the truth."""
    if isinstance(found, dict):
        return isinstance(whole, dict) and all(is_part_of(member, whole.get(name)) for name, member in found.items())
    if isinstance(found, list):
        return isinstance(whole, list) and len(found) == len(whole) and all(map(is_part_of, found, whole))
    return bool(found == whole)


async def expected(harness: RealHarness, method: str, params: list[Any]) -> Any:
    return (await harness.nodes[0].reply(method, params))["result"]


async def test_honest_replies_are_proven(harness: VerifiedHarness) -> None:
    for method, params in provable(harness):
        reply = await harness.verified(method, params, PROOF)
        assert reply.status == 200, (method, reply)
        assert reply.headers["x-verified"] == "proof"
        assert is_part_of(reply.json["result"], await expected(harness, method, params)), method


async def test_honest_upstreams_agree(harness: VerifiedHarness) -> None:
    for method, params in [*provable(harness), ("eth_call", [{"to": ADDRESS}, "latest"])]:
        reply = await harness.verified(method, params, QUORUM)
        assert (reply.status, reply.headers.get("x-verified")) == (200, "quorum 2/3"), (method, reply)
        assert reply.json["result"] == await expected(harness, method, params)


async def test_no_random_lie_is_proven(alone: VerifiedHarness) -> None:
    """The only upstream lies in one of the replies that a proof needs."""
    rng = random.Random(7)
    (liar,) = alone.liars
    calls, caught = provable(alone), 0
    for number in range(LIES):
        method, params = rng.choice(calls)
        true = await expected(alone, method, params)
        seen: list[str] = []

        def lie(asked: str, _: list[Any], result: Any, skip: int = rng.randrange(3), seen: list[str] = seen) -> Any:
            if asked == "eth_blockNumber" or seen[:1] == ["done"]:
                return result
            seen.append(asked)
            if len(seen) <= skip:
                return result
            seen.insert(0, "done")
            return changed(result, rng)

        liar.lie = lie
        reply = await alone.verified(method, params, PROOF)
        if reply.status == 200 and "result" in reply.json:
            assert is_part_of(reply.json["result"], true), (number, method, seen)
        else:
            caught += 1
        alone.route.upstreams[0].health.distrusted_until = 0.0
        alone.route.upstreams[0].health.contradictions = 0
        liar.lie = truth
        await alone.look()
    assert caught > LIES / 4


async def test_minority_does_not_get_through_and_is_distrusted(harness: VerifiedHarness) -> None:
    params = [ADDRESS, hex(harness.head - 8)]
    true = await expected(harness, "eth_getBalance", params)
    harness.liars[1].lie = lambda method, _, result: "0x7" if method == "eth_getBalance" else result
    for _ in range(6):
        reply = await harness.verified("eth_getBalance", params, QUORUM)
        assert reply.json["result"] == true
    await until(lambda: harness.distrusted() == ["distrusted"])
    shown = [seen(each.health, 0.0) for each in harness.route.upstreams]
    assert [each["contradicted"] > 0 for each in shown] == [False, True, False]
    digests = (digest_of(b'"0x7"'), digest_of(orjson.dumps(true)))
    assert all(str(digest) in shown[1]["contradiction"] for digest in digests)
    # Two are left: they can still agree, but not three.
    assert (await harness.verified("eth_getBalance", params, {"X_Verify": "quorum 3/3"})).status == 503
    assert (await harness.verified("eth_getBalance", params, {"X_Verify": "quorum 2/2"})).json["result"] == true


async def test_lying_upstream_is_passed_over_by_a_proof(harness: VerifiedHarness) -> None:
    params = [ADDRESS, hex(harness.head - 2)]
    true = await expected(harness, "eth_getBalance", params)

    def lie(method: str, _: list[Any], result: Any) -> Any:
        return {**result, "balance": "0x7"} if method == "eth_getProof" else result

    for liar in harness.liars[:2]:
        liar.lie = lie
    assert (await harness.verified("eth_getBalance", params, PROOF)).json["result"] == true
    harness.liars[2].lie = lie
    reply = await harness.verified("eth_getBalance", params, PROOF)
    assert reply.status == 503
    assert "not verified" in reply.json["error"]["message"]


async def test_calls_that_cannot_be_proven_count_against_no_upstream(harness: VerifiedHarness) -> None:
    unknown = "0x" + "ee" * 32
    for _ in range(4):
        for method, params in (
            ("eth_getTransactionReceipt", [unknown]),
            ("eth_getBalance", [ADDRESS, "pending"]),
            ("eth_getLogs", [{"fromBlock": "0x0", "toBlock": "0xffffff"}]),
            ("eth_getBlockByNumber", ["0xffffff", False]),
            ("eth_getStorageAt", [ADDRESS, "nonsense", "latest"]),
        ):
            assert (await harness.verified(method, params, PROOF)).status == 503, method
    assert harness.states == ["up"] * 3


async def test_upstreams_may_differ_about_blocks_that_are_not_final(harness: VerifiedHarness) -> None:
    harness.liars[1].lie = lambda method, _, result: "0x7" if method == "eth_getBalance" else result
    for _ in range(6):
        reply = await harness.verified("eth_getBalance", [ADDRESS, "latest"], QUORUM)
        assert reply.json["result"] != "0x7"
    assert harness.states == ["up"] * 3


async def test_calls_that_cannot_be_verified_are_paid_for(harness: VerifiedHarness) -> None:
    for place, liar in enumerate(harness.liars):
        liar.lie = lambda method, _, result, place=place: hex(place) if method == "eth_getBalance" else result  # type: ignore[misc]
    harness.worker.add_key("poor", limits=Limits(2, 10_000, 0))
    asked = {**QUORUM, "key": "poor"}
    for _ in range(200):
        if (await harness.verified("eth_getBalance", [ADDRESS, "latest"], asked)).status == 429:
            return
    raise AssertionError("failed verifications were not charged")


async def test_without_agreement_there_is_no_reply(harness: VerifiedHarness) -> None:
    for place, liar in enumerate(harness.liars):
        liar.lie = lambda method, _, result, place=place: hex(place) if method == "eth_getBalance" else result  # type: ignore[misc]
    reply = await harness.verified("eth_getBalance", [ADDRESS, "latest"], QUORUM)
    assert (reply.status, reply.headers.get("retry-after")) == (503, "1")
    assert "fewer than 2 of 3 upstreams agree" in reply.json["error"]["message"]
    assert "x-verified" not in reply.headers


async def test_operator_chooses_methods_to_verify(nodes: list[RealNode]) -> None:
    rules = [{"network": DEV, "methods": ["eth_getBalance"], "by": "quorum 2/2"}]
    async with harness_of(nodes, verify=rules) as harness:
        reply = await harness.call("eth_getBalance", [ADDRESS, "latest"])
        assert reply.headers["x-verified"] == "quorum 2/2"
        assert "x-verified" not in (await harness.call("eth_getCode", [ADDRESS, "latest"])).headers
        batch = await harness.batch(("eth_getBalance", [ADDRESS, "latest"]), ("eth_chainId", []))
        assert batch.json[0]["result"] == reply.json["result"]


async def test_each_item_of_a_batch_is_verified(harness: VerifiedHarness) -> None:
    harness.liars[0].lie = lambda method, _, result: "0x7" if method == "eth_getBalance" else result
    harness.liars[1].lie = lambda method, _, result: "0x8" if method == "eth_getBalance" else result
    calls = (("eth_getBalance", [ADDRESS, "latest"]), ("eth_getCode", [ADDRESS, "latest"]))
    reply = await harness.batch(*calls, **QUORUM)
    assert "not verified" in reply.json[0]["error"]["message"]
    assert reply.json[1]["result"] == await expected(harness, *calls[1])


@pytest.mark.parametrize(
    "value", ["", "yes", "quorum", "quorum 1/3", "quorum 3/2", "quorum 2/99", "proof; x", "Proof", "\x7f"]
)
async def test_unknown_verification_is_named(harness: VerifiedHarness, value: str) -> None:
    reply = await harness.verified("eth_chainId", [], {"X_Verify": value})
    assert reply.status == 400
    if value.isprintable():
        assert "X-Verify must be proof, or quorum K/N" in reply.json["error"]["message"]


async def test_calls_that_cannot_be_verified_are_refused(harness: VerifiedHarness) -> None:
    write = await harness.verified("eth_sendRawTransaction", ["0x00"], QUORUM)
    assert (write.status, "is not a read" in write.json["error"]["message"]) == (400, True)
    no_proof = await harness.verified("eth_gasPrice", [], PROOF)
    assert (no_proof.status, "cannot be verified by proof" in no_proof.json["error"]["message"]) == (400, True)


async def test_verified_call_costs_the_calls_that_it_makes(harness: VerifiedHarness) -> None:
    plain = await harness.call("eth_getBalance", [ADDRESS, "latest"])
    for headers, factor in ((QUORUM, 3), (PROOF, 4)):
        reply = await harness.verified("eth_getBalance", [ADDRESS, "latest"], headers)
        assert int(reply.headers["x-compute-units"]) == factor * int(plain.headers["x-compute-units"])


def test_replies_that_differ_only_in_form_are_equal() -> None:
    one = b'{"a":"0xAB","b":[1,{"c":null}],"size":"0x1"}'
    other = b'{"b":[1,{}],"a":"0xab"}'
    assert digest_of(one) == digest_of(other) != digest_of(b'{"a":"0xac","b":[1,{}]}')
