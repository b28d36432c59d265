"""Bitcoin-like chains on real nodes: two litecoinds and two btcds, through the product's worker.

Every result is compared with that of the node itself, byte for byte: amounts are JSON numbers with eight decimals, which a
decoder would change.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson
import pytest

from tests import node_programs
from tests.bitcoin_nodes import SIMNET, BitcoinNode, LitecoinNode, agree, bitcoin_nodes, wait_for
from tests.client_scripts import run_program, run_script
from tests.faults import fault_proxy
from tests.http_client import HttpClient, RawReply
from tests.new_network import new_network
from tests.random_reads import reads_or
from tests.rpc_harness import NetworkHarness
from tests.service import command_here, until
from tests.web.worker import on_uvloop, running_worker

READS_PER_ROUND = 400
ROUNDS = reads_or(4000) // READS_PER_ROUND
# Coinbase outputs can be spent after a hundred blocks.
MATURE = 101


def _are_same(reply: tuple[bytes, Any], other: tuple[bytes, Any]) -> bool:
    if reply[1] is None or other[1] is None:
        return reply == other
    return bool(reply[1]["code"] == other[1]["code"])


def _is_in_no_block(method: str, params: Any, results: Sequence[bytes]) -> bool:
    """Whether a call is about mempools, and no node has the transaction in a block of its branch. Nodes may then differ: one
    whose blocks were made invalid one by one drops transactions that spend young coins, and one that follows it keeps them."""
    if method == "gettxout":
        return bool(params[2])
    found = [orjson.loads(result) for result in results if result not in (b"", b"null")]
    return method == "getrawtransaction" and all(
        isinstance(each, str) or not each.get("confirmations") for each in found
    )


class BitcoinHarness(NetworkHarness):
    nodes: Sequence[BitcoinNode] = ()
    transactions: list[str]

    async def settled(self) -> None:
        """Wait until all nodes agree and the service has seen their head."""
        await agree(self.nodes)
        best = await self.nodes[0].best()

        async def is_seen() -> bool:
            await self.look()
            return {each.health.head_hash for each in self.route.upstreams} == {best}

        await until(is_seen)

    async def raw(self, client: HttpClient, method: str, params: Any) -> tuple[bytes, Any]:
        """The bytes of the result, and the error."""
        body = orjson.dumps({"jsonrpc": "2.0", "id": 7, "method": method, "params": params})
        reply = await client.send(self.worker.post(body, network=self.network))
        assert reply.status == 200, (method, params, reply)
        found = msgspec.json.decode(reply.body, type=RawReply)
        return bytes(found.result), found.error

    async def check(self, calls: Sequence[tuple[str, Any]]) -> int:
        """Compare replies with those of the first node. Returns how many results were compared."""
        compared = 0
        async with await self.worker.connect() as client:
            for method, params in calls:
                expected, refusal = await self.nodes[0].raw(method, params)
                result, error = await self.raw(client, method, params)
                compared += refusal is None
                if not _are_same((result, error), (expected, refusal)):
                    others = [await node.raw(method, params) for node in self.nodes[1:]]
                    assert _is_in_no_block(method, params, [expected, *(found for found, _ in others)]), (
                        *(method, params, expected, refusal, result, error),
                    )
                    assert any(_are_same((result, error), other) for other in others), (method, params, result, others)
        return compared

    async def reads(self, count: int, rng: random.Random) -> list[tuple[str, Any]]:
        """Random calls about blocks, transactions and outputs; the newest blocks are the most frequent."""
        node = self.nodes[0]
        height = await node.ask("getblockcount")
        heights = [max(0, height - int(rng.expovariate(0.2))) for _ in range(40)] + [0, height, height + 1]
        hashes = [str(await node.ask("getblockhash", each)) for each in heights if each <= height]
        sent = self.transactions + [(await node.ask("getblock", each))["tx"][0] for each in hashes[:10]]
        named = {"blockhash": hashes[0], "verbosity": 1} if isinstance(node, LitecoinNode) else [hashes[0], 1]
        unknown = "ab" * 32
        kinds: list[Any] = [
            lambda: ("getblockcount", []),
            lambda: ("getbestblockhash", []),
            lambda: ("getblockhash", [rng.choice(heights)]),
            lambda: ("getblock", [rng.choice([*hashes, unknown]), rng.choice([0, 1])]),
            lambda: ("getblock", named),
            lambda: ("getblockheader", [rng.choice([*hashes, unknown]), rng.choice([True, False])]),
            lambda: ("getrawtransaction", [rng.choice([*sent, unknown]), rng.choice([0, 1])]),
            lambda: ("gettxout", [rng.choice([*sent, unknown]), 0, rng.choice([True, False])]),
            lambda: ("getdifficulty", []),
            lambda: ("validateaddress", [rng.choice(["x", unknown])]),
        ]
        if isinstance(node, LitecoinNode):
            kinds.append(lambda: ("getblockstats", [rng.choice([*hashes, *heights])]))
            kinds.append(lambda: ("getchaintxstats", []))
        return [rng.choice(kinds)() for _ in range(count)]


@pytest.fixture(params=["litecoind", "btcd"])
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[BitcoinNode]]:
    with bitcoin_nodes(request.param, tmp_path, [(), ()]) as found:
        yield found


@pytest.fixture
def litecoin_nodes(tmp_path: Path) -> Iterator[list[BitcoinNode]]:
    """The second one has no index of transactions."""
    with bitcoin_nodes("litecoind", tmp_path, [(), ("-txindex=0",)]) as found:
        yield found


@asynccontextmanager
async def bitcoin_harness(
    nodes: Sequence[BitcoinNode], blocks: int = MATURE, **sections: Any
) -> AsyncIterator[BitcoinHarness]:
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        await wait_for(nodes, session)
        await nodes[0].make(blocks)
        await agree(nodes)
        running = await stack.enter_async_context(
            running_worker({nodes[0].network: [each.url for each in nodes]}, **sections)
        )
        harness = BitcoinHarness(running, nodes[0].network)
        harness.nodes, harness.transactions = nodes, []
        await harness.settled()
        yield harness


async def pay(node: BitcoinNode, *, coin: Any = None, fee: float = 0.01) -> str:
    """A signed transaction of the node's wallet, which is not sent yet. It may be replaced by one with a higher fee."""
    assert isinstance(node, LitecoinNode)
    coin = coin or next(each for each in await node.ask("listunspent") if each["spendable"])
    amount = round(float(coin["amount"]) - fee, 8)
    inputs = [{"txid": coin["txid"], "vout": coin["vout"]}]
    raw = await node.ask("createrawtransaction", inputs, {node.address: amount}, 0, True)
    return str((await node.ask("signrawtransactionwithwallet", raw))["hex"])


@on_uvloop
async def test_every_result_is_that_of_the_node_while_blocks_are_made_and_replaced(nodes: list[BitcoinNode]) -> None:
    rng = random.Random(1)
    async with bitcoin_harness(nodes) as harness:
        compared = 0
        for number in range(ROUNDS):
            if isinstance(nodes[0], LitecoinNode):
                harness.transactions.append(await nodes[0].ask("sendrawtransaction", await pay(nodes[0])))
            if number % 3 == 2:
                await nodes[0].reorganise(1 + number % 4)
            else:
                await nodes[0].make(1 + number % 3)
            await harness.settled()
            compared += await harness.check(await harness.reads(READS_PER_ROUND, rng))
        assert compared > READS_PER_ROUND * ROUNDS * 0.6


@on_uvloop
async def test_new_network_works_within_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bitcoin_nodes("btcd", tmp_path, [SIMNET]) as nodes:
        async with aiohttp.ClientSession() as session:
            await wait_for(nodes, session)
            made = await nodes[0].make(3)
            async with new_network("bitcoin", nodes[0].url, tmp_path, monkeypatch) as harness:
                assert await harness.result("getblockcount") == 3
                assert await harness.result("getblockhash", [2]) == made[1]


@on_uvloop
async def test_known_chain_is_named_when_it_is_added_again(litecoin_nodes: list[BitcoinNode], tmp_path: Path) -> None:
    async with aiohttp.ClientSession() as session:
        await wait_for(litecoin_nodes, session)
        words = (
            "--family",
            "bitcoin",
            "--name",
            "mine",
            "--upstream",
            litecoin_nodes[0].url,
            "--directory",
            str(tmp_path),
        )
        added = await asyncio.to_thread(command_here, "chains", "add", *words)
    assert added.returncode == 2
    assert "is litecoin/regtest, which is known already: add an upstream for it" in added.stderr


@on_uvloop
async def test_results_are_of_the_old_or_the_new_head_while_it_moves(nodes: list[BitcoinNode]) -> None:
    """The service polls by itself. Its head never goes back, because every new branch is longer, and final blocks stay."""
    async with bitcoin_harness(nodes) as harness:
        harness.watch()
        stop = asyncio.Event()
        known: dict[int, set[bytes]] = {}

        async def move() -> None:
            for number in range(12):
                await (nodes[0].reorganise(2) if number % 4 == 3 else nodes[0].make(1))
                await asyncio.sleep(0.2)
            stop.set()

        async def read() -> None:
            highest = 0
            async with await harness.worker.connect() as client:
                while not stop.is_set():
                    height, error = await harness.raw(client, "getblockcount", [])
                    assert error is None
                    assert int(height) >= highest
                    highest = int(height)
                    for deep in (highest - 20, highest - 70):
                        result, error = await harness.raw(client, "getblockhash", [max(1, deep)])
                        assert error is None
                        known.setdefault(deep, set()).add(result)

        async with asyncio.TaskGroup() as group:
            group.create_task(move())
            group.create_task(read())
        assert all(len(results) == 1 for results in known.values())
        await harness.settled()
        assert await harness.check([("getblockhash", [each]) for each in range(1, MATURE)]) == MATURE - 1


@on_uvloop
async def test_repeated_and_mined_transaction_is_a_success(litecoin_nodes: list[BitcoinNode]) -> None:
    async with bitcoin_harness(litecoin_nodes) as harness:
        node = litecoin_nodes[0]
        raw = await pay(node)
        expected = (await node.ask("decoderawtransaction", raw))["txid"]
        assert await harness.result("sendrawtransaction", [raw]) == expected
        assert await harness.result("sendrawtransaction", [raw]) == expected
        # Both upstreams have it, whether or not they are peers.
        for each in litecoin_nodes:
            assert expected in await each.ask("getrawmempool")
        await node.make(1)
        await harness.settled()
        _, error = await node.raw("sendrawtransaction", [raw])
        assert error["code"] == -27
        assert await harness.result("sendrawtransaction", [raw]) == expected
        broken = await harness.call("sendrawtransaction", ["00" * 50])
        assert broken.json["error"]["code"] == -22


@on_uvloop
async def test_replaced_transaction_is_gone_at_once(tmp_path: Path) -> None:
    """The head stays the same, so a cached reply would still show the transaction."""
    with bitcoin_nodes("litecoind", tmp_path, [("-txindex", "-mempoolreplacement=1")]) as nodes:
        async with bitcoin_harness(nodes) as harness:
            coin = next(each for each in await nodes[0].ask("listunspent") if each["spendable"])
            first = await harness.result("sendrawtransaction", [await pay(nodes[0], coin=coin, fee=0.001)])
            for _ in range(3):
                seen = await harness.result("getrawtransaction", [first, True])
                assert (seen["txid"], "confirmations" in seen) == (first, False)
            # Not through the service, which would discard recent replies.
            second = await nodes[0].ask("sendrawtransaction", await pay(nodes[0], coin=coin))
            assert (await harness.call("getrawtransaction", [first, True])).json["error"]["code"] == -5
            assert (await harness.result("getrawtransaction", [second, True]))["txid"] == second
            await nodes[0].make(1)
            await harness.settled()
            replies = [await harness.call("getrawtransaction", [second, True]) for _ in range(2)]
            assert [each.json["result"]["confirmations"] for each in replies] == [1, 1]
            assert [each.headers["x-cache"] for each in replies] == ["miss", "hit"]


@on_uvloop
async def test_transaction_of_a_replaced_block_is_as_an_upstream_has_it(tmp_path: Path) -> None:
    """The first node drops the transaction, whose coin is too young for a moment, and the second one has it in its mempool."""
    with bitcoin_nodes("litecoind", tmp_path, [(), ()]) as nodes:
        async with bitcoin_harness(nodes, MATURE + 3) as harness:
            coins = [each for each in await nodes[0].ask("listunspent") if each["spendable"]]
            young = min(coins, key=lambda each: int(each["confirmations"]))
            name = await harness.result("sendrawtransaction", [await pay(nodes[0], coin=young)])

            async def has_arrived() -> bool:
                return name in await nodes[0].ask("getrawmempool")

            # The first node to accept it may be the other one.
            await until(has_arrived)
            await nodes[0].make(1)
            await harness.settled()
            assert (await harness.result("getrawtransaction", [name, True]))["confirmations"] == 1
            await nodes[0].reorganise(3)
            await harness.settled()
            dropped, kept = [await each.ask("getrawtransaction", name, True) for each in nodes]
            assert dropped["confirmations"] == 0
            assert "confirmations" not in kept
            for _ in range(10):
                assert await harness.check([("getrawtransaction", [name, True]), ("getrawtransaction", [name, False])])
            # Once it is in the first one's mempool again, no reply has the replaced block.
            await nodes[0].ask("sendrawtransaction", kept["hex"])
            for _ in range(10):
                assert await harness.result("getrawtransaction", [name, True]) == kept


@on_uvloop
async def test_upstream_without_an_index_gets_no_calls_for_transactions(litecoin_nodes: list[BitcoinNode]) -> None:
    async with bitcoin_harness(litecoin_nodes) as harness:
        node = litecoin_nodes[0]
        txid = (await node.ask("getblock", await node.ask("getblockhash", 5)))["tx"][0]
        await harness.look()
        lacking = harness.route.upstreams[1].health.lacking
        assert "getrawtransaction" in lacking
        assert "getrawtransaction" not in harness.route.upstreams[0].health.lacking
        before = harness.route.upstreams[1].health.calls
        for number in range(30):
            assert await harness.result("getrawtransaction", [txid, number % 2 == 0])
        assert harness.route.upstreams[1].health.calls == before


@on_uvloop
async def test_node_of_another_chain_gets_no_calls(tmp_path: Path) -> None:
    """btcd serves Bitcoin, and the network is Litecoin."""
    with bitcoin_nodes("litecoind", tmp_path, [()]) as good, bitcoin_nodes("btcd", tmp_path, [()]) as other:
        async with aiohttp.ClientSession() as session:
            await wait_for([*good], session)
            await wait_for([*other], session)
            await good[0].make(5)
            await other[0].make(9)
            urls = [other[0].url, good[0].url]
            async with running_worker({"litecoin/regtest": urls}) as running:
                harness = NetworkHarness(running, "litecoin/regtest")
                harness.tracker.withhold()
                await harness.shows("wrong_chain", "up")
                for _ in range(20):
                    assert await harness.result("getblockcount") == 5
                assert harness.route.upstreams[0].health.calls == 0


@on_uvloop
async def test_hung_or_late_upstream_does_not_show(litecoin_nodes: list[BitcoinNode]) -> None:
    """One of two upstreams hangs, and then falls behind: every read is right."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        await wait_for(litecoin_nodes, session)
        await litecoin_nodes[0].make(MATURE)
        await agree(litecoin_nodes)
        proxy = await stack.enter_async_context(fault_proxy(litecoin_nodes[1].port))
        late = proxy.url.replace("http://", "http://user:secret@")
        running = await stack.enter_async_context(running_worker({"litecoin/regtest": [litecoin_nodes[0].url, late]}))
        harness = BitcoinHarness(running, "litecoin/regtest")
        harness.nodes, harness.transactions = litecoin_nodes, []
        await harness.settled()
        rng = random.Random(2)
        await litecoin_nodes[1].ask("setnetworkactive", False)
        await litecoin_nodes[0].make(1)
        await harness.look()
        for _ in range(3):
            await litecoin_nodes[0].make(1)
            await harness.look()
            assert await harness.check(await harness.reads(150, rng)) > 50
        harness.watch()
        await proxy.switch("black_hole")
        calls = [
            call for call in await harness.reads(200, rng) if call[0] in ("getblockcount", "getblock", "getblockhash")
        ]
        assert await harness.check(calls) > 20


@on_uvloop
async def test_clients_of_bitcoin_work(litecoin_nodes: list[BitcoinNode]) -> None:
    """The envelopes that python-bitcoinlib, python-bitcoinrpc, bitcoin-core (npm) and btcd's rpcclient send."""
    async with bitcoin_harness(litecoin_nodes) as harness:
        height = await litecoin_nodes[0].ask("getblockcount")
        for envelope in (
            {"version": "1.1", "method": "getblockcount", "params": [], "id": 1},
            {"jsonrpc": "1.0", "method": "getblockcount", "params": [], "id": "curltest"},
            {"method": "getblockcount", "params": [], "id": "1-0"},
            {"jsonrpc": "2.0", "method": "getblockcount", "params": {}, "id": 1},
            {"method": "getblockcount", "id": 0},
        ):
            reply = await harness.worker.send(orjson.dumps(envelope), network=harness.network)
            assert reply.json["result"] == height, (envelope, reply)
            assert reply.json["id"] == envelope["id"]
            # Replies to calls before JSON-RPC 2.0 have both members.
            assert ("error" in reply.json) == (envelope.get("jsonrpc") != "2.0"), (envelope, reply)
            assert reply.json.get("error") is None
            wrong = await harness.worker.send(
                orjson.dumps({**envelope, "method": "getblockhash", "params": [9999999]}), network=harness.network
            )
            assert wrong.json["error"]["code"] == -8, (envelope, wrong)
            assert ("result" in wrong.json) == (envelope.get("jsonrpc") != "2.0"), (envelope, wrong)


@on_uvloop
async def test_batches_of_old_envelopes_have_both_members(litecoin_nodes: list[BitcoinNode]) -> None:
    """python-bitcoinrpc reads `error` of every item of a batch."""
    async with bitcoin_harness(litecoin_nodes, blocks=3) as harness:
        calls = [{"version": "1.1", "method": "getblockhash", "params": [at], "id": at} for at in range(6)]
        reply = await harness.worker.send(orjson.dumps(calls), network=harness.network)
        found = {each["id"]: each for each in reply.json}
        for at in range(6):
            assert {"result", "error"} <= found[at].keys()
            assert (found[at]["error"] is None) == (at <= 3), found[at]
            assert (found[at]["result"] is None) == (at > 3), found[at]


@on_uvloop
async def test_bitcoin_core_of_npm_works(litecoin_nodes: list[BitcoinNode]) -> None:
    async with bitcoin_harness(litecoin_nodes) as harness:
        node = litecoin_nodes[0]
        task = {
            "host": f"http://127.0.0.1:{harness.worker.port}/v1/rpc/litecoin/regtest",
            "password": harness.worker.keys["main"],
            "raw": await pay(node),
        }
        seen = await asyncio.to_thread(run_script, "bitcoin_core.mjs", task, within_s=60)
        assert seen["height"] == seen["info"]["blocks"] == await node.ask("getblockcount")
        assert seen["block"]["hash"] == seen["hash"] == await node.ask("getblockhash", 5)
        assert [each["name"] for each in seen["batch"]] == ["RpcError", "Number"], seen["batch"]
        assert seen["batch"][1]["value"] == seen["height"]
        assert seen["txid"] == (await node.ask("decoderawtransaction", task["raw"]))["txid"]
        assert seen["wrong"] == {"name": "RpcError", "code": -8}


@on_uvloop
async def test_rpcclient_of_btcd_works(nodes: list[BitcoinNode]) -> None:
    program = node_programs.require("btcd-rpcclient", made_by="btcd")
    async with bitcoin_harness(nodes) as harness:
        node, raw = nodes[0], await pay(nodes[0]) if isinstance(nodes[0], LitecoinNode) else ""
        host = f"127.0.0.1:{harness.worker.port}/v1/rpc/{harness.network}"
        task = {"host": host, "password": harness.worker.keys["main"], "raw": raw}
        seen = await asyncio.to_thread(run_program, [str(program)], task, within_s=60)
        assert seen["height"] == await node.ask("getblockcount")
        assert seen["hash"] == seen["header"] == await node.ask("getblockhash", 5)
        assert seen["batch"] == [seen["height"], seen["hash"]]
        _, wrong = await node.raw("getblockhash", [9999999])
        assert (seen["block"], seen["wrong"]) == (5, wrong["code"])
        assert seen["sent"] == ((await node.ask("decoderawtransaction", raw))["txid"] if raw else "")
        # To the client, litecoind is a Bitcoin Core before 0.19, whose second param was a boolean.
        _, rejected = await node.raw("sendrawtransaction", ["02000000" + "00" * 6, False])
        assert seen["rejected"] == rejected["code"]


@pytest.mark.skipif(find_spec("bitcoin") is None, reason="python-bitcoinlib is not installed")
@on_uvloop
async def test_python_bitcoinlib_works_with_only_a_url(litecoin_nodes: list[BitcoinNode]) -> None:
    """The key is the password of the URL, or a part of its path. Without a user it sends `None:None`."""
    async with bitcoin_harness(litecoin_nodes) as harness:
        node = litecoin_nodes[0]
        harness.worker.add_key("open", allow_in_url=True)
        key, host = harness.worker.keys["open"], f"127.0.0.1:{harness.worker.port}"
        raw = await pay(node)
        txid = (await node.ask("decoderawtransaction", raw))["txid"]
        for url, sent in (
            (f"http://any:{harness.worker.keys['main']}@{host}/v1/rpc/litecoin/regtest", raw),
            (f"http://{host}/v1/rpc/litecoin/regtest/{key}", ""),
        ):
            task = {"url": url, "raw": sent}
            seen = await asyncio.to_thread(run_script, "bitcoinlib.py", task, within_s=60)
            assert seen["height"] == await node.ask("getblockcount")
            assert seen["block"]["hash"] == seen["hash"] == await node.ask("getblockhash", 5)
            assert seen["txid"] == (txid if sent else "")
            assert seen["wrong"] == -8


@on_uvloop
async def test_unknown_transaction_does_not_wait_for_a_hung_upstream(litecoin_nodes: list[BitcoinNode]) -> None:
    """Upstreams do not have every transaction, so a second one is asked; the first one's error is good enough if it hangs."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        await wait_for(litecoin_nodes, session)
        await litecoin_nodes[0].make(5)
        await agree(litecoin_nodes)
        proxy = await stack.enter_async_context(fault_proxy(litecoin_nodes[0].port))
        hung = proxy.url.replace("http://", "http://user:secret@")
        running = await stack.enter_async_context(
            running_worker({"litecoin/regtest": [litecoin_nodes[0].url, hung]}, rpc={"call_timeout_s": 25})
        )
        harness = BitcoinHarness(running, "litecoin/regtest")
        harness.nodes, harness.transactions = litecoin_nodes, []
        await harness.settled()
        await proxy.switch("black_hole")
        async with asyncio.timeout(12):
            reply = await harness.call("getrawtransaction", ["ab" * 32, True])
        assert reply.json["error"]["code"] == -5
