"""Verified replies on a real chain: honest ones pass, and no lie of an upstream does."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import orjson
import pytest
import rlp

from proxy.chains.evm import block_proofs
from proxy.core.access import Limits
from proxy.core.directives import USUAL
from proxy.core.fleet import seen
from proxy.core.verification import agreed_error, agreed_result, digest_of
from proxy.dev.funded_accounts import FUNDED
from tests.http_client import Reply
from tests.lying_upstream import Lie, LyingUpstream, changed, lying_upstreams, truth
from tests.real_harness import ADDRESS, BASE, DEV, RealHarness
from tests.real_nodes import RealNode, hardhat_nodes
from tests.service import node_session, until
from tests.shipped_tables import TABLES
from tests.web.worker import running_worker

LIES = int(os.environ.get("RANDOM_LIES", "60"))
OPTIONAL = TABLES.chains.families["evm"].volatile
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
async def harness_of(
    nodes: list[RealNode], operators: tuple[str, ...] = ("a", "b", "c"), **sections: Any
) -> AsyncIterator[VerifiedHarness]:
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(node_session())
        for node in nodes:
            node.session = session
            await node.follow(BASE)
        liars = await stack.enter_async_context(lying_upstreams([node.url for node in nodes]))
        given = [{"url": each.url, "operator": by} for each, by in zip(liars, operators, strict=False)]
        running = await stack.enter_async_context(running_worker({DEV: given}, **sections))
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


def in_another_form(_: str, __: list[Any], result: Any) -> Any:
    """The same reply as another client would write it."""
    if isinstance(result, dict):
        members = reversed([(name, in_another_form("", [], value)) for name, value in result.items() if name != "size"])
        return {**dict(members), "author": None}
    if isinstance(result, list):
        return [in_another_form("", [], each) for each in result]
    return "0x" + result[2:].upper() if isinstance(result, str) and result.startswith("0x") else result


async def test_upstreams_that_write_the_same_reply_differently_agree(harness: VerifiedHarness) -> None:
    harness.liars[1].lie = in_another_form
    for method, params in provable(harness):
        reply = await harness.verified(method, params, {"X_Verify": "quorum 3/3"})
        assert (reply.status, reply.headers.get("x-verified")) == (200, "quorum 3/3"), (method, reply)


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
    # Both were asked first or not at all, as they are fast. Those that were are kept with the proven reply.
    suspects = sum(each.health.contradicted_replies for each in harness.route.upstreams)
    assert repr(harness.worker.app.contradictions) == f"<ContradictionLog {suspects} waiting>"
    harness.liars[2].lie = lie
    reply = await harness.verified("eth_getBalance", params, PROOF)
    assert reply.status == 503
    assert "not verified" in reply.json["error"]["message"]


@asynccontextmanager
async def old_block_as_new(harness: VerifiedHarness, liars: int) -> AsyncIterator[str]:
    """These upstreams have an old block under a new number, which is yielded."""
    node, number = harness.nodes[0], hex(harness.head + 1)
    forged = {**await node.ask("eth_getBlockByNumber", hex(harness.head - 5), False), "number": number}
    forged["hash"] = header_hash(forged)
    old = await node.ask("eth_getProof", ADDRESS, [], hex(harness.head - 5))

    def lie(method: str, params: list[Any], result: Any) -> Any:
        if method == "eth_blockNumber":
            return number
        if method == "eth_getBlockByNumber":
            return forged if params[0] in ("latest", number) else result
        return old if method == "eth_getProof" else result

    for liar in harness.liars[:liars]:
        liar.lie = lie
    await harness.look()
    yield number


async def test_block_that_no_other_upstream_has_proves_nothing(harness: VerifiedHarness) -> None:
    """With X-Min-Block, only the liar has the block that the request needs."""
    async with old_block_as_new(harness, 1) as number:
        headers = {**PROOF, "X_Min_Block": number, "X_Min_Block_Wait": "0.05"}
        reply = await harness.verified("eth_getBalance", [ADDRESS, "latest"], headers)
        assert reply.status == 503, reply.json
        true = await expected(harness, "eth_getBalance", [ADDRESS, hex(harness.head)])
        assert (await harness.verified("eth_getBalance", [ADDRESS, "latest"], PROOF)).json["result"] == true


async def test_upstreams_of_one_operator_do_not_confirm_their_block(nodes: list[RealNode]) -> None:
    """Two liars of one operator, while the upstream of the other one is behind their block."""
    async with harness_of(nodes, ("a", "a", "b")) as harness, old_block_as_new(harness, 2) as number:
        true = await expected(harness, "eth_getBalance", [ADDRESS, hex(harness.head)])
        for _ in range(5):
            headers = {**PROOF, "X_Min_Block": number, "X_Min_Block_Wait": "0.05"}
            assert (await harness.verified("eth_getBalance", [ADDRESS, "latest"], headers)).status == 503
            reply = await harness.verified("eth_getBalance", [ADDRESS, "latest"], PROOF)
            assert reply.status == 503 or reply.json["result"] == true


async def test_no_upstream_alone_says_which_block_a_tag_means(harness: VerifiedHarness) -> None:
    old = await harness.nodes[0].ask("eth_getBlockByNumber", hex(harness.head - 5), True)

    def lie(method: str, params: list[Any], result: Any) -> Any:
        is_tag = method == "eth_getBlockByNumber" and not params[0].startswith("0x") and params[0] != "latest"
        return old if is_tag else result

    for liar in harness.liars:
        liar.lie = lie
        for tag in ("finalized", "safe"):
            reply = await harness.verified("eth_getBlockByNumber", [tag, False], PROOF)
            true = await expected(harness, "eth_getBlockByNumber", [tag, False])
            assert (reply.status, reply.json["result"]["hash"]) == (200, true["hash"]), reply
        first = await harness.verified("eth_getBalance", [ADDRESS, "earliest"], PROOF)
        assert first.json["result"] == await expected(harness, "eth_getBalance", [ADDRESS, "earliest"])
        other = await harness.verified("eth_getBlockByNumber", ["", False], PROOF)
        assert "'' names no block" in other.fault(400)["message"]
        liar.lie = truth
    assert not harness.distrusted()


def header_hash(block: dict[str, Any]) -> str:
    later = [name for name in block_proofs._LATER if block.get(name.removeprefix("#")) is not None]
    fields = [block_proofs._field(block, name) for name in (*block_proofs._HEADER, *later)]
    return "0x" + block_proofs.keccak(rlp.encode(fields)).hex()


async def test_proof_needs_another_upstream_that_answers(harness: VerifiedHarness) -> None:
    for liar in harness.liars[1:]:
        liar.lie = lambda method, _, result: [] if method == "eth_getBlockByNumber" else result
    reply = await harness.verified("eth_getBalance", [ADDRESS, "latest"], PROOF)
    assert (reply.status, reply.headers.get("x-verified")) == (503, None), reply.json
    for upstream in harness.route.upstreams[1:]:
        upstream.health.cordon(cordoned=True, now=time.monotonic())
    alone = await harness.verified("eth_getBalance", [ADDRESS, "latest"], PROOF)
    assert "no upstream of another operator can confirm" in alone.fault(503)["message"]


async def test_verified_call_waits_for_the_block_that_it_needs(harness: VerifiedHarness) -> None:
    """Two of three nodes get a new block late. The reply is of that block, and not before they have it."""
    target = harness.head + 1
    params: list[Any] = [ADDRESS, "latest"]
    for headers in (QUORUM, PROOF):
        behind = {**headers, "X_Min_Block": str(target), "X_Min_Block_Wait": "0.05"}
        late = await harness.verified("eth_getBalance", params, behind)
        assert (late.fault(503)["details"], late.headers["retry-after"]) == ({"block": target - 1}, "1")
    harness.watch()
    async with asyncio.TaskGroup() as group:
        waits: dict[str, Any] = {"X_Min_Block": str(target), "X_Min_Block_Wait": "10"}
        calls = [
            group.create_task(harness.call("eth_getBalance", params, **headers, **waits)) for headers in (QUORUM, PROOF)
        ]
        await harness.follow((*BASE, 1))
    true = await expected(harness, "eth_getBalance", [ADDRESS, hex(target)])
    for call in calls:
        reply = call.result()
        assert (reply.status, int(reply.headers["x-block-number"])) == (200, target), reply
        assert reply.json["result"] == true


async def test_block_of_a_verified_reply_is_one_that_all_asked_upstreams_have(harness: VerifiedHarness) -> None:
    await harness.follow((*BASE, 1), harness.nodes[:1])
    await harness.look()
    for headers in ({"X_Verify": "quorum 3/3"}, {"X_Verify": "quorum 2/3"}):
        reply = await harness.verified("eth_getBalance", [ADDRESS, "latest"], headers)
        assert (reply.status, int(reply.headers["x-block-number"])) == (200, len(BASE)), reply
        assert reply.json["result"] == await expected(harness, "eth_getBalance", [ADDRESS, hex(len(BASE))])


async def test_verified_call_keeps_its_own_deadline(harness: VerifiedHarness) -> None:
    for headers in (QUORUM, PROOF):
        reply = await harness.verified("eth_getBalance", [ADDRESS, "latest"], {**headers, "X_Timeout_Ms": "1"})
        assert "X-Timeout-Ms" in reply.fault(504)["message"]


async def test_one_upstream_alone_cannot_verify(harness: VerifiedHarness) -> None:
    harness.worker.add_key("operator", directives=USUAL | {"upstream"})
    label = harness.route.upstreams[0].label
    asked = {**QUORUM, "X_Upstream": label, "key": "operator"}
    reply = await harness.verified("eth_getBalance", [ADDRESS, "latest"], asked)
    assert "more than one upstream" in reply.fault(400)["message"]


# Logs of long ranges


def hidden_bloom(method: str, _: list[Any], result: Any) -> Any:
    """Blocks whose bloom filters allow for no log."""
    return {**result, "logsBloom": "0x" + "00" * 256} if method.startswith("eth_getBlockBy") else result


def with_logs(method: str, result: Any, times: int) -> Any:
    """The logs of each receipt so many times. A node without eth_getBlockReceipts is asked for each of them."""
    if method == "eth_getLogs":
        return result * times
    if method == "eth_getBlockReceipts" and result is not None:
        return [{**each, "logs": each["logs"] * times} for each in result]
    return {**result, "logs": result["logs"] * times} if method == "eth_getTransactionReceipt" else result


def dropped_log(method: str, _: list[Any], result: Any) -> Any:
    return with_logs(method, result, 0)


def added_log(method: str, _: list[Any], result: Any) -> Any:
    return with_logs(method, result, 2)


def dropped_receipt(method: str, _: list[Any], result: Any) -> Any:
    return [] if method in ("eth_getBlockReceipts", "eth_getTransactionReceipt") else result


def empty_block(method: str, _: list[Any], result: Any) -> Any:
    """Blocks without their transactions, so that they have no receipts."""
    if method.startswith("eth_getBlockBy"):
        return {**result, "transactions": []}
    return dropped_receipt(method, _, result)


def long_ranges(harness: RealHarness) -> list[dict[str, Any]]:
    """A topic in one block of many, one in none, and a pair of them."""
    whole = {"fromBlock": "0x1", "toBlock": hex(harness.head), "address": ADDRESS}
    there, absent = f"0x{10 << 8:064x}", "0x" + "ee" * 32
    return [{**whole, "topics": topics} for topics in ([there], [absent], [[there, absent]])]


@pytest.mark.parametrize("lie", [hidden_bloom, dropped_log, added_log, dropped_receipt, empty_block])
async def test_log_of_a_long_range_is_neither_dropped_nor_added(alone: VerifiedHarness, lie: Lie) -> None:
    for wanted in long_ranges(alone):
        alone.liars[0].lie = lie
        true = await expected(alone, "eth_getLogs", [wanted])
        reply = await alone.verified("eth_getLogs", [wanted], PROOF)
        # Without a log in the range, no receipts are read and so nothing is false.
        assert reply.status in ((503, 200) if lie is not hidden_bloom and not true else (503,)), (wanted, reply)
        assert reply.status == 503 or reply.json["result"] == []
        alone.liars[0].lie = truth
        honest = await alone.verified("eth_getLogs", [wanted], PROOF)
        assert honest.headers["x-verified"] == "proof", honest.json
        assert is_part_of(honest.json["result"], true)


async def test_receipts_are_read_only_where_the_bloom_allows_for_a_log(alone: VerifiedHarness) -> None:
    asked: list[str] = []

    def count(method: str, _: list[Any], result: Any) -> Any:
        asked.append(method)
        return result

    alone.liars[0].lie = count
    there, absent, _ = long_ranges(alone)
    for wanted, most in ((absent, 2), (there, 3)):
        asked.clear()
        assert (await alone.verified("eth_getLogs", [wanted], PROOF)).status == 200
        # A bloom filter may allow for a log that is not there.
        assert asked.count("eth_getBlockReceipts") <= most
    every = {name: there[name] for name in ("fromBlock", "toBlock", "address")}
    reply = await alone.verified("eth_getLogs", [every], PROOF)
    assert "more than 20 blocks" in reply.fault(400)["message"]


async def test_calls_that_cannot_be_proven_count_against_no_upstream(harness: VerifiedHarness) -> None:
    unknown = "0x" + "ee" * 32
    for _ in range(4):
        for status, method, params in (
            (503, "eth_getTransactionReceipt", [unknown]),
            (503, "eth_getTransactionByHash", [unknown]),
            (503, "eth_getBlockByNumber", ["0xffffff", False]),
            (400, "eth_getBalance", [ADDRESS, "pending"]),
            (400, "eth_getLogs", [{"fromBlock": "0x0", "toBlock": "0xffffff"}]),
        ):
            assert (await harness.verified(method, params, PROOF)).status == status, method
    assert harness.states == ["up"] * 3


async def test_upstreams_may_differ_about_blocks_that_are_not_final(harness: VerifiedHarness) -> None:
    harness.liars[1].lie = lambda method, _, result: "0x7" if method == "eth_getBalance" else result
    for _ in range(6):
        reply = await harness.verified("eth_getBalance", [ADDRESS, "latest"], QUORUM)
        assert reply.json["result"] != "0x7"
    assert harness.states == ["up"] * 3


async def test_calls_that_cannot_be_verified_are_paid_for(harness: VerifiedHarness) -> None:
    for index, liar in enumerate(harness.liars):
        liar.lie = lambda method, _, result, index=index: hex(index) if method == "eth_getBalance" else result  # type: ignore[misc]
    harness.worker.add_key("poor", limits=Limits(2, 10_000, 0))
    asked = {**QUORUM, "key": "poor"}
    for _ in range(200):
        if (await harness.verified("eth_getBalance", [ADDRESS, "latest"], asked)).status == 429:
            return
    raise AssertionError("failed verifications were not charged")


async def test_without_agreement_there_is_no_reply(harness: VerifiedHarness) -> None:
    for index, liar in enumerate(harness.liars):
        liar.lie = lambda method, _, result, index=index: hex(index) if method == "eth_getBalance" else result  # type: ignore[misc]
    reply = await harness.verified("eth_getBalance", [ADDRESS, "latest"], QUORUM)
    assert (reply.status, reply.headers.get("retry-after")) == (503, "1")
    assert "fewer than 2 of 3 operators agree" in reply.json["error"]["message"]
    assert "x-verified" not in reply.headers


async def test_operator_chooses_methods_to_verify(nodes: list[RealNode]) -> None:
    rules = [{"network": DEV, "methods": ["eth_getBalance"], "by": "quorum 2/2"}]
    async with harness_of(nodes, verify=rules) as harness:
        reply = await harness.call("eth_getBalance", [ADDRESS, "latest"])
        assert reply.headers["x-verified"] == "quorum 2/2"
        assert "x-verified" not in (await harness.call("eth_getCode", [ADDRESS, "latest"])).headers
        batch = await harness.batch(("eth_getBalance", [ADDRESS, "latest"]), ("eth_chainId", []))
        assert batch.json[0]["result"] == reply.json["result"]


# Lies that leave the compared part of a reply alone


def with_optional_members(_: str, __: list[Any], result: Any) -> Any:
    if isinstance(result, dict):
        shown = {name: with_optional_members("", [], member) for name, member in result.items()}
        return {**shown, "removed": True, "root": "0x01", "size": "0x7", "v": "0x7"}
    return [with_optional_members("", [], each) for each in result] if isinstance(result, list) else result


async def test_no_upstream_alone_chooses_an_optional_member(harness: VerifiedHarness) -> None:
    head = hex(harness.head)
    for liar in harness.liars:
        liar.lie = with_optional_members
        for method, params in (
            ("eth_getLogs", [{"fromBlock": hex(harness.head - 2), "toBlock": head}]),
            ("eth_getTransactionReceipt", [harness.transaction]),
            ("eth_getBlockByNumber", [hex(harness.head - 3), True]),
        ):
            for verify in ("quorum 2/3", "quorum 3/3"):
                reply = await harness.verified(method, params, {"X_Verify": verify})
                assert reply.headers.get("x-verified") == verify, reply.json
                assert is_part_of(reply.json["result"], await expected(harness, method, params)), method
        liar.lie = truth


@pytest.mark.parametrize("verify", ["quorum 2/3", "proof"])
@pytest.mark.parametrize("part", ["0x-1", "-0x1", 7, True, None, [], {}, "0x" + "f" * 70], ids=str)
async def test_reply_in_no_known_form_does_not_keep_others_from_verifying(
    harness: VerifiedHarness, verify: str, part: Any
) -> None:
    def lie(method: str, _: list[Any], result: Any) -> Any:
        if method == "eth_getProof":
            return {**result, "nonce": part, "accountProof": [part]}
        return nested(400) if method == "eth_getBalance" else result

    params = [ADDRESS, hex(harness.head - 2)]
    for liar in harness.liars:
        liar.lie = lie
        reply = await harness.verified("eth_getBalance", params, {"X_Verify": verify})
        assert reply.headers.get("x-verified") == verify, reply.json
        assert reply.json["result"] == await expected(harness, "eth_getBalance", params)
        liar.lie = truth


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


async def test_upstream_that_claims_no_head_does_not_make_the_first_block_the_latest(harness: VerifiedHarness) -> None:
    first = await harness.nodes[0].ask("eth_getBlockByNumber", "0x0", False)

    def lie(method: str, params: list[Any], result: Any) -> Any:
        if method == "eth_blockNumber":
            return "0x0"
        return first if method == "eth_getBlockByNumber" and params[0] == "latest" else result

    for liar in harness.liars:
        liar.lie = lie
        await harness.look()
        for headers in (PROOF, QUORUM):
            reply = await harness.verified("eth_getTransactionCount", [FUNDED.address, "latest"], headers)
            true = await expected(harness, "eth_getTransactionCount", [FUNDED.address, hex(harness.head)])
            assert reply.json["result"] == true
        liar.lie = truth
        await harness.look()


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
    assert int(plain.headers["x-compute-units"]) == 2
    # A proof takes the value with its proof, the header, and the header's hash elsewhere.
    for headers, units in ((QUORUM, 3 * 2), (PROOF, max(4 * 2, 5 + 2 + 2))):
        reply = await harness.verified("eth_getBalance", [ADDRESS, "latest"], headers)
        assert int(reply.headers["x-compute-units"]) == units


def test_only_members_that_all_have_are_passed_on() -> None:
    one = b'{"a":"0xAB","b":[{"c":null,"removed":false}],"size":"0x1","v":"0x1"}'
    other = b'{"b":[{"removed":true}],"v":"0x1","a":"0xab","root":"0x1"}'
    assert agreed_result([one, one], OPTIONAL) == one
    for pair in ([one, other], [other, one]):
        found = orjson.loads(agreed_result(pair, OPTIONAL))
        assert (found["a"].lower(), found["v"], found["b"][0].get("removed")) == ("0xab", "0x1", None)
        assert not {"size", "root"} & found.keys()
    # The last of several members with the same name is compared, and another program may read the first.
    twice = b'{"a":"0x1","a":"0xab","b":[{}],"v":"0x1"}'
    assert orjson.loads(agreed_result([twice, other], OPTIONAL))["a"] == "0xab"
    assert agreed_result([twice, other], OPTIONAL).count(b'"a"') == 1


def test_message_of_an_error_is_passed_on_only_if_all_give_it() -> None:
    one, other = [b'{"code":3,"message":"%b","data":"0x08"}' % text for text in (b"execution reverted: a", b"call me")]
    assert agreed_error([one, one]) == one
    assert orjson.loads(agreed_error([one, other])) == {"code": 3, "message": "execution reverted", "data": "0x08"}
    third = b'{"code":-32000,"message":"%b"}'
    assert "differ" not in orjson.loads(agreed_error([third % b"a", third % b"b"]))["message"]


def test_replies_that_differ_only_in_form_are_equal() -> None:
    one = b'{"a":"0xAB","b":[1,{"c":null}],"size":"0x1"}'
    other = b'{"b":[1,{}],"a":"0xab"}'
    digests = [digest_of(each, OPTIONAL) for each in (one, other, b'{"a":"0xac","b":[1,{}]}')]
    assert digests[0] == digests[1] != digests[2]
