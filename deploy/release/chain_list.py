"""Writes config/chain-list.tsv: facts of public EVM networks, also of those with better ones in config/chains.

    python deploy/release/chain_list.py --facts chains.json --viem viem.json --names chains.yaml

--facts  chainid.network's list (built by github.com/ethereum-lists/chains): an array of objects with chainId, name,
         nativeCurrency, explorers, status
--viem   the exports of npm's viem/chains as JSON, by export name: id, name, testnet, blockTime, nativeCurrency,
         explorers (URLs), multicall3 (the address)
--names  dRPC's list of chains (github.com/drpcorg/public): names of chains and networks, block times, chain ids

Networks come from viem and from dRPC's list, because both remove dead ones. chainid.network has anything that was ever
registered, so it only adds facts and says which networks are deprecated. Nothing is fetched. Only facts are written.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

CONFIG = Path(__file__).parent.parent.parent / "config"
COLUMNS = [
    "chain",
    "network",
    "id",
    "class",
    "symbol",
    "decimals",
    "block_time_s",
    "multicall",
    "title",
    "explorer",
    "words",
]
MULTICALL3 = "0xca11bde05977b3631167028862be2a173976ca11"
# Development chains: their ids are used by anyone.
LOCAL_IDS = frozenset((1337, 31337, 412346))
# Last words of a test network's name that are no part of its chain's.
TEST_WORDS = frozenset(["testnet", "sepolia", "holesky", "hoodi", "devnet", "alphanet", "previewnet"])
# Networks that ended in 2024, and programs on a developer's machine.
ENDED = re.compile(r"goerli|mumbai|local|moonbeam-dev|cannon")
# The bound of schemas/config/chain.json. A longer time is a network that makes blocks only for transactions.
LONGEST_BLOCK_S = 600.0
WORD = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


@dataclass(slots=True)
class Entry:
    """A network, with the facts of all sources."""

    id: int
    chain: str = ""
    network: str = ""
    is_test: bool = False
    symbol: str = "ETH"
    decimals: int = 18
    block_time_s: float | None = None
    multicall: str = ""
    title: str = ""
    explorer: str = ""
    words: list[str] = field(default_factory=list)

    def line(self) -> str:
        cells = (
            self.chain,
            self.network,
            self.id,
            "test" if self.is_test else "live",
            self.symbol,
            self.decimals,
            "" if self.block_time_s is None else f"{self.block_time_s:g}",
            self.multicall,
            self.title,
            self.explorer,
            " ".join(dict.fromkeys(self.words)),
        )
        return "\t".join(re.sub(r"\s+", " ", str(cell)).strip() for cell in cells)


def words_of(name: str) -> list[str]:
    """`polygonZkEvm` and `Polygon zkEVM` as words in lower case."""
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    return re.sub(r"[^a-z0-9]+", " ", spaced.lower()).split()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--facts", type=Path, required=True, metavar="FILE")
    parser.add_argument("--viem", type=Path, required=True, metavar="FILE")
    parser.add_argument("--names", type=Path, required=True, metavar="FILE")
    parser.add_argument("--output", type=Path, default=CONFIG / "chain-list.tsv", metavar="FILE")
    args = parser.parse_args(argv)
    facts = {each["chainId"]: each for each in json.loads(args.facts.read_text("utf-8"))}
    found: dict[int, Entry] = {}
    add_named(found, yaml.safe_load(args.names.read_text("utf-8")))
    add_viem(found, json.loads(args.viem.read_text("utf-8")))
    files = [tomllib.loads(path.read_text("utf-8")) for path in sorted((CONFIG / "chains").glob("*.toml"))]
    filed = {
        network["chain_id"]: (chain["name"], name)
        for chain in files
        for name, network in chain["networks"].items()
        if network.get("chain_id", 31337) not in LOCAL_IDS
    }
    wanted = [each for each in found.values() if is_wanted(each, facts.get(each.id, {}), filed)]
    for each in wanted:
        add_facts(each, facts.get(each.id, {}))
    named = list(with_names(wanted, files, filed))
    lines = [each.line() for each in sorted(named, key=lambda each: (each.chain, each.network != "mainnet", each.id))]
    args.output.write_text("\n".join(["\t".join(COLUMNS), *lines]) + "\n", "utf-8")
    print(f"{len(lines)} networks of {len({each.chain for each in named})} chains in {args.output}")
    return 0


def add_named(found: dict[int, Entry], data: Mapping[str, Any]) -> None:
    for protocol in data["chain-settings"]["protocols"]:
        if protocol.get("type") != "eth":
            continue
        for chain in protocol["chains"]:
            settings = {**protocol.get("settings", {}), **chain.get("settings", {})}
            chain_id = int(str(chain["chain-id"]), 0)
            network = "".join(words_of(str(chain["id"])))
            found[chain_id] = Entry(
                chain_id,
                "-".join(words_of(str(protocol["id"]))),
                network,
                is_test="mainnet" not in network and network not in ("nova", "moonriver"),
                block_time_s=seconds(settings.get("expected-block-time")),
                title=str(protocol.get("label", "")),
                words=[str(word) for word in chain.get("short-names", ())],
            )


def seconds(text: object) -> float | None:
    match = re.fullmatch(r"([0-9.]+)(ms|s|m)", str(text))
    found = 0.0 if match is None else float(match[1]) * {"ms": 0.001, "s": 1.0, "m": 60.0}[match[2]]
    return found if 0 < found <= LONGEST_BLOCK_S else None


def add_viem(found: dict[int, Entry], data: Mapping[str, Any]) -> None:
    mainnets = {tuple(live_words(name)) for name, each in data.items() if not each.get("testnet")}
    for name, each in data.items():
        entry = found.setdefault(each["id"], Entry(each["id"], is_test=bool(each.get("testnet"))))
        entry.is_test = entry.is_test or bool(each.get("testnet"))
        if not entry.chain:
            entry.chain, entry.network = viem_names(name, mainnets, is_test=entry.is_test)
            entry.title = entry.title or re.sub(r"\s+(Mainnet|Testnet)\b.*", "", each["name"])
        entry.words.append("-".join(words_of(name)))
        coin = each["nativeCurrency"]
        entry.symbol, entry.decimals = coin["symbol"], coin["decimals"]
        if each.get("blockTime"):
            entry.block_time_s = each["blockTime"] / 1000
        entry.explorer = entry.explorer or next(iter(each.get("explorers", ())), "")
        if address := each.get("multicall3"):
            entry.multicall = "y" if address.lower() == MULTICALL3 else address


def live_words(name: str) -> list[str]:
    words = words_of(name)
    return words[:-1] if len(words) > 1 and words[-1] == "mainnet" else words


def viem_names(name: str, mainnets: set[tuple[str, ...]], *, is_test: bool) -> tuple[str, str]:
    if not is_test:
        return "-".join(live_words(name)), "mainnet"
    words = words_of(name)
    for length in range(len(words) - 1, 0, -1):
        if tuple(words[:length]) in mainnets:
            return "-".join(words[:length]), "".join(words[length:])
    if len(words) > 1 and words[-1] in TEST_WORDS:
        return "-".join(words[:-1]), words[-1]
    return "-".join(words), "testnet"


def is_wanted(entry: Entry, facts: Mapping[str, Any], filed: Mapping[int, tuple[str, str]]) -> bool:
    is_over = facts.get("status") == "deprecated" or ENDED.search(f"{entry.chain}/{entry.network}")
    return entry.id in filed or (entry.id not in LOCAL_IDS and not is_over and entry.id < 1 << 53)


def add_facts(entry: Entry, facts: Mapping[str, Any]) -> None:
    if not facts:
        return
    coin = facts["nativeCurrency"]
    entry.symbol, entry.decimals = coin["symbol"], coin["decimals"]
    explorers = [each["url"].rstrip("/") for each in facts.get("explorers", ())]
    entry.explorer = next(iter(explorers), entry.explorer)
    entry.title = re.sub(r"\s+(Mainnet|Testnet)\b.*", "", entry.title or facts["name"])
    entry.words.append(facts["shortName"].lower())


def with_names(
    wanted: Sequence[Entry], files: Sequence[Mapping[str, Any]], filed: Mapping[int, tuple[str, str]]
) -> Iterator[Entry]:
    """The networks with names that are valid and given once. A chain's file may know the chain by another name."""
    known = {name: chain["name"] for chain in files for name in (chain["name"], *chain.get("aliases", ()))}
    taken = set(filed.values())
    taken_words = {*known, *(f"{name}-{network}" for name, network in taken)}
    for entry in sorted(wanted, key=lambda each: (each.is_test, each.network != "mainnet", each.id)):
        if entry.id in filed:
            entry.chain, entry.network = filed[entry.id]
            entry.words = [word for word in entry.words if WORD.fullmatch(word) and word not in taken_words]
            taken_words |= {*entry.words}
            yield entry
            continue
        entry.chain = known.get(entry.chain, entry.chain).replace("0g", "zerog")
        if not entry.is_test and (entry.chain, "mainnet") not in taken:
            entry.network = "mainnet"
        entry.network = entry.network.removeprefix(entry.chain.replace("-", "")) or "testnet"
        if not entry.network[:1].isalpha():
            entry.network = f"test{entry.network}"
        if (entry.chain, entry.network) in taken:
            entry.network = f"{entry.network}{entry.id}"
        if not WORD.fullmatch(entry.chain) or len(entry.chain) > 32 or len(entry.network) > 32:
            print(f"left out {entry.id}: no usable name in {entry.chain}/{entry.network}", file=sys.stderr)
            continue
        taken.add((entry.chain, entry.network))
        own = {entry.chain, f"{entry.chain}-{entry.network}"}
        entry.words = [word for word in entry.words if WORD.fullmatch(word) and word not in taken_words | own]
        taken_words |= {*entry.words, f"{entry.chain}-{entry.network}"}
        yield entry


if __name__ == "__main__":
    sys.exit(main())
