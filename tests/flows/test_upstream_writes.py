"""Transactions: sent once, "already known" is a success, and several upstreams only get them in a broadcast."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from proxy.core.access import Limits
from proxy.core.upstream_health import WRITE_FAILURES_IN_A_ROW
from tests.faults import Mode
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import Refused
from tests.service import until
from tests.shipped_tables import TABLES
from tests.web.worker import on_uvloop

SEND = "eth_sendRawTransaction"
# Signed with eth-account by the key 0x11…11, and the hashes that it gives: a legacy transaction and one of EIP-1559.
LEGACY = (
    "0xf86c078504a817c800825208942222222222222222222222222222222222222222880de0b6b3a76400008025a007ed339d6d1fa5641394483b"
    "9b23cae20e509c4ba55126809efd3381282243c7a07c9f3ed9a0d3b2383588584808128e247fb9832eaddf5e8735ced6c50864ceec",
    "0xd1c09e8d5a62116d911a3f99e317ef468b598aff6bf36e7a9af7935dc8ba8f53",
)
DYNAMIC = (
    "0x02f86f0108843b9aca008506fc23ac0082ea609433333333333333333333333333333333333333338084a9059cbbc080a038f58f86ded92aa4"
    "474c3852fc6411b4ba8bfacdca2b4eb468d6bd341aebce54a058e29ed8cce2e2e719a643190385015a40b1325d8981026c98545935876ed814",
    "0x777aeb0c455f27e514e8dbf10ac25abc9ed6faa33888c0c25c93a2d979cfd207",
)
RAW, HASH = LEGACY


def refusing(code: int, message: str) -> Any:
    def refuse(_: list[Any]) -> Any:
        raise Refused(code, message)

    return refuse


def sent(harness: RpcHarness) -> list[int]:
    """How many times each upstream was sent the transaction, whether or not it got through."""
    return [each.methods[SEND] for each in harness.proxies] or [each.count(SEND) for each in harness.upstreams]


@on_uvloop
async def test_write_is_sent_to_one_upstream_once() -> None:
    async with rpc_harness(3) as harness:
        assert await harness.result(SEND, [RAW]) == HASH
        assert sorted(sent(harness)) == [0, 0, 1]


@pytest.mark.parametrize(("raw", "tx_hash"), [LEGACY, DYNAMIC])
@pytest.mark.parametrize("words", ["already known", "ALREADY_EXISTS: already known", "known transaction: d1c0"])
@on_uvloop
async def test_transaction_that_is_known_already_is_a_success_with_its_hash(raw: str, tx_hash: str, words: str) -> None:
    async with rpc_harness(2) as harness:
        for each in harness.upstreams:
            each.answers[SEND] = refusing(-32000, words)
        assert await harness.result(SEND, [raw]) == tx_hash
        assert sum(sent(harness)) == 1


@on_uvloop
async def test_sending_the_same_again_is_as_good_as_the_first_time() -> None:
    async with rpc_harness(1) as harness:
        assert [await harness.result(SEND, [RAW]) for _ in range(3)] == [HASH] * 3
        assert sent(harness) == [3]


@pytest.mark.parametrize("words", ["nonce too low", "replacement transaction underpriced", "insufficient funds"])
@on_uvloop
async def test_refusal_is_returned_and_not_retried_on_another_upstream(words: str) -> None:
    async with rpc_harness(3) as harness:
        for each in harness.upstreams:
            each.answers[SEND] = refusing(-32000, words)
        reply = await harness.call(SEND, [RAW])
        assert reply.json["error"] == {"code": -32000, "message": words}
        assert sum(sent(harness)) == 1


@on_uvloop
async def test_write_is_not_retried_after_a_time_out() -> None:
    async with rpc_harness(3, faults=True, rpc={"call_timeout_s": 0.3}) as harness:
        harness.worker.add_key("small", limits=Limits(1000, 60, 0))
        for proxy in harness.proxies:
            await proxy.switch("black_hole")
        reply = await harness.call(SEND, [RAW], key="small")
        reply.fault(504)
        assert sorted(sent(harness)) == [0, 0, 1]


@pytest.mark.parametrize("mode", ["reset", "half", "garbage"])
@on_uvloop
async def test_write_that_may_have_landed_is_not_sent_again(mode: Mode) -> None:
    async with rpc_harness(3, faults=True) as harness:
        for proxy in harness.proxies:
            await proxy.switch(mode)
        (await harness.call(SEND, [RAW])).fault(500)
        assert sorted(sent(harness)) == [0, 0, 1]


@on_uvloop
async def test_write_is_never_hedged() -> None:
    async with rpc_harness(3, faults=True) as harness:
        await harness.load(200)
        for proxy in harness.proxies:
            proxy.delay_s = 0.4
            await proxy.switch("slow")
        assert await harness.result(SEND, [RAW]) == HASH
        assert sorted(sent(harness)) == [0, 0, 1]


@on_uvloop
async def test_write_that_never_left_us_is_sent_to_another_upstream() -> None:
    async with rpc_harness(3, faults=True) as harness:
        for proxy in harness.proxies[:2]:
            await proxy.switch("dead")
        for _ in range(6):
            assert await harness.result(SEND, [RAW]) == HASH
        assert sent(harness) == [0, 0, 6]


@on_uvloop
async def test_write_of_a_caller_that_left_goes_on_to_its_end() -> None:
    async with rpc_harness(1) as harness:
        upstream = harness.upstreams[0]
        upstream.held = {SEND}
        client = await harness.worker.connect()
        body = b'{"jsonrpc":"2.0","id":1,"method":"%b","params":["%b"]}' % (SEND.encode(), RAW.encode())
        await client.write(harness.worker.post(body, network=harness.network))
        await until(lambda: upstream.count(SEND) == 1)
        await client.close()
        upstream.gate.set()
        await until(lambda: harness.route.upstreams[0].health.inflight == 0)
        assert harness.route.upstreams[0].health.good >= 1
        assert await harness.result(SEND, [RAW]) == HASH


@on_uvloop
async def test_read_only_key_may_not_write_alone_or_in_a_batch() -> None:
    async with rpc_harness(1) as harness:
        harness.worker.add_key("reader", scopes=["rpc:read"])
        (await harness.call(SEND, [RAW], key="reader")).fault(403)
        reply = await harness.batch((SEND, [RAW]), ("eth_chainId", []), key="reader")
        assert reply.json[0]["error"]["code"] == -32016
        assert "result" in reply.json[1]
        assert sent(harness) == [0]


# To several


@pytest.mark.parametrize(("broadcast", "count", "times"), [(2, 3, 2), (3, 3, 3), (16, 3, 3), (3, 1, 1)])
@on_uvloop
async def test_broadcast_sends_to_so_many_upstreams_once_each(broadcast: int, count: int, times: int) -> None:
    async with rpc_harness(count, rpc={"broadcast": broadcast}) as harness:
        assert await harness.result(SEND, [RAW]) == HASH
        await until(lambda: sum(sent(harness)) == times)
        assert max(sent(harness)) == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # An upstream of each operator, and only then a second one.
        ([{"operator": each} for each in "aaab"], [(0, 0, 1, 1), (0, 1, 0, 1), (1, 0, 0, 1)]),
        ([{"operator": "a"}] * 4, None),
        # Upstreams of a higher tier stay in reserve.
        (
            [{"operator": "a"}, {"operator": "a"}, {"operator": "b", "tier": 1}, {"operator": "c", "tier": 1}],
            [(1, 1, 0, 0)],
        ),
    ],
)
@on_uvloop
async def test_broadcast_goes_to_different_operators(
    options: list[dict[str, Any]], expected: list[tuple[int, ...]] | None
) -> None:
    async with rpc_harness(4, options=options, rpc={"broadcast": 2}) as harness:
        for number in range(6):
            before = sent(harness)
            assert (await harness.call(SEND, [RAW + f"{number:02x}"])).status == 200
            await until(lambda before=before: sum(sent(harness)) == sum(before) + 2)
            places = tuple(now - then for now, then in zip(sent(harness), before, strict=True))
            assert expected is None or places in expected


@pytest.mark.parametrize("mode", ["black_hole", "dead", "reset", "garbage"])
@on_uvloop
async def test_first_success_of_a_broadcast_wins_even_if_the_others_fail(mode: Mode) -> None:
    async with rpc_harness(3, faults=True, rpc={"broadcast": 3}) as harness:
        for proxy in harness.proxies[1:]:
            await proxy.switch(mode)
        assert await harness.result(SEND, [RAW]) == HASH
        assert harness.upstreams[0].count(SEND) == 1


@on_uvloop
async def test_refusal_of_one_does_not_outrun_the_success_of_another() -> None:
    async with rpc_harness(3, rpc={"broadcast": 3}) as harness:
        for each in harness.upstreams[:2]:
            each.answers[SEND] = refusing(-32000, "nonce too low")
        harness.upstreams[2].held = {SEND}
        asking = harness.worker.send(
            b'{"jsonrpc":"2.0","id":1,"method":"%b","params":["%b"]}' % (SEND.encode(), RAW.encode()),
            network=harness.network,
        )

        async def release() -> None:
            await until(lambda: sent(harness) == [1, 1, 1])
            await until(lambda: sum(each.health.inflight for each in harness.route.upstreams) == 1)
            harness.upstreams[2].gate.set()

        reply, _ = await asyncio.gather(asking, release())
        assert reply.json["result"] == HASH


@on_uvloop
async def test_broadcast_that_all_refuse_is_refused_and_one_that_all_fail_costs_nothing() -> None:
    async with rpc_harness(2, faults=True, rpc={"broadcast": 2}) as harness:
        harness.worker.add_key("small", limits=Limits(1000, 60, 0))
        for each in harness.upstreams:
            each.answers[SEND] = refusing(-32000, "nonce too low")
        assert (await harness.call(SEND, [RAW])).json["error"]["message"] == "nonce too low"
        for proxy in harness.proxies:
            await proxy.switch("reset")
        for _ in range(10):
            reply = await harness.call(SEND, [RAW], key="small")
            assert reply.status in (500, 503)
            reply.fault(reply.status)


@on_uvloop
async def test_broadcast_in_a_batch_answers_in_its_place() -> None:
    async with rpc_harness(2, rpc={"broadcast": 2}) as harness:
        reply = await harness.batch(("eth_chainId", []), (SEND, [RAW]), ("eth_chainId", []))
        assert [item["id"] for item in reply.json] == [0, 1, 2]
        assert reply.json[1]["result"] == HASH


# Upstreams that refuse or fail

FIRST_TIER: list[Mapping[str, Any]] = [{"tier": 0}, {"tier": 1}]


@pytest.mark.parametrize("method", [SEND, "eth_sendRawTransactionConditional"])
@on_uvloop
async def test_write_that_is_answered_429_goes_to_another_upstream(method: str) -> None:
    async with rpc_harness(2, options=FIRST_TIER) as harness:
        harness.upstreams[0].limited = 1
        assert await harness.result(method, [RAW])
        assert [each.count(method) for each in harness.upstreams] == [0, 1]


@pytest.mark.parametrize("code", [429, -32005, -32097])
@on_uvloop
async def test_write_that_an_error_says_is_rate_limited_goes_to_another_upstream(code: int) -> None:
    async with rpc_harness(2, options=FIRST_TIER) as harness:
        harness.upstreams[0].answers[SEND] = refusing(code, "Too Many Requests")
        assert await harness.result(SEND, [RAW]) == HASH
        assert sent(harness) == [1, 1]


@on_uvloop
async def test_private_write_that_is_rate_limited_is_shown_to_no_other_upstream() -> None:
    async with rpc_harness(2, options=FIRST_TIER) as harness:
        harness.upstreams[0].answers["eth_sendPrivateTransaction"] = refusing(-32005, "Too Many Requests")
        reply = await harness.call("eth_sendPrivateTransaction", [{"tx": RAW}])
        assert reply.json["error"]["code"] == -32005
        assert harness.upstreams[1].count("eth_sendPrivateTransaction") == 0


@on_uvloop
async def test_write_that_words_alone_call_rate_limited_is_not_sent_again() -> None:
    """A contract or a sequencer may say anything under a generic code."""
    async with rpc_harness(2, options=FIRST_TIER) as harness:
        harness.upstreams[0].answers[SEND] = refusing(-32000, "too many requests")
        assert (await harness.call(SEND, [RAW])).json["error"]["code"] == -32005
        assert sent(harness) == [1, 0]


@on_uvloop
async def test_private_write_that_is_answered_429_is_shown_to_no_other_upstream() -> None:
    async with rpc_harness(2, options=FIRST_TIER) as harness:
        harness.upstreams[0].limited = 1
        (await harness.call("eth_sendPrivateTransaction", [{"tx": RAW}])).fault(503)
        assert harness.count("eth_sendPrivateTransaction") == 0


@pytest.mark.parametrize("status", [500, 502, 504])
@on_uvloop
async def test_upstream_that_replies_to_writes_with_5xx_gets_no_more_after_a_few(status: int) -> None:
    """Its reads succeed, so that the breaker stays closed."""

    async with rpc_harness(2, options=FIRST_TIER) as harness:
        bad = harness.upstreams[0]
        bad.limited_by, bad.retry_after = status, None
        failed = 0
        for _ in range(30):
            bad.limited = 1
            failed += (await harness.call(SEND, [RAW])).status != 200
            bad.limited = 0
            await harness.result("eth_gasPrice", Cache_Control="no-cache")
        assert 0 < failed <= 2 * WRITE_FAILURES_IN_A_ROW
        assert bad.count("eth_gasPrice") == 30


NONCES = {"highest_nonces": 3}
SENDER = "0x" + 40 * "7"


def nonces(harness: RpcHarness, *values: int) -> None:
    for upstream, value in zip(harness.upstreams, values, strict=True):
        upstream.answers["eth_getTransactionCount"] = partial(_nonce, value)


def _nonce(value: int, _: list[Any]) -> str:
    return hex(value)


@pytest.mark.parametrize("values", [(5, 9, 7), (16, 9, 10), (3, 3, 3)])
@on_uvloop
async def test_highest_pending_nonce_of_several_upstreams_is_the_reply(values: tuple[int, int, int]) -> None:
    async with rpc_harness(3, rpc=NONCES) as harness:
        nonces(harness, *values)
        assert await harness.result("eth_getTransactionCount", [SENDER, "pending"]) == hex(max(values))
        assert [each.count("eth_getTransactionCount") for each in harness.upstreams] == [1, 1, 1]
        replies = (await harness.batch(*[("eth_getTransactionCount", [SENDER, "pending"])] * 3)).json
        assert [each["result"] for each in replies] == [hex(max(values))] * 3
        # A nonce in a block is the same everywhere.
        await harness.result("eth_getTransactionCount", [SENDER, "latest"])
        assert sum(each.count("eth_getTransactionCount") for each in harness.upstreams) == 12 + 1


@pytest.mark.parametrize("away", [0, 1, 2])
@on_uvloop
async def test_each_call_for_a_pending_nonce_is_charged(away: int) -> None:
    nonce = ("eth_getTransactionCount", [SENDER, "pending"])
    price = TABLES.methods["evm"]["eth_getTransactionCount"].price
    async with rpc_harness(3, rpc=NONCES) as harness:
        nonces(harness, 5, 9, 7)
        for upstream in harness.route.upstreams[:away]:
            upstream.health.cordon(cordoned=True, now=time.monotonic())
        reply = await harness.call(*nonce)
        assert int(reply.headers["x-compute-units"]) == (3 - away) * price
        replies = await harness.batch(nonce, nonce)
        assert int(replies.headers["x-compute-units"]) == 2 * (3 - away) * price
        assert harness.count("eth_getTransactionCount") == 3 * (3 - away)
        # A call to one upstream, by the client's wish or because the nonce is in a block, costs one.
        reply = await harness.call("eth_getTransactionCount", [SENDER, "latest"])
        assert int(reply.headers["x-compute-units"]) == price


@on_uvloop
async def test_pending_nonce_that_no_upstream_takes_is_refunded() -> None:
    async with rpc_harness(2, rpc=NONCES) as harness:
        for upstream in harness.route.upstreams:
            upstream.health.cordon(cordoned=True, now=time.monotonic())
        reply = await harness.call("eth_getTransactionCount", [SENDER, "pending"])
        assert reply.status == 503
        assert int(reply.headers.get("x-compute-units", 0)) == 0


@on_uvloop
async def test_transaction_is_charged_once_however_many_upstreams_get_it() -> None:
    async with rpc_harness(3, rpc={"broadcast": 3}) as harness:
        reply = await harness.call(SEND, [RAW])
        assert harness.count(SEND) == 3
        assert int(reply.headers["x-compute-units"]) == TABLES.methods["evm"][SEND].price


@on_uvloop
async def test_pending_nonce_is_asked_of_one_upstream_unless_configured() -> None:
    async with rpc_harness(3) as harness:
        nonces(harness, 5, 5, 5)
        assert await harness.result("eth_getTransactionCount", [SENDER, "pending"]) == "0x5"
        assert harness.count("eth_getTransactionCount") == 1


@on_uvloop
async def test_upstreams_that_fail_or_hang_do_not_delay_the_highest_nonce_for_long() -> None:
    def refuse(_: list[Any]) -> Any:
        raise Refused(-32603, "internal error")

    async with rpc_harness(3, rpc=NONCES) as harness:
        nonces(harness, 5, 9, 7)
        harness.upstreams[1].answers["eth_getTransactionCount"] = refuse
        harness.upstreams[2].held.add("eth_getTransactionCount")
        began = time.monotonic()
        assert await harness.result("eth_getTransactionCount", [SENDER, "pending"]) == "0x5"
        assert time.monotonic() - began < 5.0
        for upstream in harness.upstreams[:2]:
            upstream.answers["eth_getTransactionCount"] = refuse
        harness.upstreams[2].answers["eth_getTransactionCount"] = refuse
        harness.upstreams[2].held.clear()
        assert (await harness.call("eth_getTransactionCount", [SENDER, "pending"])).json["error"]["code"] == -32603
