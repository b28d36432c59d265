"""The chains that exist, by every name they go by."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from proxy import settings
from proxy.chains.registry import Chain, Native, NetworkFacts, Registry
from proxy.errors import StartError
from tests.shipped_tables import TABLES

CHAINS = TABLES.chains


def facts(class_: str, chain_id: int | None = None, *, default: bool = False) -> NetworkFacts:
    return NetworkFacts(
        class_=class_,  # type: ignore[arg-type]
        block_time_s=1.0,
        finality_blocks=1,
        finality_tag=True,
        min_priority_gwei="0.0",
        legacy_fees=False,
        chain_id=chain_id,
        default=default,
    )


def chain(name: str, *aliases: str, **networks: NetworkFacts) -> Chain:
    return Chain(
        name=name, title=name, family="evm", native=Native("ETH", 18), networks=networks, aliases=aliases
    )  # fmt: skip


def faults_of(*chains: Chain) -> list[str]:
    return list(Registry(chains, CHAINS.families).faults())


# The networks that must be there: the specification's own words, and the table of chains behind it.
MAINNETS = {
    "ethereum": 1, "optimism": 10, "bsc": 56, "gnosis": 100, "unichain": 130, "polygon": 137, "monad": 143,
    "sonic": 146, "fantom": 250, "zksync": 324, "worldchain": 480, "hyperliquid": 999, "sei": 1329, "soneium": 1868,
    "abstract": 2741, "mantle": 5000, "base": 8453, "arbitrum": 42161, "celo": 42220, "avalanche": 43114, "ink": 57073,
    "linea": 59144, "berachain": 80094, "blast": 81457, "scroll": 534352, "zora": 7777777,
}  # fmt: skip
TESTNETS = {
    "ethereum-sepolia": 11155111, "ethereum-hoodi": 560048, "polygon-amoy": 80002, "base-sepolia": 84532,
    "arbitrum-sepolia": 421614, "optimism-sepolia": 11155420, "bsc-testnet": 97, "avalanche-fuji": 43113,
}  # fmt: skip


@pytest.mark.parametrize(("name", "chain_id"), MAINNETS.items())
def test_mainnet_is_found_by_every_one_of_its_names(name: str, chain_id: int) -> None:
    found = CHAINS.find(name, "mainnet")
    assert found is not None
    assert (found.id, found.facts.chain_id, found.is_live, found.family) == (f"{name}/mainnet", chain_id, True, "evm")
    for word in (name, f"{name}-mainnet", str(chain_id), *found.chain.aliases):
        assert CHAINS.find_word(word, live=True) is found
    for word in (str(chain_id), *found.chain.aliases):
        assert CHAINS.find(word, "mainnet") is found


@pytest.mark.parametrize(("word", "chain_id"), TESTNETS.items())
@pytest.mark.parametrize("live", [True, False])
def test_testnet_is_named_outright_whatever_the_key(word: str, chain_id: int, live: bool) -> None:
    found = CHAINS.find_word(word, live=live)
    assert found is not None
    assert (found.facts.chain_id, found.is_live) == (chain_id, False)
    assert CHAINS.find_word(str(chain_id), live=live) is found
    assert CHAINS.find(*word.split("-")) is found


def test_key_class_picks_the_network_where_only_a_chain_is_named() -> None:
    for name in ("ethereum", "eth"):
        live, test = CHAINS.find_word(name, live=True), CHAINS.find_word(name, live=False)
        assert (live and live.id, test and test.id) == ("ethereum/mainnet", "ethereum/sepolia")


def test_solana_has_no_chain_id_and_its_networks_differ_by_genesis() -> None:
    test = CHAINS.find_word("sol", live=False)
    assert test is not None
    assert (test.id, test.family, test.facts.chain_id) == ("solana/devnet", "svm", None)
    genesis = [network.facts.genesis for network in CHAINS.networks() if network.family == "svm"]
    assert len(set(genesis)) == len(genesis) >= 3


@pytest.mark.parametrize(
    "word",
    ["", "nowhere", "Ethereum", "ethereum/sepolia", "ethereum-nowhere", "0", "01", "1.0", "-1", "ethereum-", "None"],
)
def test_unknown_word_is_nothing(word: str) -> None:
    assert CHAINS.find_word(word, live=True) is None
    assert CHAINS.find(word, "mainnet") is None


@pytest.mark.parametrize(
    ("name", "network"), [("ethereum", ""), ("ethereum", "amoy"), ("1", "sepolia"), ("11155111", "mainnet"), ("", "")]
)
def test_chain_and_network_must_belong_together(name: str, network: str) -> None:
    assert CHAINS.find(name, network) is None


def test_shared_id_of_the_dev_chain_means_its_live_network_and_each_by_path() -> None:
    by_id, live, test = (
        CHAINS.find_word("31337", live=False),
        CHAINS.find("dev", "mainnet"),
        CHAINS.find("dev", "testnet"),
    )
    assert by_id is live is CHAINS.find("31337", "mainnet")
    assert test is CHAINS.find("31337", "testnet")
    assert test is not live


def test_chain_without_a_default_testnet_has_none_for_a_test_key() -> None:
    registry = Registry([chain("one", mainnet=facts("live", 1), other=facts("test", 2))], CHAINS.families)
    assert registry.find_word("one", live=False) is None
    assert registry.find_word("one-other", live=False) is not None


def test_all_shipped_chain_files_load_without_a_fault() -> None:
    files = sorted(path.stem for path in (settings.CONFIG / "chains").glob("*.toml"))
    assert sorted(CHAINS.chains) == files
    assert len(files) >= 27
    assert list(CHAINS.faults()) == []
    assert repr(CHAINS) == f"<Registry {len(files)} chains, {len(list(CHAINS.networks()))} networks>"


@pytest.mark.parametrize("name", CHAINS.chains)
def test_every_chain_has_one_live_network_and_at_most_one_default(name: str) -> None:
    networks = CHAINS.chains[name].networks
    assert [key for key, found in networks.items() if found.class_ == "live"] == ["mainnet"]
    tests = [found for found in networks.values() if found.class_ == "test"]
    assert sum(found.default for found in tests) == min(1, len(tests))


def test_no_chains_no_networks() -> None:
    empty = Registry([], {})
    assert not list(empty.networks())
    assert not list(empty.faults())
    assert empty.find_word("ethereum", live=True) is None


@pytest.mark.parametrize(
    ("second", "taken"),
    [
        (chain("two", "one", mainnet=facts("live", 2)), "one"),
        (chain("two", "uno", mainnet=facts("live", 2)), "uno"),
        (chain("two", mainnet=facts("live", 1)), "1"),
        (chain("two", mainnet=facts("live", 2), other=facts("test", 1)), "1"),
        (chain("one-mainnet", mainnet=facts("live", 2)), "one-mainnet"),
    ],
)
def test_name_that_two_chains_claim_is_a_fault(second: Chain, taken: str) -> None:
    first = chain("one", "uno", mainnet=facts("live", 1))
    assert faults_of(first) == []
    assert faults_of(first, second) == [f"{second.name}.toml: the name {taken!r} is taken by one.toml"]


def test_networks_of_one_chain_may_share_an_id() -> None:
    assert faults_of(chain("one", mainnet=facts("live", 1), test=facts("test", 1, default=True))) == []


def test_two_default_networks_are_a_fault() -> None:
    both = {"a": facts("test", 2, default=True), "b": facts("test", 3, default=True)}
    assert faults_of(chain("one", mainnet=facts("live", 1), **both)) == [
        "one.toml: more than one default test network: a, b"
    ]


def test_live_network_as_the_default_for_tests_is_a_fault() -> None:
    assert faults_of(chain("one", mainnet=facts("live", 1, default=True))) == [
        "one.toml: a live network is the default test network"
    ]


# The files


CHAIN_FILE = """
name = "{name}"
title = "One"
family = "evm"
aliases = []
native = {{ symbol = "ETH", decimals = 18 }}
entry_points = {{}}
factories = {{}}

[networks.mainnet]
chain_id = {id}
class = "live"
block_time_s = 1.0
finality_blocks = 1
finality_tag = true
min_priority_gwei = "0.0"
legacy_fees = false
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration with the shipped methods, plans and prices and no chain."""
    (tmp_path / "chains").mkdir()
    for name in ("families", "methods"):
        shutil.copytree(settings.CONFIG / name, tmp_path / name)
    for name in ("plans.toml", "pricing.toml"):
        (tmp_path / name).write_bytes((settings.CONFIG / name).read_bytes())
    return tmp_path


def load_faults(config: Path) -> tuple[str, ...]:
    with pytest.raises(StartError) as caught:
        settings.load_tables(config)
    return caught.value.faults


def test_new_chain_is_one_file_and_no_code(config: Path) -> None:
    (config / "chains" / "one.toml").write_text(CHAIN_FILE.format(name="one", id=424242))
    found = settings.load_tables(config).chains.find_word("424242", live=True)
    assert found is not None
    assert found.id == "one/mainnet"


def test_chain_file_needs_no_more_than_a_name_and_a_chain_id(config: Path) -> None:
    (config / "chains" / "one.toml").write_text(
        'name = "one"\n[networks.mainnet]\nchain_id = 7\n[networks.test]\nchain_id = 8'
    )
    chains = settings.load_tables(config).chains
    live, test = chains.find_word("one", live=True), chains.find_word("one", live=False)
    assert live is not None
    assert test is not None
    assert (live.chain.title, live.chain.family, live.chain.native.symbol) == ("One", "evm", "ETH")
    assert [(each.id, each.is_live, each.facts.chain_id) for each in (live, test)] == [
        ("one/mainnet", True, 7),
        ("one/test", False, 8),
    ]


def test_files_of_the_operator_are_added_and_replace_shipped_ones(tmp_path: Path) -> None:
    (tmp_path / "chains").mkdir()
    (tmp_path / "chains" / "one.toml").write_text(CHAIN_FILE.format(name="one", id=424242))
    (tmp_path / "chains" / "base.toml").write_text(CHAIN_FILE.format(name="base", id=8453))
    plans = (settings.CONFIG / "plans.toml").read_text()
    free = plans.split("[free]")[1].split("[growth]")[0]
    (tmp_path / "plans.toml").write_text(f"{plans}\n[tiny]{free}")
    found = settings.load_tables(own=str(tmp_path))
    assert found.chains.find("one", "mainnet") is not None
    assert found.chains.find("base", "sepolia") is None
    assert found.chains.find("ethereum", "sepolia") is not None
    assert found.plans["tiny"] == found.plans["free"]


def test_directory_of_the_operator_must_exist(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"data_files\.directory: .* is not a directory: create it"):
        settings.load_tables(own=str(tmp_path / "missing"))


def test_file_must_have_the_name_of_its_chain(config: Path) -> None:
    (config / "chains" / "two.toml").write_text(CHAIN_FILE.format(name="one", id=1))
    assert load_faults(config) == ("two.toml: name: must be two, like the file's name",)


def test_faults_of_all_files_are_reported_together(config: Path) -> None:
    (config / "chains" / "a.toml").write_text("this is no TOML")
    (config / "chains" / "b.toml").write_text(CHAIN_FILE.format(name="b", id='"1"'))
    (config / "chains" / "c.toml").write_text(CHAIN_FILE.format(name="c", id=7) + "colour = 1\n")
    (config / "plans.toml").write_text("[free]\n")
    (config / "pricing.toml").unlink()
    found = "\n".join(load_faults(config))
    for words in ("a.toml: not valid TOML", "b.toml: networks.mainnet.chain_id", "colour: there is no such key",
                  "plans.toml: free", "pricing.toml: cannot be read"):  # fmt: skip
        assert words in found
