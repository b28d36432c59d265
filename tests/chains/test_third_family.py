"""A third chain family, added from the test tree only: one package, one registration, and data files.

It runs through the product's worker against a real upstream server. No file of `proxy/` names it.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.chains.families import FAMILIES
from proxy.errors import StartError
from proxy.settings import CONFIG, Tables, load_tables
from proxy.web.dashboard.network_list import network_list
from tests.chains.third_family.toy import TOY
from tests.http_client import Reply, request
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import ScriptedUpstream
from tests.web import worker as worker_module
from tests.web.worker import on_uvloop

HERE = Path(__file__).with_name("third_family")
NETWORK = "toychain/mainnet"
ALICE = "red-green-blue"


class ToyUpstream(ScriptedUpstream):
    def _toyHeight(self, params: list[Any]) -> int:
        return self.head

    def _toyGenesis(self, params: list[Any]) -> str:
        return "genesis"

    def _toyBalance(self, params: list[Any]) -> list[Any]:
        number = self.head if params[1] == "newest" else params[1]
        return [params[0], number]

    def _toySend(self, params: list[Any]) -> str:
        return f"sent {params[0]}"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped data files, without the token lists, and the family's own."""
    found = tmp_path_factory.mktemp("third") / "config"
    shutil.copytree(CONFIG, found, ignore=shutil.ignore_patterns("tokens", "devnet"))
    shutil.copy(HERE / "toychain.toml", found / "chains")
    shutil.copy(HERE / "methods.toml", found / "methods" / "toy.toml")
    return found


@pytest.fixture(scope="module")
def tables(config: Path) -> Tables:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, TOY.name, TOY)
        return load_tables(config)


@pytest.fixture
def registered(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, TOY.name, TOY)
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
        assert harness.worker.app.networks.routes[NETWORK].state.head_reader is TOY.head


def test_dashboard_offers_it_wherever_it_has_the_feature(registered: None, tables: Tables) -> None:
    networks = [each for each in tables.chains.networks() if each.id in (NETWORK, "ethereum/mainnet")]
    listed = network_list(networks, tables.methods, lambda network: True)
    features = {each["network"]: each["features"] for each in listed["networks"]}
    assert features[NETWORK] == []
    assert {"gas_prices", "user_operations", "webhooks"} < set(features["ethereum/mainnet"])
    assert listed["methods"]["toy"] == [
        {"method": "toyHeight", "params": []},
        {"method": "toyBalance", "params": [ALICE, "newest"]},
    ]


def test_dashboard_offers_webhooks_only_on_followed_networks(tables: Tables) -> None:
    networks = [each for each in tables.chains.networks() if each.id == "ethereum/mainnet"]
    listed = network_list(networks, tables.methods, lambda network: False)
    assert "webhooks" not in listed["networks"][0]["features"]


@pytest.mark.parametrize(("name", "params"), [("toySend", "{}"), ("toySend", "[1"), ("toyMint", "[]")])
def test_sample_that_is_no_call_stops_the_start(
    config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, params: str
) -> None:
    monkeypatch.setitem(FAMILIES, TOY.name, TOY)
    broken = tmp_path / "config"
    shutil.copytree(config, broken)
    methods = broken / "methods" / "toy.toml"
    methods.write_text(methods.read_text() + f"{name} = '{params}'\n")
    with pytest.raises(StartError, match=rf"toy\.toml: samples\.{name}: must be a method of this file"):
        load_tables(broken)


def test_method_without_a_price_stops_the_start(config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(FAMILIES, TOY.name, TOY)
    broken = tmp_path / "config"
    shutil.copytree(config, broken)
    methods = broken / "methods" / "toy.toml"
    methods.write_text(methods.read_text().replace("price = 7, ", ""))
    with pytest.raises(StartError, match=r'toy\.toml: methods\.toySend: "price" is a required property'):
        load_tables(broken)
    methods.unlink()
    with pytest.raises(StartError, match="config/methods: there are no methods of the family toy"):
        load_tables(broken)


def test_chain_of_an_unknown_family_stops_the_start(config: Path) -> None:
    with pytest.raises(StartError, match=r"toychain\.toml: family: there is no family 'toy'"):
        load_tables(config)
