"""Upstreams of another chain, on another branch, or of a chain that is reorganised: no reply may come from the wrong block."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.__main__ import main
from proxy.services.rpc.tracker import Tracker, start_tracking
from tests.guide_pages import free_port
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import Chain, Refused, ScriptedUpstream, scripted
from tests.service import until
from tests.sockets import connected
from tests.svm_upstreams import SvmChain, SvmUpstream
from tests.web.worker import on_uvloop

ADDRESS = "0x" + "ab" * 20
TX = "0x" + "cd" * 32
FINALITY = 64


def fork(harness: RpcHarness, upstream: ScriptedUpstream, depth: int) -> Chain:
    """Put one upstream on another branch, which begins so many blocks ago."""
    chain = harness.chain
    upstream.chain = Chain(chain.head, chain.name, chain.identity, {chain.head - depth + 1: 1})
    return upstream.chain


# Another chain


@pytest.mark.parametrize("count", [1, 2, 3])
@on_uvloop
async def test_upstream_of_another_chain_gets_no_calls_until_it_serves_ours(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="penstock.heads"):
        async with rpc_harness(count) as harness:
            stray = harness.upstreams[0]
            stray.answers["eth_chainId"] = lambda _: "0x539"
            for _ in range(2):
                harness.tracker = Tracker(harness.route.state)
                await harness.look()
            await harness.shows("wrong_chain", *["up"] * (count - 1))
            for _ in range(10):
                reply = await harness.call("eth_getBalance", [ADDRESS, "latest"], Cache_Control="no-cache")
                assert reply.status == (200 if count > 1 else 503)
            assert stray.count("eth_getBalance") == 0
            assert harness.route.heads.tip == harness.chain.head
            del stray.answers["eth_chainId"]
            await harness.look()
            await harness.shows(*["up"] * count)
            assert (await harness.call("eth_getBalance", [ADDRESS, "latest"], Cache_Control="no-cache")).status == 200
    assert [record.levelname for record in caplog.records if "another chain" in record.message] == ["ERROR"]


@pytest.mark.parametrize(("code", "text"), [(-32005, "limit exceeded"), (-32601, "the method does not exist")])
@on_uvloop
async def test_upstream_of_another_chain_gets_no_calls_after_it_refuses_to_name_it(code: int, text: str) -> None:
    def refuse(_: Any) -> Any:
        raise Refused(code, text)

    async with rpc_harness(2) as harness:
        stray = harness.upstreams[0]
        stray.answers["eth_chainId"] = lambda _: "0x539"
        harness.tracker = Tracker(harness.route.state)
        await harness.shows("wrong_chain", "up")
        stray.answers["eth_chainId"] = refuse
        for _ in range(2):
            await harness.look()
            assert harness.states == ["wrong_chain", "up"]


@on_uvloop
async def test_upstream_that_limits_our_rate_has_not_named_its_chain() -> None:
    def refuse(_: Any) -> Any:
        raise Refused(-32005, "limit exceeded")

    async with rpc_harness(1) as harness:
        upstream = harness.upstreams[0]
        upstream.answers["eth_chainId"] = refuse
        await start_tracking([harness.tracker], harness.worker.app.tasks)
        await until(lambda: upstream.count("eth_chainId") > 1)
        assert harness.states != ["up"]
        del upstream.answers["eth_chainId"]
        await harness.shows("up")


@on_uvloop
async def test_upstream_gets_no_call_before_it_has_named_its_chain() -> None:
    async with rpc_harness(1) as harness:
        upstream = harness.upstreams[0]
        upstream.held = {"eth_chainId"}
        async with asyncio.TaskGroup() as group:
            starting = group.create_task(start_tracking([harness.tracker], harness.worker.app.tasks))
            await until(lambda: upstream.count("eth_chainId") > 1)
            assert harness.states == ["unchecked"]
            assert (await harness.call("eth_gasPrice")).status == 503
            assert not starting.done()
            upstream.gate.set()
        await harness.shows("up")
        assert (await harness.call("eth_gasPrice")).status == 200


@on_uvloop
async def test_upstream_that_does_not_name_its_chain_is_used() -> None:
    def refuse(_: list[Any]) -> Any:
        raise Refused(-32601, "the method eth_chainId does not exist")

    async with rpc_harness(1) as harness:
        harness.upstreams[0].answers["eth_chainId"] = refuse
        harness.tracker.withhold()
        await harness.look()
        await harness.shows("up")


@on_uvloop
async def test_solana_upstream_of_another_cluster_gets_no_calls() -> None:
    async with rpc_harness(2, network="solana/devnet", chain=SvmChain(), kind=SvmUpstream) as harness:
        stray = harness.upstreams[0]
        stray.answers["getGenesisHash"] = lambda _: "5eykt4UsFv8P8NJdTREpY1vzqKqZKvdpKuc147dw2N9d"
        harness.tracker = Tracker(harness.route.state)
        await harness.look()
        await harness.shows("wrong_chain", "up")
        before = stray.count("getBlockHeight")
        for _ in range(6):
            await harness.result("getBlockHeight", Cache_Control="no-cache")
        assert stray.count("getBlockHeight") == before


CONFIG = """
database.url = "postgresql://nobody@127.0.0.1:1/nothing"
keys.pepper = "a pepper that no attacker can guess"
"""


@pytest.mark.parametrize(("chain_id", "code", "state"), [("1", 0, "up"), ("1337", 1, "wrong_chain")])
@on_uvloop
async def test_check_connect_fails_for_an_upstream_of_another_chain(
    chain_id: str, code: int, state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with scripted(2, Chain()) as upstreams:
        upstreams[0].answers["eth_chainId"] = lambda _: hex(int(chain_id))
        file = tmp_path / "penstock.toml"
        blocks = [f'[[upstreams]]\nnetwork = "ethereum/mainnet"\nurl = "{each.url}"\n' for each in upstreams]
        file.write_text(CONFIG + "".join(blocks))
        words = ["check", "--offline", "--connect", "--config", str(file)]
        assert await asyncio.to_thread(main, words) == code
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.startswith("ethereum/")}
    assert rows["ethereum/mainnet#1"][0] == state
    second = rows["ethereum/mainnet#2"]
    assert second[:4] == ["up", "1", "1000", "0"]
    assert "all=0" in second
    assert second[-2:] == ["yes", "local"]


@on_uvloop
async def test_upstreams_test_names_each_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with scripted(2, Chain()) as upstreams:
        upstreams[1].answers["eth_chainId"] = lambda _: "0x539"
        refused = f"{upstreams[0].url}no/such/path"
        urls = [each.url for each in upstreams] + [refused, f"http://127.0.0.1:{free_port()}/"]
        file = tmp_path / "penstock.toml"
        blocks = [f'[[upstreams]]\nnetwork = "ethereum/mainnet"\nurl = "{url}"\n' for url in urls]
        file.write_text(CONFIG + blocks[0])
        assert await asyncio.to_thread(main, ["upstreams", "test", "--config", str(file)]) == 0
        file.write_text(CONFIG + "".join(blocks))
        words = ["upstreams", "test", "--json", "--config", str(file)]
        capsys.readouterr()
        assert await asyncio.to_thread(main, words) == 1
    found = {row["part"]: (row["state"], row["problem"]) for row in orjson.loads(capsys.readouterr().out)}
    assert found == {
        "ethereum/mainnet#1": ("up", ""),
        "ethereum/mainnet#2": ("wrong_chain", "it is on chain 1337, and ethereum/mainnet is 1"),
        "ethereum/mainnet#3": ("silent", "its reply to eth_chainId is not JSON-RPC (HTTP status 404)"),
        "ethereum/mainnet#4": ("silent", "connection refused"),
    }


def test_upstreams_test_needs_upstreams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(CONFIG)
    assert main(["upstreams", "test", "--config", str(file)]) == 2
    assert capsys.readouterr().err == "penstock: the settings have no upstreams: add [[upstreams]] blocks\n"


# Another branch


async def hashes_at(harness: RpcHarness, heights: range) -> list[set[str]]:
    """The hashes that clients get for each height in several reads."""
    return [
        {
            (await harness.result("eth_getBlockByNumber", [hex(height), False], Cache_Control="no-cache"))["hash"]
            for _ in range(4)
        }
        for height in heights
    ]


@pytest.mark.parametrize("depth", [1, 3, 100])
@pytest.mark.parametrize("position", [0, 2])
@on_uvloop
async def test_upstream_on_another_branch_than_the_two_others_gets_no_calls(depth: int, position: int) -> None:
    async with rpc_harness(3) as harness:
        forked = fork(harness, harness.upstreams[position], depth)
        await harness.look()
        await harness.shows(*["forked" if index == position else "up" for index in range(3)])
        heights = range(harness.chain.head - 5, harness.chain.head + 1)
        assert await hashes_at(harness, heights) == [{harness.chain.hash_of(height)} for height in heights]
        # It stays out while both branches grow, at its own pace, and comes back when it is on ours.
        forked.head += 1
        harness.chain.head += 1
        await harness.look()
        assert harness.states[position] == "forked"
        harness.upstreams[position].chain = harness.chain
        await harness.look()
        await harness.shows(*["up"] * 3)


@pytest.mark.parametrize("position", [0, 1])
@on_uvloop
async def test_one_of_two_that_finality_contradicts_gets_no_calls(position: int) -> None:
    """It is ahead, which would decide between two short branches."""

    async with rpc_harness(2) as harness:
        fork(harness, harness.upstreams[position], FINALITY + 10).head += 1
        await harness.look()
        await harness.shows(*["forked" if index == position else "up" for index in range(2)])
        # Nor does it when it is the only one left.
        harness.upstreams[1 - position].held = {"eth_getBlockByNumber", "eth_chainId"}
        await harness.look()
        assert harness.states[position] == "forked"
        harness.upstreams[1 - position].gate.set()


@pytest.mark.parametrize("position", [0, 1])
@on_uvloop
async def test_one_of_two_that_forks_while_the_other_is_behind_gets_no_calls(position: int) -> None:
    """It is the only one near the head, so it has no opponent in the vote."""

    async with rpc_harness(2) as harness:
        harness.upstreams[1 - position].behind = 5
        fork(harness, harness.upstreams[position], FINALITY + 10)
        for _ in range(2):
            await harness.look()
            assert [state == "forked" for state in harness.states] == [index == position for index in range(2)]


@on_uvloop
async def test_of_two_short_branches_the_longer_is_used_and_the_other_when_it_is_left_alone() -> None:
    async with rpc_harness(2) as harness:
        fork(harness, harness.upstreams[1], 2).head += 1
        await harness.look()
        await harness.shows("forked", "up")
        harness.upstreams[1].held = {"eth_getBlockByNumber", "eth_chainId"}

        async def is_up() -> bool:
            await harness.look()
            return harness.states[0] == "up"

        await until(is_up)
        harness.upstreams[1].gate.set()


@on_uvloop
async def test_replies_of_an_upstream_that_turns_out_to_be_on_another_branch_are_discarded() -> None:
    async with rpc_harness(3) as harness:
        fork(harness, harness.upstreams[0], 100)
        heights = range(harness.chain.head - 95, harness.chain.head - 70)

        async def wrong() -> int:
            hashes = [(await harness.result("eth_getBlockByNumber", [hex(n), False]))["hash"] for n in heights]
            return sum(a != harness.chain.hash_of(n) for n, a in zip(heights, hashes, strict=True))

        others = harness.route.upstreams[1:]
        for upstream in others:
            upstream.health.cordon(cordoned=True, now=time.monotonic())
        assert await wrong() > 0
        for upstream in others:
            upstream.health.cordon(cordoned=False, now=time.monotonic())
        await harness.shows("forked", "up", "up")
        assert await wrong() == 0


@on_uvloop
async def test_head_that_only_a_forked_upstream_had_is_given_up_with_it() -> None:
    async with rpc_harness(3) as harness:
        fork(harness, harness.upstreams[0], 3).head += 1
        for others in (True, False):
            for upstream in harness.route.upstreams[1:]:
                upstream.health.cordon(cordoned=others, now=time.monotonic())
            assert int(await harness.result("eth_blockNumber", Cache_Control="no-cache"), 16) == harness.chain.head + 1
        await harness.look()
        assert int(await harness.result("eth_blockNumber"), 16) == harness.chain.head


@on_uvloop
async def test_upstream_that_is_behind_is_compared_at_its_own_height() -> None:
    async with rpc_harness(3, rpc={"lag_s": 600}) as harness:
        fork(harness, harness.upstreams[1], 30)
        harness.upstreams[1].behind = harness.upstreams[2].behind = 10
        harness.chain.head += 1
        await harness.look()
        await harness.shows("up", "forked", "up")


# Operators


def of_operators(operators: str) -> list[dict[str, str]]:
    return [{"operator": operator} for operator in operators]


@pytest.mark.parametrize("depth", [1, 3, 100])
@pytest.mark.parametrize("ahead", [0, 1])
@on_uvloop
async def test_two_upstreams_of_one_operator_do_not_outvote_two_others(depth: int, ahead: int) -> None:
    async with rpc_harness(5, options=of_operators("aaabc")) as harness:
        other = fork(harness, harness.upstreams[0], depth)
        other.head += ahead
        for upstream in harness.upstreams[:3]:
            upstream.chain = other
        for _ in range(3):
            await harness.look()
        await harness.shows(*["forked"] * 3, *["up"] * 2)
        assert int(await harness.result("eth_blockNumber"), 16) == harness.chain.head


@on_uvloop
async def test_operator_alone_does_not_judge_upstreams_that_are_behind() -> None:
    """Its hash at the head is right, and all that are older are not."""
    async with rpc_harness(4, options=of_operators("aabc"), rpc={"lag_s": 600}) as harness:
        head = harness.chain.head
        for upstream in harness.upstreams[:2]:
            upstream.answers["eth_getBlockByNumber"] = lambda params: (
                harness.chain.block(head)
                if params[0] in ("latest", hex(head))
                else {**harness.chain.block(int(params[0], 16)), "hash": "0x" + "66" * 32}
            )
        harness.upstreams[3].behind = 10
        for _ in range(3):
            await harness.look()
        assert harness.states == ["up"] * 4


# Reorganisations


def reads(harness: RpcHarness) -> list[tuple[str, list[Any]]]:
    return [
        ("eth_getBalance", [ADDRESS, "latest"]),
        ("eth_getTransactionReceipt", [TX]),
        ("eth_getBlockByNumber", ["latest", False]),
        ("eth_getBlockByNumber", [hex(harness.chain.head), False]),
        ("eth_getLogs", [{"fromBlock": hex(harness.chain.head - 2)}]),
        ("eth_blockNumber", []),
    ]


async def check(harness: RpcHarness, calls: list[tuple[str, list[Any]]]) -> None:
    """Compare each read with what the node itself replies."""
    for method, params in calls:
        node = getattr(harness.upstreams[0], f"_{method}")
        try:
            expected = node(params)
        except Refused:
            continue
        assert await harness.result(method, params) == expected, (method, params)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("lower", [False, True])
@on_uvloop
async def test_nothing_from_before_a_reorganisation_is_returned_after_one_look(
    count: int, depth: int, lower: bool
) -> None:
    async with rpc_harness(count) as harness:
        harness.chain.mined[TX] = harness.chain.head
        calls = reads(harness)
        for _ in range(2):
            await check(harness, calls)
        harness.chain.reorganise(depth)
        if lower:
            harness.chain.head -= depth
        harness.chain.mined.clear()
        await harness.look()
        await check(harness, calls)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("reader", ["eth_blockNumber", "eth_getTransactionReceipt"])
@on_uvloop
async def test_replies_read_before_the_hash_of_their_block_was_seen_are_discarded_with_it(
    count: int, reader: str
) -> None:
    async with rpc_harness(count) as harness:
        harness.chain.head += 1
        harness.chain.mined[TX] = harness.chain.head
        # A client learns of the new block before the tracker does.
        await harness.call(reader, [TX] if "Receipt" in reader else [], Cache_Control="no-cache")
        calls = reads(harness)
        await check(harness, calls)
        harness.chain.reorganise(1)
        await harness.look()
        await check(harness, calls)


@on_uvloop
async def test_result_that_was_read_before_its_block_was_final_is_not_kept() -> None:
    async with rpc_harness(1) as harness:
        upstream, chain = harness.upstreams[0], harness.chain
        params = [ADDRESS, hex(chain.head)]
        before = upstream._eth_getBalance(params)
        upstream.answers["eth_getBalance"] = lambda _: before
        upstream.held.add("eth_getBalance")
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(harness.result("eth_getBalance", params))
            await until(lambda: upstream.count("eth_getBalance") == 1)
            chain.reorganise(1)
            chain.head += 2 * FINALITY
            await harness.look()
            upstream.gate.set()
        assert reading.result() == before
        upstream.answers.clear()
        assert await harness.result("eth_getBalance", params) == upstream._eth_getBalance(params) != before


@on_uvloop
async def test_tip_that_goes_back_is_seen_by_the_other_workers() -> None:
    async with rpc_harness(2) as harness:
        state = harness.route.state
        state.shared_head.publish(harness.chain.head - 2, 7, is_lower=True)
        await harness.call("eth_gasPrice")
        assert state.heads.tip == harness.chain.head - 2
        state.shared_head.publish(harness.chain.head - 3)
        await harness.call("eth_gasPrice")
        assert state.heads.tip == harness.chain.head - 2


@on_uvloop
async def test_new_block_discards_recent_replies_once() -> None:
    async with rpc_harness(3) as harness:
        harness.chain.head += 1
        await harness.look()
        moves = harness.route.state.replies.moves
        for _ in range(3):
            await harness.look()
        assert harness.route.state.replies.moves == moves


@on_uvloop
async def test_hash_that_another_worker_has_seen_discards_nothing_again() -> None:
    async with rpc_harness(1) as harness:
        state, shared = harness.route.state, harness.route.state.shared_head
        harness.chain.head += 1
        await harness.look()
        seen = (shared.tip, shared.short_hash)
        harness.chain.head += 1
        await harness.look()
        moves = state.replies.moves
        assert (shared.tip, bool(shared.short_hash)) == (harness.chain.head, True)
        assert seen[1] != shared.short_hash
        # As another worker would: it takes over the tip and its mark, and then sees the same block.
        shared.publish(harness.chain.head, shared.short_hash)
        state.catch_up()
        await harness.look()
        assert state.replies.moves == moves + 1


# Every way to ask


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("depth", [1, 3])
@on_uvloop
async def test_reorganisation_reaches_single_calls_batches_sockets_and_our_own_calls_at_once(
    count: int, depth: int
) -> None:
    async with rpc_harness(count) as harness, connected(harness.worker, network=harness.network) as socket:
        for each in harness.upstreams:
            each.answers["eth_getBalance"] = lambda _: harness.chain.hash_of(harness.chain.head)
        app, given = harness.worker.app, (ADDRESS, "latest")

        async def read() -> set[str]:
            batch = await harness.batch(("eth_getBalance", given), ("eth_gasPrice", ()), ("eth_getBalance", given))
            over_socket: list[Any] = [
                {"jsonrpc": "2.0", "id": n, "method": "eth_getBalance", "params": given} for n in (71, 72)
            ]
            await socket.send(over_socket)
            found = [await harness.result("eth_getBalance", given), *[batch.json[n]["result"] for n in (0, 2)]]
            found += [reply["result"] for reply in await socket.message()]
            found += [await socket.result("eth_getBalance", *given)]
            found += [await app.internal_calls.call(harness.route.network, "eth_getBalance", *given)]
            return set(found)

        for _ in range(2):
            assert await read() == {harness.chain.hash_of(harness.chain.head)}
        harness.chain.reorganise(depth)
        await harness.look()
        assert await read() == {harness.chain.hash_of(harness.chain.head)}


# Intervals


@on_uvloop
async def test_network_in_use_is_polled_every_second_and_an_idle_one_twice_per_block() -> None:
    async with rpc_harness(1) as harness:
        upstream = harness.upstreams[0]
        assert "every 6 s" in repr(harness.tracker)
        harness.watch()
        await until(lambda: upstream.count("eth_getBlockByNumber") > 1)
        await harness.result("eth_gasPrice")
        assert "every 1 s" in repr(harness.tracker)
        before, began = upstream.count("eth_getBlockByNumber"), time.monotonic()
        await until(lambda: upstream.count("eth_getBlockByNumber") >= before + 4)
        assert time.monotonic() - began < 12.0, "an idle network would have taken 18 s or more"


@on_uvloop
async def test_quick_network_is_polled_less_often_while_it_is_not_in_use() -> None:
    """Its blocks come every second. Polls cost credits, and nobody reads their results."""
    async with rpc_harness(1, network="dev/mainnet") as harness:
        assert "every 2 s" in repr(harness.tracker)
        await harness.result("eth_gasPrice")
        assert "every 0.5 s" in repr(harness.tracker)


@on_uvloop
async def test_upstream_that_hangs_does_not_delay_the_next_poll_of_the_others() -> None:
    async with rpc_harness(2) as harness:
        hanging, other = harness.upstreams
        hanging.held = {"eth_getBlockByNumber"}
        await harness.result("eth_gasPrice")
        harness.watch()
        before = other.count("eth_getBlockByNumber")
        await until(lambda: other.count("eth_getBlockByNumber") >= before + 3)
        assert hanging.count("eth_getBlockByNumber") <= other.count("eth_getBlockByNumber") - before
        hanging.gate.set()
