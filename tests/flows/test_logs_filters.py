"""Logs over more blocks than an upstream gives at once, and filters, which live in the upstream that made them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from proxy.services.rpc.logs import AT_ONCE, MAX_PIECES
from proxy.wire.upstream import MAX_REPLY_BYTES
from tests.faults import Mode
from tests.http_client import rpc
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import REFUSALS, Refused
from tests.service import until
from tests.shipped_tables import TABLES
from tests.web.worker import LIVE, TEST, on_uvloop, running_worker

FIRST, LAST = 101, 900


def query(first: int = FIRST, last: int | str = LAST, **more: Any) -> list[Any]:
    return [{"fromBlock": hex(first), "toBlock": last if isinstance(last, str) else hex(last), **more}]


def expected(harness: RpcHarness, first: int = FIRST, last: int = LAST) -> list[Any]:
    return [harness.chain.log(number) for number in range(first, last + 1)]


# Logs


@pytest.mark.parametrize("vendor", REFUSALS)
@pytest.mark.parametrize("limit", [1, 7, 100, 799])
@on_uvloop
async def test_range_over_the_limit_is_split_and_joined_in_order(vendor: str, limit: int) -> None:
    async with rpc_harness(1) as harness:
        upstream = harness.upstreams[0]
        upstream.max_range, upstream.refusal = limit, vendor
        first = LAST - min(800, limit * 40) + 1
        assert await harness.result("eth_getLogs", query(first)) == expected(harness, first)
        assert upstream.most_at_once <= AT_ONCE
        assert await harness.result("eth_getLogs", query(LAST - limit + 1)) == expected(harness, LAST - limit + 1)


@on_uvloop
async def test_range_is_cut_at_the_size_that_the_refusal_names() -> None:
    async with rpc_harness(1) as harness:
        upstream = harness.upstreams[0]
        upstream.max_range = 100
        await harness.result("eth_getLogs", query())
        # The whole, which was refused, and eight pieces.
        assert upstream.count("eth_getLogs") == 1 + 8


@on_uvloop
async def test_rest_of_the_filter_goes_with_every_piece_and_open_ends_at_the_head() -> None:
    async with rpc_harness(1) as harness:
        upstream = harness.upstreams[0]
        upstream.max_range = 100
        asked = query(FIRST, "latest", address="0x" + "ab" * 20, topics=[None, ["0x1"]])
        assert await harness.result("eth_getLogs", asked) == expected(harness, FIRST, harness.chain.head)
        asked = query(FIRST, "0xffffffffffff", address="0x" + "ab" * 20, topics=[None, ["0x1"]])
        assert await harness.result("eth_getLogs", asked) == expected(harness, FIRST, harness.chain.head)
        pieces = [call.params[0] for call in upstream.calls if call.method == "eth_getLogs"]
        assert all(piece["address"] == "0x" + "ab" * 20 and piece["topics"] == [None, ["0x1"]] for piece in pieces)


@on_uvloop
async def test_pieces_go_to_upstreams_of_different_limits_and_each_is_cut_as_it_must_be() -> None:
    async with rpc_harness(3) as harness:
        for upstream, limit in zip(harness.upstreams, (10, 64, 200), strict=True):
            upstream.max_range = limit
        for _ in range(3):
            assert await harness.result("eth_getLogs", query(), Cache_Control="no-cache") == expected(harness)


@on_uvloop
async def test_range_over_our_own_limit_is_refused_with_one_that_works() -> None:
    async with rpc_harness(1, rpc={"max_logs_blocks": 300}) as harness:
        harness.upstreams[0].max_range = 100
        reply = await harness.call("eth_getLogs", query())
        error = reply.json["error"]
        assert error["code"] == -32602
        assert f"this block range should work: [{hex(FIRST)}, {hex(FIRST + 299)}]" in error["message"]
        assert error["data"] == {"suggested_from": hex(FIRST), "suggested_to": hex(FIRST + 299)}
        assert harness.count("eth_getLogs") == 1
        works = [{"fromBlock": error["data"]["suggested_from"], "toBlock": error["data"]["suggested_to"]}]
        assert await harness.result("eth_getLogs", works) == expected(harness, FIRST, FIRST + 299)


@on_uvloop
async def test_wide_range_that_an_upstream_gives_at_once_is_given() -> None:
    async with rpc_harness(1, rpc={"max_logs_blocks": 10}) as harness:
        assert await harness.result("eth_getLogs", query()) == expected(harness)
        assert harness.count("eth_getLogs") == 1


@on_uvloop
async def test_single_block_that_is_refused_is_refused() -> None:
    def refuse(_: list[Any]) -> Any:
        raise Refused(-32005, "query returned more than 10000 results")

    async with rpc_harness(1) as harness:
        harness.upstreams[0].answers["eth_getLogs"] = refuse
        for last in (FIRST, FIRST + 5):
            reply = await harness.call("eth_getLogs", query(FIRST, last))
            assert reply.json["error"]["code"] == -32602, reply.json


@on_uvloop
async def test_range_that_would_take_too_many_pieces_is_refused_with_one_that_works() -> None:
    async with rpc_harness(1) as harness:
        harness.chain.head = 50_000
        await harness.look()
        upstream = harness.upstreams[0]
        upstream.max_range, upstream.refusal = 1, "quicknode"
        error = (await harness.call("eth_getLogs", query(1, 40_000))).json["error"]
        assert error["data"] == {"suggested_from": "0x1", "suggested_to": hex(MAX_PIECES)}
        assert upstream.count("eth_getLogs") == 1
        assert len(await harness.result("eth_getLogs", query(1, MAX_PIECES))) == MAX_PIECES
        assert upstream.most_at_once <= AT_ONCE


@on_uvloop
async def test_refusal_that_names_no_size_is_cut_at_ours() -> None:
    async with rpc_harness(1, rpc={"logs_chunk_blocks": 100}) as harness:
        upstream = harness.upstreams[0]
        upstream.max_range, upstream.refusal = 100, "nameless"
        assert await harness.result("eth_getLogs", query()) == expected(harness)
        assert upstream.count("eth_getLogs") == 1 + 8


@on_uvloop
async def test_logs_of_too_many_bytes_are_refused_with_fewer_blocks() -> None:
    async with rpc_harness(1) as harness:
        upstream = harness.upstreams[0]
        upstream.max_range = 100
        whole = "x" * (MAX_REPLY_BYTES // 3)
        upstream.answers["eth_getLogs"] = lambda params: (
            [whole] if len(upstream._eth_getLogs(params)) > 1 else upstream._eth_getLogs(params)
        )
        reply = await harness.call("eth_getLogs", query())
        error = reply.json["error"]
        assert error["code"] == -32602
        assert error["data"]["suggested_from"] == hex(FIRST)
        assert FIRST + 100 < int(error["data"]["suggested_to"], 16) < FIRST + 400
        works = query(FIRST, int(error["data"]["suggested_to"], 16))
        assert len(await harness.result("eth_getLogs", works)) == 2
        assert "logs" not in repr(harness.worker.app.tasks)


@on_uvloop
async def test_range_that_two_upstreams_refuse_at_once_is_cut_once() -> None:
    async with rpc_harness(2) as harness:
        for upstream in harness.upstreams:
            upstream.max_range, upstream.held = 100, {"eth_getLogs"}
        asking = asyncio.get_running_loop().create_task(harness.call("eth_getLogs", query()))
        await until(lambda: all(upstream.count("eth_getLogs") for upstream in harness.upstreams), every_s=0.001)
        for upstream in harness.upstreams:
            upstream.held = set()
            upstream.gate.set()
        assert (await asking).json["result"] == expected(harness)
        pieces = [call.params[0]["fromBlock"] for upstream in harness.upstreams for call in upstream.calls
                  if call.method == "eth_getLogs" and call.params != query()]  # fmt: skip
        # One that is late may be asked for twice: never all of them.
        assert len(set(pieces)) == 8
        assert len(pieces) < 12


@on_uvloop
async def test_filter_is_not_split() -> None:
    def refuse(params: list[Any]) -> Any:
        raise Refused(-32614, "eth_getLogs and eth_newFilter are limited to a 100 blocks range")

    async with rpc_harness(1) as harness:
        harness.upstreams[0].answers["eth_newFilter"] = refuse
        error = (await harness.call("eth_newFilter", query())).json["error"]
        assert error["code"] == -32602
        assert "limited to a 100 blocks range" in error["message"]
        assert harness.count("eth_newFilter") == 1


@pytest.mark.parametrize(
    ("page", "part"),
    [
        ({}, slice(0, None)),
        ({"after": 3, "count": 150}, slice(3, 153)),
        ({"count": "0x5"}, slice(0, 5)),
        ({"after": 799}, slice(799, None)),
        ({"after": 9000, "count": 1}, slice(0, 0)),
    ],
)
@on_uvloop
async def test_traces_are_split_by_blocks_and_their_page_is_of_the_whole(page: dict[str, Any], part: slice) -> None:
    def traces(params: list[Any]) -> Any:
        first, last = (int(params[0][name], 16) for name in ("fromBlock", "toBlock"))
        if last - first >= 100:
            raise Refused(-32614, "trace_filter is limited to a 100 range")
        assert not params[0].keys() & {"after", "count"}
        return [{"blockNumber": number, "traceAddress": []} for number in range(first, last + 1)]

    async with rpc_harness(1) as harness:
        harness.upstreams[0].answers["trace_filter"] = traces
        reply = await harness.call("trace_filter", query(**page))
        assert [each["blockNumber"] for each in reply.json["result"]] == [*range(FIRST, LAST + 1)][part]
        assert harness.count("trace_filter") == 1 + 8
        price = max(TABLES.methods["evm"]["trace_filter"].price, TABLES.prices.archive_minimum)
        assert int(reply.headers["x-compute-units"]) == 9 * price


def a_trace(block: int, position: int | None, address: list[int], sender: int, receiver: int) -> dict[str, Any]:
    if position is None:
        action = {"author": f"0x{receiver:040X}", "rewardType": "block" if sender else "uncle", "value": "0x1"}
    else:
        action = {"from": f"0x{sender:040x}", "to": f"0x{receiver:040x}"}
    return {"action": action, "blockNumber": block, "transactionPosition": position, "traceAddress": address}


# In the order of a node: blocks, transactions, and calls before those that they make; then rewards.
TRACES = [
    a_trace(block, position, address, (block + position * 3 + len(address)) % 7, (block * position + sum(address)) % 7)
    for block in range(300, 310)
    for position in range(12)
    for address in ([], [0], [0, 0], [0, 1], [1], [2], [10])
]
TRACES = [
    each
    for block in range(300, 310)
    for each in (
        *(trace for trace in TRACES if trace["blockNumber"] == block),
        a_trace(block, None, [], 1, block % 7),
        a_trace(block, None, [], 0, 3),
        a_trace(block, None, [], 0, 3),
    )
]


@pytest.mark.parametrize("mode", ["union", "intersection"])
@pytest.mark.parametrize("most", [1, 2, 5])
@on_uvloop
async def test_traces_of_many_addresses_are_split_and_joined_in_order_without_doubles(most: int, mode: str) -> None:
    def wanted(given: dict[str, Any]) -> list[Any]:
        senders, receivers = ({each.lower() for each in given[name]} for name in ("fromAddress", "toAddress"))
        first, last = (int(given[name], 16) for name in ("fromBlock", "toBlock"))
        both = [
            (each["action"].get("from", "") in senders, each["action"].get("to", each["action"].get("author")).lower())
            for each in TRACES
        ]
        fits = [
            (sends or to in receivers) if given["mode"] == "union" else (sends and to in receivers)
            for sends, to in both
        ]
        return [each for each, fit in zip(TRACES, fits, strict=True) if fit and first <= each["blockNumber"] <= last]

    def traces(params: list[Any]) -> Any:
        if max(len(params[0][name]) for name in ("fromAddress", "toAddress")) > most:
            raise Refused(-32602, f"too many addresses: the maximum number of addresses is {most}")
        return wanted(params[0])

    filters: dict[str, Any] = {"fromAddress": many(6), "toAddress": many(5), "mode": mode}
    async with rpc_harness(2) as harness:
        for upstream in harness.upstreams:
            upstream.answers["trace_filter"] = traces
        (whole,) = query(**filters)
        reply = await harness.call("trace_filter", [whole])
        assert reply.json["result"] == wanted(whole)
        price = max(TABLES.methods["evm"]["trace_filter"].price, TABLES.prices.archive_minimum)
        assert int(reply.headers["x-compute-units"]) == harness.count("trace_filter") * price
        paged = await harness.result("trace_filter", [{**whole, "after": 7, "count": 20}])
        assert paged == wanted(whole)[7:27]


@on_uvloop
async def test_traces_without_a_beginning_are_not_split() -> None:
    def refuse(params: list[Any]) -> Any:
        raise Refused(-32614, "trace_filter is limited to a 100 range")

    async with rpc_harness(1) as harness:
        harness.upstreams[0].answers["trace_filter"] = refuse
        for call in ({"toBlock": "latest"}, {"fromBlock": "0x1", "toBlock": "latest", "after": "x"}):
            assert (await harness.call("trace_filter", [call])).json["error"]["code"] == -32602
        assert harness.count("trace_filter") == 2


def many(count: int) -> list[str]:
    return [f"0x{number:040x}" for number in range(count)]


@pytest.mark.parametrize("most", [1, 3, 10])
@pytest.mark.parametrize("by", ["address", "topics"])
@on_uvloop
async def test_logs_by_many_addresses_or_topics_are_split_joined_in_order_and_paid_for(by: str, most: int) -> None:
    wanted = many(20)

    def logs(params: list[Any]) -> Any:
        query = params[0]
        chosen = query["address"] if by == "address" else query["topics"][1]
        if len(chosen) > most:
            raise Refused(-32000, "exceed max addresses or topics per search position")
        assert by == "address" or query["topics"][0] == "0xaa"
        first, last = int(query["fromBlock"], 16), int(query["toBlock"], 16)
        return [
            {"blockNumber": hex(number), "logIndex": hex(index), "address": each}
            for number in range(first, last + 1)
            for index, each in enumerate(wanted)
            if each in chosen
        ]

    async with rpc_harness(1) as harness:
        harness.upstreams[0].answers["eth_getLogs"] = logs
        # One is named twice.
        named = [*wanted, wanted[0]]
        chosen = {"address": named} if by == "address" else {"topics": ["0xaa", named, None]}
        reply = await harness.call("eth_getLogs", query(101, 103, **chosen))
        assert "result" in reply.json, reply
        found = [(int(each["blockNumber"], 16), each["address"]) for each in reply.json["result"]]
        assert found == [(number, each) for number in (101, 102, 103) for each in wanted]
        price = max(TABLES.methods["evm"]["eth_getLogs"].price, TABLES.prices.archive_minimum)
        assert int(reply.headers["x-compute-units"]) == harness.count("eth_getLogs") * price


@on_uvloop
async def test_logs_are_split_by_addresses_and_by_blocks() -> None:
    def logs(params: list[Any]) -> Any:
        first, last = (int(params[0][name], 16) for name in ("fromBlock", "toBlock"))
        if len(params[0]["address"]) > 2:
            raise Refused(-32602, "too many addresses: please specify less number of addresses")
        if last - first >= 10:
            raise Refused(-32614, "eth_getLogs is limited to a 10 range")
        return [
            {"blockNumber": hex(number), "logIndex": each, "address": each}
            for number in range(first, last + 1)
            for each in params[0]["address"]
        ]

    async with rpc_harness(1) as harness:
        harness.upstreams[0].answers["eth_getLogs"] = logs
        result = await harness.result("eth_getLogs", query(101, 140, address=many(5)))
        assert [(int(each["blockNumber"], 16), each["address"]) for each in result] == [
            (number, each) for number in range(101, 141) for each in many(5)
        ]


def failing_at(harness: RpcHarness, block: int, answer: Any) -> Any:
    upstream = harness.upstreams[0]

    def logs(params: list[Any]) -> Any:
        first, last = int(params[0]["fromBlock"], 16), int(params[0]["toBlock"], 16)
        if last - first + 1 <= 100 and first <= block <= last:
            if isinstance(answer, Exception):
                raise answer
            return answer
        return upstream._eth_getLogs(params)

    return logs


@pytest.mark.parametrize("block", [FIRST, 500, LAST])
@on_uvloop
async def test_any_piece_that_fails_fails_the_whole(block: int) -> None:
    async with rpc_harness(1) as harness:
        harness.upstreams[0].max_range = 100
        harness.upstreams[0].answers["eth_getLogs"] = failing_at(harness, block, Refused(-32602, "invalid address"))
        reply = await harness.call("eth_getLogs", query())
        assert reply.json["error"] == {"code": -32602, "message": "invalid address"}
        harness.upstreams[0].answers["eth_getLogs"] = failing_at(harness, block, {"no": "array"})
        (await harness.call("eth_getLogs", query())).fault(500)
        # It was not tried again behind anyone's back.
        assert "logs" not in repr(harness.worker.app.tasks)


@pytest.mark.parametrize("mode", ["reset", "garbage", "dead"])
@on_uvloop
async def test_upstreams_that_fail_in_the_middle_fail_the_whole(mode: Mode) -> None:
    async with rpc_harness(2, faults=True) as harness:
        for upstream in harness.upstreams:
            upstream.max_range = 10
            upstream.held = {"eth_getLogs"}
            upstream.gate.set()
        asking = asyncio.get_running_loop().create_task(harness.call("eth_getLogs", query()))
        await until(lambda: harness.count("eth_getLogs") > 4, every_s=0.001)
        for proxy in harness.proxies:
            await proxy.switch(mode)
        reply = await asking
        assert reply.status in (500, 503)


@on_uvloop
async def test_pieces_have_the_time_that_the_whole_has() -> None:
    async with rpc_harness(1, rpc={"call_timeout_s": 0.4}) as harness:
        upstream = harness.upstreams[0]
        upstream.max_range = 1
        reply = asyncio.get_running_loop().create_task(harness.call("eth_getLogs", query()))
        await until(lambda: upstream.count("eth_getLogs") > 3)
        upstream.held = {"eth_getLogs"}
        (await reply).fault(504)


@on_uvloop
async def test_caller_that_leaves_stops_the_pieces() -> None:
    async with rpc_harness(1) as harness:
        upstream = harness.upstreams[0]
        upstream.max_range, upstream.held = 10, {"eth_getLogs"}
        upstream.gate.set()
        client = await harness.worker.connect()
        await client.write(harness.worker.post(rpc("eth_getLogs", query()), network=harness.network))
        await until(lambda: upstream.count("eth_getLogs") >= 3, every_s=0.001)
        upstream.gate.clear()
        await client.close()
        await until(lambda: not harness.route.state.flights)
        upstream.gate.set()
        await until(lambda: "logs" not in repr(harness.worker.app.tasks))
        assert upstream.count("eth_getLogs") < 40


@on_uvloop
async def test_split_logs_in_a_batch_are_in_their_place_and_final_ones_are_kept() -> None:
    async with rpc_harness(1) as harness:
        harness.upstreams[0].max_range = 100
        reply = await harness.batch(("eth_chainId", []), ("eth_getLogs", query()), ("eth_chainId", []))
        assert [item["id"] for item in reply.json] == [0, 1, 2]
        assert reply.json[1]["result"] == expected(harness)
        assert (await harness.call("eth_getLogs", query())).headers["x-cache"] == "hit"


# Blocks that were not seen yet


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("end", ["number", "latest"])
@on_uvloop
async def test_split_range_includes_blocks_that_came_after_the_last_poll(count: int, end: str) -> None:
    async with rpc_harness(count) as harness:
        for upstream in harness.upstreams:
            upstream.max_range, upstream.refusal = 10, "geth"
        harness.chain.head += 3
        first, last = harness.chain.head - 24, harness.chain.head
        asked = query(first, last if end == "number" else "latest")
        assert await harness.result("eth_getLogs", asked) == expected(harness, first, last)


@pytest.mark.parametrize("limit", [0, 10])
@pytest.mark.parametrize("lead", [1, 2])
@on_uvloop
async def test_logs_come_from_the_upstream_that_has_the_last_block(limit: int, lead: int) -> None:
    """The other upstream does not have it yet and would leave out its logs; neither was polled since."""

    async with rpc_harness(2) as harness:
        for upstream in harness.upstreams:
            upstream.max_range = limit
        harness.chain.head += lead
        harness.upstreams[0].behind = lead
        first, last = harness.chain.head - 24, harness.chain.head
        for _ in range(8):
            assert await harness.result("eth_getLogs", query(first, last), Cache_Control="no-cache") == expected(
                harness, first, last
            )


@on_uvloop
async def test_split_range_fails_if_no_upstream_reports_its_head() -> None:
    async with rpc_harness(2, rpc={"call_timeout_s": 1.0}) as harness:
        for upstream in harness.upstreams:
            upstream.max_range = 10
            upstream.held = {"eth_blockNumber", "eth_getBlockByNumber"}
        harness.chain.head += 1
        reply = await harness.call("eth_getLogs", query(harness.chain.head - 24, harness.chain.head))
        assert reply.status in (503, 504)


@on_uvloop
async def test_split_range_fails_if_only_an_upstream_without_its_last_block_is_left() -> None:
    async with rpc_harness(2) as harness:
        ahead, behind = harness.upstreams
        behind.max_range = ahead.max_range = 10
        harness.chain.head += 1
        behind.behind = 1
        await harness.look()
        harness.route.upstreams[0].health.cordon(cordoned=True, now=0.0)
        fault = (await harness.call("eth_getLogs", query(harness.chain.head - 24, harness.chain.head))).fault(503)
        assert "at the moment: try again" in fault["message"]


@on_uvloop
async def test_split_range_fails_if_the_chain_is_reorganised_meanwhile() -> None:
    async with rpc_harness(1) as harness:
        upstream = harness.upstreams[0]
        upstream.max_range, upstream.held = 10, {"eth_getLogs"}
        upstream.gate.set()
        first, last = harness.chain.head - 99, harness.chain.head
        asking = asyncio.get_running_loop().create_task(harness.call("eth_getLogs", query(first, last)))
        await until(lambda: upstream.count("eth_getLogs") > 3, every_s=0.001)
        upstream.gate.clear()
        harness.chain.reorganise(3)
        await harness.look()
        upstream.gate.set()
        assert "reorganised" in (await asking).fault(503)["message"]


# Filters


@on_uvloop
async def test_filter_sticks_to_the_upstream_that_made_it() -> None:
    async with rpc_harness(3) as harness:
        names = []
        for only in harness.route.upstreams:
            for each in harness.route.upstreams:
                each.health.cordon(cordoned=each is not only, now=time.monotonic())
            names += [await harness.result("eth_newFilter", [{}]) for _ in range(4)]
        for each in harness.route.upstreams:
            each.health.cordon(cordoned=False, now=time.monotonic())
        assert [upstream.count("eth_newFilter") for upstream in harness.upstreams] == [4, 4, 4]
        assert len(set(names)) == 12
        for _ in range(3):
            harness.chain.head += 1
            for name in names:
                changes = await harness.result("eth_getFilterChanges", [name])
                assert changes == [harness.chain.hash_of(harness.chain.head)]
        assert [await harness.result("eth_uninstallFilter", [name]) for name in names] == [True] * 12
        reply = await harness.call("eth_getFilterChanges", [names[0]])
        assert reply.json["error"]["message"] == "filter not found"


@pytest.mark.parametrize("last", [LAST, "latest"])
@on_uvloop
async def test_logs_of_a_filter_are_split_where_its_upstream_refuses_them(last: int | str) -> None:
    def refuse(_: list[Any]) -> Any:
        raise Refused(-32000, "exceed maximum block range: 100")

    async with rpc_harness(2) as harness:
        for upstream in harness.upstreams:
            upstream.max_range, upstream.answers["eth_getFilterLogs"] = 100, refuse
        asked = query(FIRST, last, address=["0x" + f"{n:040x}" for n in range(3)], topics=[None, ["0x" + "5" * 64]])
        name = await harness.result("eth_newFilter", asked)
        logs = await harness.result("eth_getFilterLogs", [name])
        assert logs == expected(harness, FIRST, harness.chain.head if last == "latest" else LAST)
        assert await harness.result("eth_getFilterChanges", [name]) == []
        assert await harness.result("eth_uninstallFilter", [name]) is True


@on_uvloop
async def test_filter_with_very_many_addresses_works_without_its_params_in_the_id() -> None:
    async with rpc_harness(1) as harness:
        name = await harness.result("eth_newFilter", query(address=[f"0x{n * 7919:040x}" for n in range(1000)]))
        assert len(name) < 100
        assert await harness.result("eth_getFilterChanges", [name]) == []


@pytest.mark.parametrize("own_id", ['0x"', "0x\\", "0x\n", "0xü", "0x", "", "a b", 1, None, ["0x1"]])
@on_uvloop
async def test_invalid_filter_id_from_an_upstream_is_returned_unchanged(own_id: Any) -> None:
    async with rpc_harness(1) as harness:
        harness.upstreams[0].answers["eth_newBlockFilter"] = lambda _: own_id
        assert await harness.result("eth_newBlockFilter") == own_id


@on_uvloop
async def test_filter_of_another_key_and_forged_ids_are_not_found() -> None:
    async with rpc_harness(2) as harness:
        harness.worker.add_key("other")
        name = await harness.result("eth_newBlockFilter")
        polled = sum(upstream.count("eth_getFilterChanges") for upstream in harness.upstreams)
        forged = [
            name[:-1] + ("0" if name[-1] != "0" else "1"),
            "0x01" + name[4:] if name[2:4] == "00" else "0x00" + name[4:],
            "0x" + "0" * 16 + name[18:],
            "0x00" + name[2:],
            name[:18],
            "0xf000",
            "0x",
            "",
            name.upper(),
            name + "é",
            name[:6] + "é" + name[7:],
            "é" + name,
        ]
        for each in forged:
            reply = await harness.call("eth_getFilterChanges", [each])
            assert reply.json["error"] == {"code": -32000, "message": "filter not found"}
        for params in ([], [1], [None], [name, name], [[name]]):
            assert "error" in (await harness.call("eth_getFilterChanges", params)).json
        reply = await harness.call("eth_getFilterChanges", [name], key="other")
        assert reply.json["error"]["message"] == "filter not found"
        assert sum(upstream.count("eth_getFilterChanges") for upstream in harness.upstreams) == polled
        assert await harness.result("eth_getFilterChanges", [name]) == []


@on_uvloop
async def test_filter_of_one_network_is_unknown_on_another() -> None:
    async with rpc_harness(1) as harness:
        url = harness.upstreams[0].url
        async with running_worker({LIVE: [url], TEST: [url]}) as both:
            name = (await both.send(rpc("eth_newBlockFilter"), network=LIVE)).json["result"]
            assert "result" in (await both.send(rpc("eth_getFilterChanges", [name]), network=LIVE)).json
            assert "error" in (await both.send(rpc("eth_getFilterChanges", [name]), network=TEST)).json


@on_uvloop
async def test_filter_made_by_one_worker_is_polled_through_another() -> None:
    async with rpc_harness(3) as harness:
        urls = [upstream.url for upstream in harness.upstreams]
        async with running_worker({LIVE: urls}) as one, running_worker({LIVE: urls}) as other:
            for _ in range(6):
                name = (await one.send(rpc("eth_newBlockFilter"))).json["result"]
                harness.chain.head += 1
                reply = await other.send(rpc("eth_getFilterChanges", [name]))
                assert reply.json["result"] == [harness.chain.hash_of(harness.chain.head)]


@on_uvloop
async def test_filter_is_found_after_the_order_of_upstreams_changed() -> None:
    async with rpc_harness(2) as harness:
        one, other = (upstream.url for upstream in harness.upstreams)
        async with running_worker({LIVE: [one]}) as before:
            name = (await before.send(rpc("eth_newBlockFilter"))).json["result"]
        harness.upstreams[1]._eth_newBlockFilter([])  # Its ids count as the other's do.
        harness.chain.head += 1
        async with running_worker({LIVE: [other, one]}) as moved:
            reply = await moved.send(rpc("eth_getFilterChanges", [name]))
            assert reply.json["result"] == [harness.chain.hash_of(harness.chain.head)]
        async with running_worker({LIVE: [other]}) as removed:
            reply = await removed.send(rpc("eth_getFilterChanges", [name]))
            assert reply.json["error"]["message"] == "filter not found"
        assert harness.upstreams[1].count("eth_getFilterChanges") == 0


@on_uvloop
async def test_poll_is_not_sent_to_another_upstream_when_the_filters_own_is_down() -> None:
    async with rpc_harness(2, faults=True) as harness:
        await harness.proxies[1].switch("dead")
        name = await harness.result("eth_newBlockFilter")
        await harness.proxies[1].switch("pass")
        await harness.proxies[0].switch("dead")
        reply = await harness.call("eth_getFilterChanges", [name])
        assert reply.status in (500, 503)
        assert harness.upstreams[1].count("eth_getFilterChanges") == 0


@on_uvloop
async def test_new_filters_are_neither_kept_nor_shared() -> None:
    async with rpc_harness(1) as harness:
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(harness.result("eth_newBlockFilter")) for _ in range(10)]
        assert len({task.result() for task in asked}) == 10
