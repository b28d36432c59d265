"""Cached replies: how long they are kept, and that they only answer the same call on the same network."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import orjson
import pytest

from proxy.core.heads import STALE_S
from proxy.core.jsonrpc import STRICT, envelope_reader
from tests.http_client import rpc
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import Chain, Refused
from tests.service import until
from tests.web.worker import LIVE, NO_CACHE, TEST, on_uvloop, running_worker

ADDRESS = "0x" + "ab" * 20
TX = "0x" + "cd" * 32
RAW = "0x01"


async def how(harness: RpcHarness, method: str, params: list[Any], **options: Any) -> str:
    """The value of the X-Cache header of the reply."""
    reply = await harness.call(method, params, **options)
    assert reply.status == 200, reply
    return reply.headers.get("x-cache", "")


def move(harness: RpcHarness, blocks: int = 1) -> Any:
    harness.chain.head += blocks
    return harness.look()


# How long


def immutable(harness: RpcHarness) -> list[tuple[str, list[Any]]]:
    old = harness.chain.head - 100
    harness.chain.mined[TX] = old
    return [
        ("eth_chainId", []),
        ("eth_getBlockByNumber", [hex(old), False]),
        ("eth_getBalance", [ADDRESS, hex(old)]),
        ("eth_getTransactionReceipt", [TX]),
        ("eth_getLogs", [{"fromBlock": hex(old - 5), "toBlock": hex(old)}]),
        ("eth_getBlockByNumber", ["earliest", False]),
    ]


def recent(harness: RpcHarness) -> list[tuple[str, list[Any]]]:
    harness.chain.mined[TX] = harness.chain.head
    return [
        ("eth_gasPrice", []),
        ("eth_blockNumber", []),
        ("eth_getBalance", [ADDRESS, "latest"]),
        ("eth_getBlockByNumber", ["latest", False]),
        ("eth_getBlockByNumber", ["finalized", False]),
        ("eth_getBlockByNumber", [hex(harness.chain.head), False]),
        ("eth_getTransactionReceipt", [TX]),
        ("eth_getLogs", [{"fromBlock": hex(harness.chain.head)}]),
    ]


def uncertain(harness: RpcHarness) -> list[tuple[str, list[Any]]]:
    return [
        ("eth_getTransactionCount", [ADDRESS, "latest"]),
        ("eth_getTransactionCount", [ADDRESS, "pending"]),
        ("eth_getBalance", [ADDRESS, "pending"]),
        ("eth_getTransactionReceipt", [TX]),
        ("eth_getBlockByNumber", [hex(harness.chain.head + 1), False]),
        ("eth_getProof", [ADDRESS, [], "latest"]),
        ("eth_syncing", []),
    ]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("index", range(6))
@on_uvloop
async def test_immutable_replies_are_requested_once(index: int, count: int) -> None:
    async with rpc_harness(count) as harness:
        method, params = immutable(harness)[index]
        before = harness.count(method, params)
        assert [await how(harness, method, params) for _ in range(3)] == ["miss", "hit", "hit"]
        await move(harness, 1)
        assert await how(harness, method, params) == "hit"
        assert harness.count(method, params) == before + 1


@pytest.mark.parametrize("index", range(8))
@on_uvloop
async def test_replies_that_depend_on_the_head_are_requested_again_after_a_new_block(index: int) -> None:
    async with rpc_harness(2) as harness:
        method, params = recent(harness)[index]
        assert [await how(harness, method, params) for _ in range(3)] == ["miss", "hit", "hit"]
        first = (await harness.call(method, params)).json["result"]
        await move(harness)
        assert await how(harness, method, params) == "miss"
        if "latest" in params or method == "eth_blockNumber":
            assert (await harness.call(method, params)).json["result"] != first


@pytest.mark.parametrize("index", range(7))
@on_uvloop
async def test_errors_nulls_pending_and_nonces_are_never_kept(index: int) -> None:
    def refuse(_: list[Any]) -> Any:
        raise Refused(3, "execution reverted")

    async with rpc_harness(1) as harness:
        harness.upstreams[0].answers["eth_getProof"] = refuse
        method, params = uncertain(harness)[index]
        assert "hit" not in [await how(harness, method, params) for _ in range(4)]
        assert harness.count(method) >= 4


@on_uvloop
async def test_null_that_has_become_something_is_seen_at_once() -> None:
    async with rpc_harness(1) as harness:
        assert await harness.result("eth_getTransactionReceipt", [TX]) is None
        harness.chain.mined[TX] = harness.chain.head
        assert (await harness.result("eth_getTransactionReceipt", [TX]))["transactionHash"] == TX


@on_uvloop
async def test_reply_of_an_upstream_behind_the_tip_is_not_kept() -> None:
    async with rpc_harness(2) as harness:
        first, second = harness.upstreams
        second.behind = 1
        harness.chain.head += 1
        await harness.look()
        # Only the one that is behind has the method: its reply is given, but it is not the network's.
        harness.route.upstreams[0].health.method_unsupported("eth_getBalance", time.monotonic(), certainly=True)
        assert [await how(harness, "eth_getBalance", [ADDRESS, "latest"]) for _ in range(2)] == ["miss", "miss"]
        second.behind = 0
        await harness.look()
        assert [await how(harness, "eth_getBalance", [ADDRESS, "latest"]) for _ in range(2)] == ["miss", "hit"]
        assert first.count("eth_getBalance") == 0


@on_uvloop
async def test_caller_that_wants_no_cache_is_given_none_and_refreshes_it_for_the_others() -> None:
    async with rpc_harness(1) as harness:
        answers = itertools.count()
        harness.upstreams[0].answers["eth_gasPrice"] = lambda _: hex(next(answers))
        assert await harness.result("eth_gasPrice") == "0x0"
        assert await harness.result("eth_gasPrice") == "0x0"
        assert await harness.result("eth_gasPrice", Cache_Control="no-cache") == "0x1"
        assert await how(harness, "eth_gasPrice", [], Cache_Control="max-age=0, No-Cache") == "miss"
        assert await harness.result("eth_gasPrice") == "0x2"


@on_uvloop
async def test_nothing_recent_is_given_again_when_no_upstream_has_been_heard_for_long() -> None:
    async with rpc_harness(2) as harness:
        assert [await how(harness, "eth_gasPrice", []) for _ in range(2)] == ["miss", "hit"]
        harness.route.state.observe_heads(time.monotonic() + STALE_S + 1)
        assert await how(harness, "eth_gasPrice", []) == "miss"


@on_uvloop
async def test_disabled_cache_stores_nothing_and_sends_no_header() -> None:
    async with rpc_harness(1, cache={"enabled": False, "coalesce": False}) as harness:
        assert [await how(harness, "eth_gasPrice", []) for _ in range(3)] == [""] * 3
        assert harness.count("eth_gasPrice") == 3


# Whose


@on_uvloop
async def test_answers_of_networks_and_methods_do_not_cross() -> None:
    async with (
        rpc_harness(1, chain=Chain(name="live")) as live,
        rpc_harness(1, chain=Chain(name="test"), network=TEST) as test,
    ):
        urls = {LIVE: [live.upstreams[0].url], TEST: [test.upstreams[0].url]}
        async with running_worker(urls) as both:
            seen = set()
            for network, method, tag in itertools.product(
                (LIVE, TEST), ("eth_getBalance", "eth_getCode"), ("0x1", "0x2")
            ):
                for _ in range(2):
                    reply = await both.send(rpc(method, [ADDRESS, tag]), network=network)
                    seen.add((network, method, tag, reply.json["result"]))
            assert len(seen) == 8
            balances = [result for *_, method, _, result in seen if method == "eth_getBalance"]
            assert len(set(balances)) == 4


# Calls under way


@on_uvloop
async def test_identical_reads_under_way_share_one_call_and_keep_their_own_ids() -> None:
    async with rpc_harness(2) as harness:
        for each in harness.upstreams:
            each.held = {"eth_getBalance"}
        ids = [1, "two", 3.5, 10**25, None, *range(10, 40)]
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(
                    harness.worker.send(rpc("eth_getBalance", [ADDRESS, "latest"], id=each), network=harness.network)
                )
                for each in ids
                if not isinstance(each, int) or each < 2**63
            ]
            await until(lambda: harness.count("eth_getBalance") > 0)
            flight = next(iter(harness.route.state.flights.values()))
            await until(lambda: len(flight.waiters) == len(asked))
            for each in harness.upstreams:
                each.gate.set()
        replies = [task.result() for task in asked]
        assert harness.count("eth_getBalance") == 1
        assert sorted(reply.headers["x-cache"] for reply in replies) == ["join"] * (len(asked) - 1) + ["miss"]
        assert len({reply.json["result"] for reply in replies}) == 1
        assert [reply.json["id"] for reply in replies] == [each for each in ids if each != 10**25]


@on_uvloop
async def test_caller_that_disconnects_does_not_affect_those_that_joined() -> None:
    async with rpc_harness(1) as harness:
        upstream = harness.upstreams[0]
        upstream.held = {"eth_getBalance"}
        request = harness.worker.post(rpc("eth_getBalance", [ADDRESS, "latest"]), network=harness.network)
        first, second = await harness.worker.connect(), await harness.worker.connect()
        await first.write(request)
        await until(lambda: upstream.count("eth_getBalance") == 1)
        await second.write(request)
        await until(lambda: len(next(iter(harness.route.state.flights.values())).waiters) == 2)
        await first.close()
        upstream.gate.set()
        assert (await second.reply()).status == 200
        await second.close()
        assert upstream.count("eth_getBalance") == 1


@on_uvloop
async def test_call_that_all_have_left_is_given_up() -> None:
    async with rpc_harness(1) as harness:
        upstream = harness.upstreams[0]
        upstream.held = {"eth_getBalance"}
        request = harness.worker.post(rpc("eth_getBalance", [ADDRESS, "latest"]), network=harness.network)
        clients = [await harness.worker.connect() for _ in range(3)]
        for index, client in enumerate(clients):
            await client.write(request)
            await until(
                lambda index=index: [len(each.waiters) for each in harness.route.state.flights.values()] == [index + 1]
            )
        for client in clients:
            await client.close()
        await until(lambda: not harness.route.state.flights)
        assert harness.route.upstreams[0].health.inflight == 0


@on_uvloop
async def test_error_reply_does_not_repeat_the_cache_header_of_the_last_reply() -> None:
    def refuse(_: list[Any]) -> Any:
        raise Refused(-32000, "odd")

    async with rpc_harness(1) as harness, await harness.worker.connect() as client:
        harness.upstreams[0].answers["net_listening"] = refuse
        known = harness.worker.post(rpc("eth_chainId"), network=harness.network)
        failing = harness.worker.post(rpc("net_listening"), network=harness.network)
        assert [(await client.send(known)).headers["x-cache"] for _ in range(2)] == ["miss", "hit"]
        reply = await client.send(failing)
        assert "error" in reply.json
        assert "x-cache" not in reply.headers


@on_uvloop
async def test_answer_that_lands_after_the_head_has_moved_is_not_given_for_the_next_block() -> None:
    async with rpc_harness(1) as harness:
        upstream = harness.upstreams[0]
        upstream.held = {"eth_call"}
        old = asyncio.get_running_loop().create_task(harness.call("eth_call", [{"to": ADDRESS}, "latest"]))
        await until(lambda: upstream.count("eth_call") == 1)
        await move(harness)
        upstream.gate.set()
        assert (await old).headers["x-cache"] == "miss"
        assert [await how(harness, "eth_call", [{"to": ADDRESS}, "latest"]) for _ in range(2)] == ["miss", "hit"]
        assert upstream.count("eth_call") == 2


@on_uvloop
async def test_call_sent_before_the_head_moved_is_not_joined() -> None:
    async with rpc_harness(1) as harness:
        upstream = harness.upstreams[0]
        upstream.held = {"eth_call"}
        old = asyncio.get_running_loop().create_task(harness.call("eth_call", [{"to": ADDRESS}, "latest"]))
        await until(lambda: upstream.count("eth_call") == 1)
        await move(harness)
        new = asyncio.get_running_loop().create_task(harness.call("eth_call", [{"to": ADDRESS}, "latest"]))
        await until(lambda: upstream.count("eth_call") == 2)
        upstream.gate.set()
        assert [(await each).headers["x-cache"] for each in (old, new)] == ["miss", "miss"]


@on_uvloop
async def test_large_reply_that_has_begun_is_not_joined() -> None:
    large = "0x" + "ab" * 10_000_000
    async with rpc_harness(1) as harness:
        harness.upstreams[0].answers["eth_getCode"] = lambda _: large
        request = harness.worker.post(rpc("eth_getCode", [ADDRESS, "latest"]), network=harness.network)
        async with await harness.worker.connect() as slow, await harness.worker.connect() as quick:
            await slow.write(request)
            await slow.reader.readuntil(b"\r\n\r\n")  # The reply has begun, and the client stops reading.
            reply = await quick.send(request, within_s=20.0)
            assert orjson.loads(reply.body)["result"] == large
            assert reply.headers["x-cache"] == "miss"


# Writes, reorganisations, resets


@on_uvloop
async def test_write_makes_recent_answers_doubtful_and_leaves_final_ones() -> None:
    async with rpc_harness(1) as harness:
        final = ("eth_getBalance", [ADDRESS, "0x1"])
        latest = ("eth_getBalance", [ADDRESS, "latest"])
        assert [await how(harness, *call) for call in (final, latest, final, latest)] == ["miss", "miss", "hit", "hit"]
        await harness.result("eth_sendRawTransaction", [RAW])
        assert [await how(harness, *call) for call in (final, latest)] == ["hit", "miss"]


@on_uvloop
async def test_nonce_is_right_after_each_transaction() -> None:
    async with rpc_harness(1) as harness:
        upstream = harness.upstreams[0]
        upstream.answers["eth_getTransactionCount"] = lambda _: hex(upstream.count("eth_sendRawTransaction"))
        for n in range(5):
            for tag in ("latest", "pending"):
                assert await harness.result("eth_getTransactionCount", [ADDRESS, tag]) == hex(n)
            await harness.result("eth_sendRawTransaction", [hex(0x10 + n)])


@on_uvloop
async def test_polling_a_filter_does_not_make_anything_doubtful() -> None:
    async with rpc_harness(1) as harness:
        name = await harness.result("eth_newBlockFilter")
        assert await how(harness, "eth_gasPrice", []) == "miss"
        for _ in range(3):
            await harness.result("eth_getFilterChanges", [name])
            assert await how(harness, "eth_gasPrice", []) == "hit"


@pytest.mark.parametrize("count", [1, 3])
@on_uvloop
async def test_replaced_block_at_the_same_height_invalidates_replies_from_the_old_one(count: int) -> None:
    async with rpc_harness(count) as harness:
        calls: list[tuple[str, list[Any]]] = [
            ("eth_getBalance", [ADDRESS, "latest"]),
            ("eth_getBlockByNumber", ["latest", False]),
            ("eth_getBalance", [ADDRESS, hex(harness.chain.head)]),
        ]
        before = [await harness.result(*call) for call in calls]
        assert [await how(harness, *call) for call in calls] == ["hit"] * 3
        await harness.look()
        assert [await how(harness, *call) for call in calls] == ["hit"] * 3
        harness.chain.reorganise()
        await harness.look()
        after = [await harness.result(*call) for call in calls]
        assert all(old != new for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("count", [1, 3])
@on_uvloop
async def test_chain_that_was_reset_leaves_nothing_of_the_old_one(count: int) -> None:
    async with rpc_harness(count) as harness:
        call = ("eth_getBalance", [ADDRESS, "0x1"])
        old = await harness.result(*call)
        assert await how(harness, *call) == "hit"
        harness.chain.name, harness.chain.head = "another", 80
        await harness.look()
        assert harness.route.heads.tip == 80
        assert await how(harness, *call) == "miss"
        assert await harness.result(*call) != old


# How much


@on_uvloop
async def test_memory_is_bounded_and_answers_stay_right() -> None:
    async with rpc_harness(1, cache={"bytes": 1 << 20}) as harness:
        harness.upstreams[0].answers["eth_getStorageAt"] = lambda params: "0x" + params[1][2:].rjust(4, "0") * 1000
        async with await harness.worker.connect() as client:
            for n in range(1500):
                request = rpc("eth_getStorageAt", [ADDRESS, hex(n % 900), "0x1"])
                reply = await client.send(harness.worker.post(request, network=harness.network))
                assert reply.json["result"] == "0x" + hex(n % 900)[2:].rjust(4, "0") * 1000
        assert harness.route.state.replies.bytes_used <= 1 << 20
        assert harness.route.state.replies.evictions > 0


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("eth_getTransactionReceipt", [TX]),
        ("eth_getLogs", [{"fromBlock": hex(Chain.head)}]),
        ("eth_getBlockByNumber", [hex(Chain.head + 1), False]),
    ],
)
@on_uvloop
async def test_reply_from_a_newer_block_invalidates_older_cached_replies(method: str, params: list[Any]) -> None:
    async with rpc_harness(1) as harness:
        read = ("eth_getBalance", ["0x" + "ab" * 20, "latest"])
        for expected in ("miss", "hit"):
            assert (await harness.call(*read)).headers["x-cache"] == expected
        harness.chain.head += 1
        harness.chain.mined[TX] = harness.chain.head
        assert hex(harness.chain.head) in str(await harness.result(method, params))
        assert (await harness.call(*read)).headers["x-cache"] == "miss"
        # A block that was seen before invalidates nothing.
        await harness.look()
        assert await harness.result(method, params)
        assert [(await harness.call(*read)).headers["x-cache"] for _ in range(2)] == ["miss", "hit"]
        assert await harness.result(method, params)
        assert (await harness.call(*read)).headers["x-cache"] == "hit"


@pytest.mark.parametrize(
    ("method", "params", "cached", "is_short"),
    [
        ("eth_getBlockByNumber", ["0x10", False], True, True),
        ("eth_getBlockByNumber", ["0x10", False], False, False),  # It would be sent without a look at the block.
        ("eth_getBlockByHash", ["0x" + "ab" * 32, False], True, True),
        ("eth_getBalance", [ADDRESS, "0x10"], True, False),  # Old state has another price.
        ("eth_getBalance", [ADDRESS, "latest"], True, True),
        ("eth_getLogs", [{"fromBlock": "0x10"}], True, False),
    ],
)
@on_uvloop
async def test_call_takes_the_short_path_if_its_block_makes_no_difference(
    method: str, params: list[Any], cached: bool, is_short: bool
) -> None:
    async with rpc_harness(1, **({} if cached else NO_CACHE)) as harness:
        body = rpc(method, params)
        envelope = envelope_reader(STRICT)(body)
        policy = harness.route.policies[method]
        short = policy.short and policy.is_short_call(envelope, bytes(envelope.params), bytes(envelope.id), body)
        assert short == is_short
        for _ in range(2):
            assert "result" in (await harness.call(method, params)).json
