"""Public networks without a chain file: found by every name, and read only if they are needed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from proxy import settings
from proxy.chains.registry import Registry
from proxy.settings.listed_chains import FILE, find_network, listed_networks, with_listed
from tests.service import ROOT, command_here
from tests.shipped_tables import TABLES

LISTED = list(listed_networks(settings.CONFIG))
CHAINS = TABLES.chains


def test_at_least_250_networks_are_known_besides_the_chain_files() -> None:
    assert len([each for each in LISTED if CHAINS.find(each.chain, each.network) is None]) >= 250
    assert len({each.id for each in LISTED}) == len({each.chain_id for each in LISTED}) == len(LISTED)


def test_every_listed_network_is_found_by_its_id_and_its_names() -> None:
    chains = with_listed(CHAINS, settings.CONFIG, [each.id for each in LISTED])
    assert list(chains.faults()) == []
    for each in LISTED:
        found = chains.find(each.chain, each.network)
        assert found is not None
        assert found is chains.find_word(str(each.chain_id), live=True)
        assert found is chains.find(str(each.chain_id), each.network)
        assert re.fullmatch(r"[a-z0-9-]+/[a-z0-9-]+", found.id)
        assert 0 < found.facts.block_time_s <= 600
        assert found.facts.listed_at is None or 64 <= found.facts.finality_blocks <= 100_000
        assert all(url.startswith(("https://", "http://")) for url in found.facts.explorers)


@pytest.mark.parametrize(
    ("name", "network"),
    [
        ("base/sepolia", "base/sepolia"),
        ("8453", "base/mainnet"),
        ("base-sepolia", "base/sepolia"),
        ("ethereum", "ethereum/mainnet"),
        ("moonbeam", "moonbeam/mainnet"),
        ("1284", "moonbeam/mainnet"),
        ("1284/mainnet", "moonbeam/mainnet"),
        ("ronin/saigon", "ronin/saigon"),
        ("ronin-saigon", "ronin/saigon"),
        ("holesky", "ethereum/holesky"),
        ("17000", "ethereum/holesky"),
        ("sepolia", "ethereum/sepolia"),
    ],
)
def test_network_is_found_by_any_form_of_its_name(name: str, network: str) -> None:
    found = find_network(CHAINS, settings.CONFIG, name)
    assert found is not None
    assert found.id == network


def test_listed_network_joins_the_chain_of_a_file_and_changes_nothing_there() -> None:
    ethereum = with_listed(CHAINS, settings.CONFIG, ["ethereum/holesky"]).chains["ethereum"]
    filed = CHAINS.chains["ethereum"]
    assert {name: ethereum.networks[name] for name in filed.networks} == filed.networks
    assert ethereum.networks["holesky"].chain_id == 17000
    assert not ethereum.networks["holesky"].default


def test_chain_file_of_the_operator_overrides_the_list(tmp_path: Path) -> None:
    (tmp_path / "chains").mkdir()
    (tmp_path / "chains" / "mine.toml").write_text('name = "mine"\n[networks.mainnet]\nchain_id = 1284\n')
    tables = settings.load_tables(own=str(tmp_path))
    found = tables.find_network("1284")
    assert found is not None
    assert found.id == "mine/mainnet"
    assert tables.with_networks(["moonbeam/moonbasealpha"]).chains.find("moonbeam", "mainnet") is None


def test_one_test_network_of_a_chain_is_the_default() -> None:
    chains = with_listed(CHAINS, settings.CONFIG, [each.id for each in LISTED])
    for chain in chains.chains.values():
        tests = [facts for facts in chain.networks.values() if facts.class_ == "test"]
        if tests and chain.name not in CHAINS.chains:
            assert sum(facts.default for facts in tests) == 1


def test_position_of_a_network_does_not_depend_on_the_others() -> None:
    """Old and new workers share the memory of heads while settings are reloaded."""
    one = with_listed(CHAINS, settings.CONFIG, ["ronin/mainnet"])
    both = with_listed(CHAINS, settings.CONFIG, ["ronin/mainnet", "moonbeam/mainnet", "ethereum/holesky"])
    positions = both.positions()
    assert len(set(positions.values())) == len(positions)
    for registry in (CHAINS, one):
        assert registry.positions().items() <= positions.items()


def test_list_is_not_read_for_settings_that_name_only_chain_files() -> None:
    program = (
        "import sys\nfrom proxy import settings\nfrom proxy.settings import listed_chains\n"
        "def refuse(config): raise AssertionError\n"
        "listed_chains.listed_networks = refuse\n"
        "tree = {'upstreams': [{'network': 'base/sepolia', 'url': 'http://a'}]}\n"
        "over = {'database': {'url': 'postgresql://h/d'}, 'keys': {'pepper': '-' * 32}, **tree}\n"
        "found = settings.load(environ={}, overrides=over)\n"
        "assert settings.tables_for(found) is settings.shipped_tables()\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_settings_with_a_listed_network_are_valid(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    words = ("--upstream", "1284=https://one.example/", "--upstream", "base/sepolia=https://two.example/")
    done = command_here("init", str(file), *words, "--upstream", "ronin=https://three.example/")
    assert (done.returncode, done.stderr) == (0, "")
    found, tables = settings.load_with_tables(file, environ={})
    assert [each.network for each in found.upstreams] == ["moonbeam/mainnet", "base/sepolia", "ronin/mainnet"]
    known = [each.id for each in tables.chains.networks()]
    assert {"moonbeam/mainnet", "moonbeam/moonbasealpha", "ronin/saigon"} <= {*known}
    assert len(known) < len(list(CHAINS.networks())) + 10


def test_mistyped_listed_network_is_suggested(tmp_path: Path) -> None:
    done = command_here("init", str(tmp_path / "a.toml"), "--upstream", "moonbem/mainnet=https://one.example/")
    assert (done.returncode, done.stderr) == (
        2,
        "penstock: --upstream: there is no network moonbem/mainnet; did you mean moonbeam/mainnet?\n",
    )


def test_list_command_searches_all_networks() -> None:
    found = orjson.loads(command_here("chains", "list", "moonbeam", "--json").stdout)
    assert {each["network"] for each in found} == {"moonbeam/mainnet", "moonbeam/moonbasealpha"}
    every = orjson.loads(command_here("chains", "list", "--all", "--json").stdout)
    files = orjson.loads(command_here("chains", "list", "--json").stdout)
    assert {each["id"] for each in every} == {each["id"] for each in files} | {str(each.chain_id) for each in LISTED}


def test_configuration_without_a_list_knows_only_its_files(tmp_path: Path) -> None:
    assert list(listed_networks(tmp_path)) == []
    registry = Registry(CHAINS.chains.values(), CHAINS.families)
    assert with_listed(registry, tmp_path, ["moonbeam/mainnet"]) is registry


# The script that writes the list

FACTS = """[
 {"chainId": 7, "name": "One Mainnet", "shortName": "one", "nativeCurrency": {"symbol": "ONE", "decimals": 18},
  "explorers": [{"url": "https://scan.one.example/"}]},
 {"chainId": 8, "name": "One Sepolia", "shortName": "one-sep", "nativeCurrency": {"symbol": "ONE", "decimals": 18}},
 {"chainId": 9, "name": "Dead", "shortName": "dead", "nativeCurrency": {"symbol": "D", "decimals": 6},
  "status": "deprecated"}
]"""
VIEM = """{
 "one": {"id": 7, "name": "One", "testnet": false, "blockTime": 250, "nativeCurrency": {"symbol": "ONE", "decimals": 18},
  "explorers": [], "multicall3": "0xcA11bde05977b3631167028862bE2a173976CA11"},
 "oneSepolia": {"id": 8, "name": "One Sepolia", "testnet": true, "nativeCurrency": {"symbol": "ONE", "decimals": 18}},
 "dead": {"id": 9, "name": "Dead", "testnet": false, "nativeCurrency": {"symbol": "D", "decimals": 6}},
 "base": {"id": 8453, "name": "Base", "testnet": false, "nativeCurrency": {"symbol": "ETH", "decimals": 18}}
}"""
NAMES = """chain-settings:
  protocols:
    - {id: two, label: Two, type: eth, settings: {expected-block-time: 3s},
       chains: [{id: Mainnet, chain-id: 0xabcdef, short-names: [two, two-main]}]}
    - {id: bitcoin, label: Bitcoin, type: bitcoin, chains: [{id: Mainnet, chain-id: 0x0}]}
"""


def test_script_writes_the_facts_of_all_sources(tmp_path: Path) -> None:
    for name, text in (("facts", FACTS), ("viem", VIEM), ("names", NAMES)):
        (tmp_path / name).write_text(text)
    given = [word for name in ("facts", "viem", "names") for word in (f"--{name}", str(tmp_path / name))]
    script = [sys.executable, "deploy/release/chain_list.py", *given, "--output", str(tmp_path / FILE)]
    subprocess.run(script, cwd=ROOT, check=True, capture_output=True)
    found = {each.id: each for each in listed_networks(tmp_path)}
    assert list(found) == ["base/mainnet", "one/mainnet", "one/sepolia", "two/mainnet"]
    _, one, sepolia, two = found.values()
    assert (one.chain_id, one.block_time_s, one.explorers) == (7, 0.25, ("https://scan.one.example",))
    assert one.multicall == "0xcA11bde05977b3631167028862bE2a173976CA11"
    assert (sepolia.class_, two.class_, two.block_time_s, two.words) == ("test", "live", 3.0, ("two-main",))
