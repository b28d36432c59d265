"""A third chain family, added by an operator: a directory with a family, a chain and its methods, and no code.

It runs through the product's worker against a real upstream server. No file of `proxy/` names it.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.errors import StartError
from proxy.settings import Tables, load_tables
from proxy.web.dashboard.network_list import network_list
from tests.http_client import Reply, request
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import Refused, ScriptedUpstream
from tests.web import worker as worker_module
from tests.web.worker import on_uvloop

HERE = Path(__file__).with_name("third_family")
NETWORK = "toychain/mainnet"
ALICE = "red-green-blue"


class ToyUpstream(ScriptedUpstream):
    sealed = False

    def _toyStatus(self, params: list[Any]) -> dict[str, Any]:
        return {"has_deeds": True}

    def _toyUnknown(self, params: list[Any]) -> Any:
        raise Refused(-32601, "method not found")

    def _toyHeight(self, params: list[Any]) -> int:
        return self.head

    def _toyNewest(self, params: list[Any]) -> dict[str, str]:
        return {"id": f"block {self.head}"}

    def _toyBlock(self, params: Any) -> dict[str, Any]:
        name = params["id"] if isinstance(params, dict) else params[0]
        height = int(name.split()[1])
        if height > self.head:
            raise Refused(77, "no such thing")
        return {"at": {"height": height}, "links": [f"block {height - 1}"]}

    def _toyGenesis(self, params: list[Any]) -> str:
        return "genesis"

    def _toyBalance(self, params: Any) -> list[Any]:
        who, at = (params["who"], params.get("height")) if isinstance(params, dict) else (params[0], params[1])
        return [who, self.head if at in ("newest", None) else at]

    def _toyDeed(self, params: list[Any]) -> dict[str, str]:
        return {"deed": params[0], "state": "sealed" if self.sealed else "draft"}

    def _toySend(self, params: list[Any]) -> str:
        return f"sent {params[0]}"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The operator's directory, `data_files.directory`."""
    for kind, file in (("families", "family.toml"), ("chains", "toychain.toml"), ("methods", "methods.toml")):
        (tmp_path / kind).mkdir()
        shutil.copy(HERE / file, tmp_path / kind / ("toychain.toml" if kind == "chains" else "toy.toml"))
    return tmp_path


@pytest.fixture
def tables(own: Path) -> Tables:
    return load_tables(own=str(own))


@pytest.fixture
def registered(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "TABLES", tables)


@asynccontextmanager
async def toy_harness(count: int = 1, **sections: Any) -> AsyncIterator[RpcHarness]:
    async with rpc_harness(count, kind=ToyUpstream, network=NETWORK, **sections) as harness:
        yield harness


async def get(harness: RpcHarness, path: str) -> Reply:
    async with await harness.worker.connect() as client:
        return await client.send(request("GET", path, key=harness.worker.keys["main"]))


@on_uvloop
async def test_call_is_answered_and_priced_by_its_table(registered: None) -> None:
    async with toy_harness() as harness:
        reply = await harness.call("toyBalance", [ALICE, "newest"])
        assert reply.json["result"] == [ALICE, harness.chain.head]
        assert reply.headers["x-compute-units"] == "3"
        assert await harness.result("toySend", ["x"]) == "sent x"


@on_uvloop
async def test_final_block_is_cached_forever_and_the_newest_until_the_head_moves(registered: None) -> None:
    async with toy_harness() as harness:
        final = harness.chain.head - 20
        for _ in range(3):
            assert await harness.result("toyBalance", [ALICE, final]) == [ALICE, final]
            assert await harness.result("toyBalance", [ALICE, "newest"]) == [ALICE, harness.chain.head]
        assert harness.count("toyBalance") == 2
        reply = await harness.call("toyBalance", [ALICE, final])
        assert reply.headers["x-cache"] == "hit"
        harness.chain.head += 1
        await harness.look()
        assert await harness.result("toyBalance", [ALICE, "newest"]) == [ALICE, harness.chain.head]
        assert await harness.result("toyBalance", [ALICE, final]) == [ALICE, final]
        assert harness.count("toyBalance") == 3


@on_uvloop
async def test_old_state_costs_the_archive_price(registered: None) -> None:
    async with toy_harness() as harness:
        harness.chain.head = 1000
        await harness.look()
        reply = await harness.call("toyBalance", [ALICE, 5])
        assert reply.headers["x-compute-units"] == "20"


@on_uvloop
async def test_head_comes_from_its_own_call_and_never_goes_back(registered: None) -> None:
    async with toy_harness(2) as harness:
        assert harness.route.heads.tip == harness.chain.head
        harness.upstreams[0].behind = 1
        harness.chain.head += 1
        await harness.look()
        for _ in range(4):
            assert await harness.result("toyHeight") == harness.chain.head


@on_uvloop
async def test_unknown_method_does_not_exist(registered: None) -> None:
    async with toy_harness() as harness:
        for method in ("toyMint", "eth_blockNumber", "getSlot"):
            reply = await harness.call(method)
            assert reply.json["error"]["code"] == -32601
        assert harness.count("toyMint") == harness.count("eth_blockNumber") == harness.count("getSlot") == 0


@on_uvloop
async def test_features_that_it_lacks_are_refused(registered: None) -> None:
    async with toy_harness() as harness:
        for path in (
            "/v1/tokens/toychain/balances/some.name",
            "/v1/tokens/toychain/metadata/some.name",
            "/v1/nfts/toychain/owned/some.name",
            "/v1/gas/toychain/prices",
        ):
            reply = await get(harness, path)
            assert reply.status == 404, (path, reply)
            assert "toychain" in reply.json["error"]["message"], (path, reply)
        assert harness.worker.app.networks.routes[NETWORK].network.rules.title == "Toy chains"


def test_dashboard_offers_it_wherever_it_has_the_feature(registered: None, tables: Tables) -> None:
    networks = [each for each in tables.chains.networks() if each.id in (NETWORK, "ethereum/mainnet")]
    listed = network_list(networks, tables.methods, lambda network: True)
    features = {each["network"]: each["features"] for each in listed["networks"]}
    assert features[NETWORK] == ["rpc"]
    assert {"gas_prices", "user_operations", "webhooks"} < set(features["ethereum/mainnet"])
    assert listed["methods"]["toy"] == [
        {"method": "toyHeight", "params": []},
        {"method": "toyBalance", "params": [ALICE, "newest"]},
    ]


def test_dashboard_offers_webhooks_only_on_followed_networks(tables: Tables) -> None:
    networks = [each for each in tables.chains.networks() if each.id == "ethereum/mainnet"]
    listed = network_list(networks, tables.methods, lambda network: False)
    assert "webhooks" not in listed["networks"][0]["features"]


def faults_with(own: Path, kind: str, change: dict[str, str]) -> str:
    """The faults of the directory after a file of this kind was changed."""
    (path,) = (own / kind).iterdir()
    text = path.read_text()
    for before, after in change.items():
        assert before in text, before
        text = text.replace(before, after)
    path.write_text(text)
    with pytest.raises(StartError) as caught:
        load_tables(own=str(own))
    return "\n".join(caught.value.faults)


@pytest.mark.parametrize("sample", ["toySend = '[1'", "toyMint = '[]'", "toySend = '5'"])
def test_sample_that_is_no_call_stops_the_start(own: Path, sample: str) -> None:
    faults = faults_with(own, "methods", {"[samples]": f"[samples]\n{sample}"})
    assert f"toy.toml: samples.{sample.split()[0]}: must be a method of this file" in faults
    assert "(line 12)" in faults


def test_method_without_a_price_stops_the_start(own: Path) -> None:
    faults = faults_with(own, "methods", {"price = 7, ": ""})
    assert 'toy.toml: methods.toySend: "price" is a required property (line 9)' in faults


def test_family_without_methods_stops_the_start(own: Path) -> None:
    (own / "methods" / "toy.toml").unlink()
    with pytest.raises(StartError, match="config/methods: there are no methods of the family toy"):
        load_tables(own=str(own))


def test_chain_of_an_unknown_family_stops_the_start(own: Path) -> None:
    (own / "families" / "toy.toml").unlink()
    with pytest.raises(StartError, match=r"toychain\.toml: family: there is no family 'toy'"):
        load_tables(own=str(own))


@pytest.mark.parametrize(
    ("change", "fault", "line"),
    [
        ({"title =": "colour ="}, "colour: there is no such key", 2),
        ({'"toyHeight", read': '"toyHeight", reads'}, "lookups.number.calls.0.reads: there is no such key", 11),
        ({'hash = "id"': 'hush = "id"'}, "lookups.head.calls.0.read", 15),
        ({'hash = "id"': 'chain = "id"'}, "lookups.head.calls.1.params: {hash} was not read by a call before", 16),
        ({'number = "at.height", ': ""}, "lookups.head: reads no number", 13),
        ({'kind = "behind"': 'kind = "lost"'}, "errors.rules.0.kind", 29),
        ({"toyMint =": "toySend ="}, "methods.toySend: the family's file has it under `refused`", 9),
        ({"[lookups.chain]": "[lookups.chains]"}, "lookups.chains: there is no such key", 19),
        ({'name = "toy"': 'name = "top"'}, "name: must be toy, like the file's name", 0),
    ],
)
def test_fault_of_a_family_file_names_its_line(own: Path, change: dict[str, str], fault: str, line: int) -> None:
    faults = faults_with(own, "families", change)
    assert f"toy.toml: {fault}" in faults, faults
    assert not line or f"(line {line})" in faults, faults


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({'price = 2, cache = "hash", final_if': "price = 2, final_if"}, 'final_if needs cache = "hash" or "block"'),
        ({"block_at = 1, ": ""}, "block_name needs block_at"),
        ({"toyDeed =": "toyDeed = { price = 1 }\ntoyDeed ="}, "not valid TOML"),
        ({'cache = "static"': 'cache = "statik"'}, "is not one of"),
    ],
)
def test_method_that_contradicts_itself_stops_the_start(own: Path, change: dict[str, str], fault: str) -> None:
    assert fault in faults_with(own, "methods", change)


@on_uvloop
async def test_head_takes_two_calls_and_knows_the_parent(registered: None) -> None:
    async with toy_harness(2) as harness:
        await harness.look()
        health = harness.route.upstreams[0].health
        head = harness.chain.head
        assert (health.head, health.head_hash, health.parent_hash) == (head, f"block {head}", f"block {head - 1}")


@on_uvloop
async def test_upstream_of_another_chain_gets_no_calls(registered: None) -> None:
    async with toy_harness(2) as harness:
        harness.upstreams[0].answers["toyGenesis"] = lambda params: "another"
        harness.tracker.withhold()
        await harness.shows("wrong_chain", "up")
        before = harness.upstreams[0].count("toyBalance")
        for height in range(20):
            assert await harness.result("toyBalance", [ALICE, height]) == [ALICE, height]
        assert harness.upstreams[0].count("toyBalance") == before


@on_uvloop
async def test_call_may_name_its_params_and_have_an_old_envelope(registered: None) -> None:
    async with toy_harness() as harness:
        final = harness.chain.head - 20
        named = {"who": ALICE, "height": final}
        for body in (
            {"jsonrpc": "2.0", "id": 1, "method": "toyBalance", "params": named},
            {"jsonrpc": "1.0", "id": 1, "method": "toyBalance", "params": named},
            {"version": "1.1", "id": 1, "method": "toyBalance", "params": named},
            {"id": 1, "method": "toyBalance", "params": named},
        ):
            reply = await harness.worker.send(orjson.dumps(body), network=NETWORK)
            assert reply.json["result"] == [ALICE, final], reply
            reply = await harness.worker.send(orjson.dumps([body, body]), network=NETWORK)
            assert [each["result"] for each in reply.json] == [[ALICE, final]] * 2
        assert harness.count("toyBalance") == 1


@pytest.mark.parametrize(
    "body",
    [
        b'{"id":1,"id":2,"method":"toyHeight"}',
        b'{"method":"toyHeight","method":"toySend","id":1,"params":["x"]}',
        b'{"version":"1.1","version":"1.0","method":"toyHeight","id":1}',
        b'{"method":"toyHeight","\\u006dethod":"toySend","id":1,"params":["x"]}',
        b'{"jsonrpc":"3.0","method":"toyHeight","id":1}',
        b'{"method":"toyHeight","METHOD":"toySend","id":1}',
        b'{"method":"toyHeight","id":1,"params":"x"}',
        b'{"method":"toyHeight","id":{},"params":[]}',
    ],
)
@on_uvloop
async def test_ambiguous_old_envelope_is_refused(registered: None, body: bytes) -> None:
    async with toy_harness() as harness:
        reply = await harness.worker.send(body, network=NETWORK)
        assert reply.status == 400, reply
        assert harness.count("toySend") == 0


@on_uvloop
async def test_cache_rule_follows_from_a_param_and_from_the_result(registered: None) -> None:
    async with toy_harness() as harness:
        name = f"block {harness.chain.head}"
        for _ in range(2):
            await harness.result("toyBlock", [name, "raw"])
            await harness.result("toyBlock", [name, "full"])
            await harness.result("toyDeed", ["d1"])
        harness.chain.head += 1
        harness.upstreams[0].sealed = True  # type: ignore[attr-defined]
        await harness.look()
        before = harness.count("toyBlock", [name, "raw"]), harness.count("toyBlock", [name, "full"])
        for _ in range(2):
            await harness.result("toyBlock", [name, "raw"])
            await harness.result("toyBlock", [name, "full"])
            assert (await harness.result("toyDeed", ["d1"]))["state"] == "sealed"
        assert before == (1, 1)
        assert (harness.count("toyBlock", [name, "raw"]), harness.count("toyBlock", [name, "full"])) == (1, 2)
        harness.chain.head += 1
        await harness.look()
        await harness.result("toyDeed", ["d1"])
        assert harness.count("toyDeed") == 2


@on_uvloop
async def test_upstream_that_is_behind_is_not_believed_and_one_that_is_not_is(registered: None) -> None:
    async with toy_harness(2) as harness:
        harness.upstreams[0].behind = 1
        await harness.look()
        name, later = f"block {harness.chain.head}", f"block {harness.chain.head + 5}"
        for number in range(10):
            found = await harness.result("toyBlock", [name, "raw", number])
            assert found["at"]["height"] == harness.chain.head
        harness.upstreams[0].behind = 0
        await harness.look()
        before = harness.count("toyBlock")
        for number in range(10):
            reply = await harness.call("toyBlock", [later, "raw", number])
            assert reply.json["error"] == {"code": 77, "message": "no such thing"}
        assert harness.count("toyBlock") == before + 10


@on_uvloop
async def test_refused_method_says_why(registered: None) -> None:
    async with toy_harness() as harness:
        reply = await harness.call("toyMint")
        assert "only the mint makes coins" in reply.json["error"]["message"]


@asynccontextmanager
async def with_status(**status: Any) -> AsyncIterator[RpcHarness]:
    """Two upstreams, the first of which reports this status."""
    async with toy_harness(2) as harness:
        harness.upstreams[0].answers["toyStatus"] = lambda params: {"has_deeds": True, **status}
        harness.tracker._status_at.clear()  # The next check would be a minute away.
        await harness.look()
        yield harness


@on_uvloop
async def test_blocks_below_the_floor_come_from_an_upstream_that_keeps_them(registered: None) -> None:
    async with with_status(lowest=900) as harness:
        assert harness.route.state.floor == 900
        before = harness.upstreams[0].count("toyBalance")
        for height in range(880, 900):
            assert await harness.result("toyBalance", [ALICE, height]) == [ALICE, height]
        assert harness.upstreams[0].count("toyBalance") == before
        await harness.upstreams[1].close()
        assert await harness.result("toyBalance", [ALICE, 900]) == [ALICE, 900]
        assert harness.upstreams[0].count("toyBalance") == before + 1


@on_uvloop
async def test_upstream_that_is_syncing_lags(registered: None) -> None:
    async with with_status(catching_up=True) as harness:
        await harness.look()
        assert harness.states == ["lagging", "up"]


@on_uvloop
async def test_method_that_an_upstream_does_not_offer_goes_to_another(registered: None) -> None:
    async with with_status(has_deeds=False) as harness:
        before = harness.upstreams[0].count("toyDeed")
        for number in range(20):
            await harness.result("toyDeed", [f"deed {number}"])
        assert harness.upstreams[0].count("toyDeed") == before
