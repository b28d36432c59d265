"""POST /bundler against scripted bundlers: what is checked, recorded, sent once, and passed on."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from proxy.core.access import Limits
from tests.bundler_harness import (
    BY_HASH,
    ENTRY_POINTS,
    ENTRY_POINTS_METHOD,
    EP07,
    ESTIMATE,
    GAS,
    HASH,
    OPERATION,
    RECEIPT,
    SEND,
    SENDER,
    bundler_harness,
    hash_v07,
)
from tests.database import connected
from tests.http_client import rpc
from tests.rpc_upstreams import Refused
from tests.service import until
from tests.web.worker import on_uvloop

READS: list[tuple[str, list[Any]]] = [
    (ESTIMATE, [OPERATION, EP07]),
    (BY_HASH, [HASH]),
    (RECEIPT, [HASH]),
    (ENTRY_POINTS_METHOD, []),
]


def error_of(reply: Any) -> dict[str, Any]:
    assert reply.status == 200, reply
    found: dict[str, Any] = reply.json["error"]
    return found


# Sending


@on_uvloop
async def test_operation_is_recorded_before_it_is_sent_and_marked_when_it_was_taken(database: str) -> None:
    async with bundler_harness(database) as harness:
        bundler = harness.bundlers[0]
        bundler.held = {SEND}
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(harness.send())
            await until(lambda: bundler.count(SEND) == 1)
            row = await harness.record()
            assert row is not None
            assert (row["status"], row["block"], row["key_id"]) == ("seen", None, "key_1")
            assert row["sender"].hex() == SENDER[2:].lower()
            assert orjson.loads(row["operation"]) == OPERATION
            bundler.gate.set()
        reply = sending.result()
        assert (reply.status, reply.json) == (200, {"jsonrpc": "2.0", "id": 1, "result": HASH})
        assert reply.headers["x-compute-units"] == "50"
        row = await harness.record()
        assert row is not None
        assert row["status"] == "sent"
        assert bundler.calls[-1].params == [OPERATION, EP07]


@on_uvloop
async def test_operation_is_serialized_again_before_it_is_sent(database: str) -> None:
    """Only the last of duplicate members is sent, and null members are left out."""
    text = orjson.dumps([{**OPERATION, "paymaster": None}, EP07]).decode()
    twice = text.replace('"nonce"', '"nonce":"0x9","nonce"', 1)
    body = f'{{"jsonrpc":"2.0","id":1,"method":"{SEND}","params":{twice}}}'.encode()
    async with bundler_harness(database) as harness:
        reply = await harness.raw(harness.request(body))
        assert reply.json["result"] == HASH
        assert harness.bundlers[0].calls[-1].params == [OPERATION, EP07]


@on_uvloop
async def test_operation_that_is_sent_again_is_one_record(database: str) -> None:
    async with bundler_harness(database) as harness:
        await harness.send()
        again = await harness.send()
        assert again.json["result"] == HASH
        row = await harness.record()
        assert row is not None
        assert row["status"] == "sent"


@pytest.mark.parametrize("code", [*range(-32508, -32499), -32521])
@on_uvloop
async def test_bundlers_errors_pass_with_their_data_and_are_recorded(database: str, code: int) -> None:
    data = {"paymaster": SENDER, "minimumStake": "0x1"}
    # Words that mean something else from an upstream.
    message = "AA00 throttled: rate limit, timeout, unauthorized"

    def refuse(params: list[Any]) -> Any:
        raise Refused(code, message, data=data)

    async with bundler_harness(database, 2) as harness:
        for bundler in harness.bundlers:
            bundler.answers[SEND] = bundler.answers[ESTIMATE] = refuse
        assert error_of(await harness.send()) == {"code": code, "message": message, "data": data}
        row = await harness.record()
        assert row is not None
        assert (row["status"], orjson.loads(row["error"])["code"]) == ("failed", code)
        assert error_of(await harness.call(ESTIMATE, OPERATION, EP07)) == {
            "code": code,
            "message": message,
            "data": data,
        }
        assert harness.sends() == 1
        # It spoke, so it is well: the next call is not refused.
        assert (await harness.call(ENTRY_POINTS_METHOD)).json["result"] == [*ENTRY_POINTS.values()]


@on_uvloop
async def test_refused_operation_may_be_sent_again(database: str) -> None:
    async with bundler_harness(database) as harness:

        def refuse(params: list[Any]) -> Any:
            raise Refused(-32500, "AA21 didn't pay prefund")

        harness.bundlers[0].answers[SEND] = refuse
        assert error_of(await harness.send())["code"] == -32500
        del harness.bundlers[0].answers[SEND]
        assert (await harness.send()).json["result"] == HASH
        row = await harness.record()
        assert row is not None
        assert (row["status"], row["error"]) == ("sent", None)


@on_uvloop
async def test_words_about_the_operators_own_key_are_not_passed_on(database: str) -> None:
    def refuse(params: list[Any]) -> Any:
        raise Refused(-32000, "invalid api key pk_secret: unauthorized")

    async with bundler_harness(database) as harness:
        harness.bundlers[0].answers[SEND] = refuse
        assert error_of(await harness.send()) == {"code": -32603, "message": "the upstream refused the call"}


# Operations that are refused before they are sent


@pytest.mark.parametrize(
    ("operation", "entry_point", "message"),
    [
        ({**OPERATION, "nonce": None}, EP07, "nonce: is missing"),
        ({**OPERATION, "callData": "0xzz"}, EP07, "callData: must be bytes in hex, 0x and two digits each, not '0xzz'"),
        ({**OPERATION, "callData": "0xabc"}, EP07, "callData: has an odd number of hex digits"),
        ({**OPERATION, "factory": SENDER}, EP07, "factoryData: is missing; factory and factoryData come together"),
        ({**OPERATION, "extra": "0x"}, EP07, "extra: is not a field of an operation for entry point 0.7"),
        (OPERATION, ENTRY_POINTS["0.6"], "initCode: is missing"),
        ({**OPERATION, "initCode": "0x"}, ENTRY_POINTS["0.6"], "paymasterAndData: is missing"),
        (
            OPERATION,
            SENDER,
            f"entryPoint: {SENDER} is not supported here; supported: {', '.join(ENTRY_POINTS.values())}",
        ),
        (OPERATION, None, "entryPoint: must be an address"),
        (OPERATION, "0x12", "entryPoint: must be an address, not '0x12'"),
        ([], EP07, "userOperation: must be an object"),
    ],
)
@on_uvloop
async def test_field_that_is_wrong_is_named_and_nothing_is_sent(
    database: str, operation: Any, entry_point: Any, message: str
) -> None:
    async with bundler_harness(database) as harness:
        reply = await harness.send(operation, entry_point)
        assert error_of(reply) == {"code": -32602, "message": message}
        assert reply.headers["x-compute-units"] == "1"
        assert harness.sends() == 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (b"[]", "params: must be an array of the operation and the entry point"),
        (orjson.dumps([OPERATION]), "params: must be an array of the operation and the entry point"),
        (orjson.dumps([OPERATION, EP07, {}]), "params: must be an array of the operation and the entry point"),
    ],
)
@on_uvloop
async def test_params_of_another_shape_are_refused(database: str, params: bytes, message: str) -> None:
    async with bundler_harness(database) as harness:
        body = b'{"jsonrpc":"2.0","id":1,"method":"%b","params":%b}' % (SEND.encode(), params)
        assert error_of(await harness.raw(harness.request(body))) == {"code": -32602, "message": message}
        assert harness.sends() == 0


@on_uvloop
async def test_estimate_takes_a_draft_and_state_overrides(database: str) -> None:
    draft = {name: OPERATION[name] for name in ("sender", "nonce", "callData")}
    async with bundler_harness(database) as harness:
        reply = await harness.call(ESTIMATE, draft, EP07, {SENDER: {"balance": "0xff"}})
        assert reply.json["result"] == GAS
        assert reply.headers["x-compute-units"] == "25"
        assert harness.bundlers[0].calls[-1].params == [draft, EP07, {SENDER: {"balance": "0xff"}}]
        wrong = await harness.call(ESTIMATE, draft, EP07, "0x")
        assert error_of(wrong)["message"] == "params.2: the state overrides must be an object"
        assert error_of(await harness.call(ESTIMATE, {"sender": SENDER}, EP07))["message"] == "nonce: is missing"


@on_uvloop
async def test_huge_call_data_is_taken_up_to_the_cap_and_refused_beyond_it(database: str) -> None:
    async with bundler_harness(database) as harness:
        large = {**OPERATION, "callData": "0x" + "ab" * 250_000}
        assert (await harness.send(large)).json["result"] == hash_v07(large)
        huge = rpc(SEND, [{**OPERATION, "callData": "0x" + "ab" * 262_144}, EP07])
        reply = await harness.raw(harness.request(huge))
        assert reply.fault(413)["message"] == "the body is larger than 524288 bytes"
        head, _, body = harness.request(huge).partition(b"\r\n\r\n")
        head = b"\r\n".join(line for line in head.split(b"\r\n") if not line.startswith(b"Content-Length"))
        chunked = head + b"\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        assert (await harness.raw(chunked)).fault(413)["message"] == "the body is larger than 524288 bytes"
        assert harness.sends() == 1


@pytest.mark.parametrize(
    "method",
    ["eth_chainId", "web3_clientVersion", "pimlico_getUserOperationGasPrice", "rundler_getUserOperationStatus"],
)
@on_uvloop
async def test_gas_price_and_status_methods_are_passed_to_the_bundler(database: str, method: str) -> None:
    async with bundler_harness(database) as harness:
        harness.bundlers[0].answers[method] = lambda _: {"the": "bundler"}
        assert (await harness.call(method)).json["result"] == {"the": "bundler"}

        def lacking(_: Any) -> Any:
            raise Refused(-32601, "Method not found")

        harness.bundlers[0].answers[method] = lacking
        assert error_of(await harness.call(method))["code"] == -32601


@pytest.mark.parametrize(
    "method", ["eth_blockNumber", "pimlico_sendCompressedUserOperation", "debug_bundler_clearState"]
)
@on_uvloop
async def test_any_other_method_does_not_exist(database: str, method: str) -> None:
    async with bundler_harness(database) as harness:
        assert error_of(await harness.call(method)) == {
            "code": -32601,
            "message": f"the method {method} does not exist or is not available",
        }
        assert harness.bundlers[0].calls == []


@on_uvloop
async def test_bundler_methods_do_not_exist_on_the_rpc_path(database: str) -> None:
    async with bundler_harness(database) as harness:
        reply = await harness.worker.send(rpc(SEND, [OPERATION, EP07]))
        assert error_of(reply)["code"] == -32601


@on_uvloop
async def test_network_without_a_bundler_says_so(database: str) -> None:
    async with bundler_harness(database) as harness:
        data = harness.request(rpc(ENTRY_POINTS_METHOD)).replace(b"/mainnet ", b"/sepolia ")
        message = (await harness.raw(data)).fault(404)["message"]
        assert message == "the network ethereum/sepolia is known, but no bundler is configured for it"


# Rights


@on_uvloop
async def test_each_method_needs_its_scope(database: str) -> None:
    async with bundler_harness(database) as harness:
        for scope in ("rpc:read", "bundler:send", "rpc:write", "data:read"):
            harness.worker.add_key(scope, scopes=[scope])
        for scope in ("rpc:read", "bundler:send"):
            for method, params in READS:
                assert (await harness.call(method, *params, key=scope)).status == 200
        refused = (await harness.send(key="rpc:read")).fault(403)
        assert refused["message"].startswith("this API key lacks the scope bundler:send: ")
        assert (await harness.send(key="bundler:send")).json["result"] == HASH
        for scope in ("rpc:write", "data:read"):
            fault = (await harness.call(ENTRY_POINTS_METHOD, key=scope)).fault(403)
            assert fault["message"].startswith("this API key lacks the scope rpc:read or bundler:send: ")
        assert harness.sends() == 1


@on_uvloop
async def test_test_key_does_not_reach_a_live_networks_bundler(database: str) -> None:
    async with bundler_harness(database) as harness:
        harness.worker.add_key("test", live=False)
        assert "live network" in (await harness.send(key="test")).fault(403)["message"]
        assert harness.sends() == 0


@on_uvloop
async def test_reads_cost_the_listed_price_on_both_paths(database: str) -> None:
    """The hot path and the aiohttp path, which handles chunked requests and unusual headers. An operation that no bundler has
    is searched on the chain, which costs the calls that it takes."""
    prices = {ESTIMATE: 25, BY_HASH: 2, RECEIPT: 2, ENTRY_POINTS_METHOD: 1}
    async with bundler_harness(database) as harness:
        for method, params in READS:
            hot = await harness.call(method, *params)
            cold = await harness.call(method, *params, Expect="100-continue")
            assert hot.json == cold.json
            searched = {0, 1, 1 + 8} if method in (BY_HASH, RECEIPT) else {0}
            for reply in (hot, cold):
                assert int(reply.headers["x-compute-units"]) - prices[method] in searched


@on_uvloop
async def test_items_of_a_batch_are_checked_each_on_its_own(database: str) -> None:
    async with bundler_harness(database) as harness:
        harness.chain.answers["eth_getLogs"] = lambda _: []  # a node filters by the hash
        harness.worker.add_key("reader", scopes=["rpc:read"])
        calls: list[tuple[str, list[Any]]] = [
            (SEND, [OPERATION, EP07]),
            (SEND, [{**OPERATION, "nonce": "3"}, EP07]),
            ("eth_blockNumber", []),
            (ENTRY_POINTS_METHOD, []),
            (RECEIPT, [HASH]),
        ]
        reply = await harness.batch(*calls)
        assert [item["id"] for item in reply.json] == [0, 1, 2, 3, 4]
        assert reply.json[0]["result"] == HASH
        assert [item["error"]["code"] for item in reply.json[1:3]] == [-32602, -32601]
        assert reply.json[3]["result"] == [*ENTRY_POINTS.values()]
        assert reply.json[4]["result"] is None
        # The last one is searched on the chain: the head and the logs.
        assert reply.headers["x-compute-units"] == str(50 + 1 + 1 + 1 + 2 + 1 + 8)
        reader = (await harness.batch(*calls, key="reader")).json
        assert "lacks the scope bundler:send: " in reader[0]["error"]["message"]
        assert reader[3]["result"] == [*ENTRY_POINTS.values()]
        assert harness.sends() == 1


# A bundler that fails


@on_uvloop
async def test_send_to_a_dead_bundler_fails_and_costs_nothing(database: str) -> None:
    async with bundler_harness(database, faults=True) as harness:
        await harness.proxies[0].switch("dead")
        harness.worker.add_key("poor", limits=Limits(100, 60, 0))
        for _ in range(2):  # a send costs 50 of the 60 units that the key has for a second
            fault = (await harness.send(key="poor")).fault(500)
            assert fault["message"] == "the call failed on ethereum/mainnet: an upstream failed: connection refused"
        row = await harness.record()
        assert row is not None
        assert row["status"] == "seen"


@on_uvloop
async def test_send_is_not_retried_after_a_timeout_and_the_error_includes_the_hash(database: str) -> None:
    async with bundler_harness(database, 2, bundler={"call_timeout_s": 0.3}) as harness:
        for bundler in harness.bundlers:
            bundler.held = {SEND}
        fault = (await harness.send()).fault(504)
        assert fault["message"] == "the call failed on ethereum/mainnet: no upstream replied within 0.3 s"
        assert fault["details"] == {"user_operation_hash": HASH}
        assert harness.sends() == 1
        row = await harness.record()
        assert row is not None
        assert row["status"] == "seen"


@on_uvloop
async def test_garbage_from_a_bundler_is_never_passed_on_and_nothing_is_sent_twice(database: str) -> None:
    async with bundler_harness(database, 2, faults=True) as harness:
        for proxy in harness.proxies:
            await proxy.switch("garbage")
        for count in range(1, 9):  # as many as there are kinds of it
            operation = {**OPERATION, "nonce": hex(count)}
            fault = (await harness.send(operation)).fault(500)
            assert fault["message"].startswith("the call failed on ethereum/mainnet: an upstream ")
            assert fault["details"] == {"user_operation_hash": hash_v07(operation)}
            assert harness.sends() == count
            for route in harness.worker.app.smart_wallets.bundlers.routes.values():
                for upstream in route.upstreams:  # its breaker is another test's matter
                    upstream.health.succeeded(0.01)


@pytest.mark.parametrize("result", ["0x" + "00" * 32, "not a hash", 42, {"userOpHash": HASH}, [HASH], None, True])
@on_uvloop
async def test_answer_that_is_not_the_operations_hash_is_a_fault(database: str, result: Any) -> None:
    async with bundler_harness(database, 2) as harness:
        for bundler in harness.bundlers:
            bundler.answers[SEND] = lambda params: result
        fault = (await harness.send()).fault(500)
        assert fault["message"] == (
            "the bundler of ethereum/mainnet replied with something other than the operation's hash; "
            "it may have accepted the operation"
        )
        assert fault["details"] == {"user_operation_hash": HASH}
        assert harness.sends() == 1


@on_uvloop
async def test_send_that_never_left_goes_to_another_bundler_and_one_that_may_have_does_not(database: str) -> None:
    async with bundler_harness(database, 2, faults=True) as harness:
        await harness.proxies[0].switch("dead")
        for nonce in range(4):
            operation = {**OPERATION, "nonce": hex(nonce)}
            assert (await harness.send(operation)).json["result"] == hash_v07(operation)
        assert harness.sends() == 4
        await harness.proxies[1].switch("reset")
        assert (await harness.send()).fault(500)["details"] == {"user_operation_hash": HASH}
        assert harness.sends() == 5


@on_uvloop
async def test_reads_are_answered_while_one_of_two_bundlers_fails(database: str) -> None:
    async with bundler_harness(database, 2, faults=True) as harness:
        await harness.proxies[0].switch("dead")
        for _ in range(10):
            assert (await harness.call(ESTIMATE, OPERATION, EP07)).json["result"] == GAS
            assert (await harness.call(ENTRY_POINTS_METHOD)).status == 200


@pytest.mark.parametrize("refused", [False, True])
@on_uvloop
async def test_outcome_is_returned_even_if_the_database_cannot_store_it(database: str, refused: bool) -> None:
    """The disk may be full or the database read-only: the bundler has the operation in any case."""

    def answer(params: list[Any]) -> str:
        if refused:
            raise Refused(-32500, "AA21 didn't pay prefund")
        return HASH

    async with bundler_harness(database) as harness:
        harness.bundlers[0].answers[SEND] = answer
        async with connected(database) as connection:
            await connection.execute("""
                create function refuse() returns trigger language plpgsql as
                    $$ begin raise exception 'no space left' using errcode = 'disk_full'; end $$;
                create trigger full_disk before update on operations for each row execute function refuse();
            """)
        reply = await harness.send()
        assert error_of(reply)["code"] == -32500 if refused else reply.json["result"] == HASH
        row = await harness.record()
        assert row is not None
        assert row["status"] == "seen"


@on_uvloop
async def test_operation_that_cannot_be_recorded_is_not_sent_and_the_error_says_so(database: str) -> None:
    async with bundler_harness(database) as harness:
        async with connected(database) as connection:
            await connection.execute("alter table operations add check (nonce > 1000000)")
        fault = (await harness.send()).fault(500)
        assert fault["message"] == "internal error; the operation was not sent"
        assert harness.sends() == 0


@on_uvloop
async def test_without_a_database_nothing_is_sent(database: str) -> None:
    async with bundler_harness(database) as harness:
        await harness.worker.app.pool.close()
        assert (await harness.send()).fault(503)["code"] == "internal_error"
        assert harness.sends() == 0
        # Calls that need no record still work.
        assert (await harness.call(ESTIMATE, OPERATION, EP07)).json["result"] == GAS


@on_uvloop
async def test_operation_is_sent_to_its_end_when_its_caller_leaves(database: str) -> None:
    async with bundler_harness(database) as harness:
        bundler = harness.bundlers[0]
        bundler.held = {SEND}
        client = await harness.worker.connect()
        await client.write(harness.request(rpc(SEND, [OPERATION, EP07])))
        await until(lambda: bundler.count(SEND) == 1)
        await client.close()
        bundler.gate.set()

        async def is_sent() -> bool:
            row = await harness.record()
            return row is not None and row["status"] == "sent"

        await until(is_sent)
        assert harness.sends() == 1
