"""The chains and networks, by all their names.

Built from `config/chains/*.toml` and the list of other public networks: adding a chain needs no code. A path names a network
in one of three ways: `ethereum/sepolia` (chain and network), `ethereum` (the class of the key decides), `ethereum-sepolia`
(one network outright). Aliases and chain ids are accepted wherever names are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal

import msgspec

from proxy.chains.family import Family

NetworkClass = Literal["live", "test"]


@dataclass(frozen=True, slots=True)
class Native:
    symbol: str
    decimals: int


@dataclass(frozen=True, slots=True)
class PriceFeedContract:
    """A contract that returns a price in US dollars, and the maximum age of that price."""

    address: str
    max_age_s: float


@dataclass(frozen=True, slots=True)
class PriceListing:
    """The names of a chain and its coin in a CoinGecko-like price API."""

    platform: str
    coin: str


class NetworkFacts(msgspec.Struct, frozen=True, kw_only=True, rename={"class_": "class"}):
    """One network in a chain's file."""

    class_: NetworkClass
    block_time_s: float = 12.0
    finality_blocks: int = 64
    finality_tag: bool = True
    min_priority_gwei: str = "0.0"
    legacy_fees: bool = False
    chain_id: int | None = None
    genesis: str | None = None
    # The block whose hash is `genesis`, in families that name their chains by it.
    genesis_at: int = 0
    default: bool = False
    # Blocks are made only for transactions: the age of data on the chain is measured by its newest block, not by the clock.
    on_demand: bool = False
    # The registry of names (ENS), where the network has one.
    ens: str | None = None
    # By the address of the token, or `native`.
    feeds: dict[str, PriceFeedContract] = {}
    # Addresses of block explorers for people.
    explorers: tuple[str, ...] = ()
    # Its position in the list of networks without a chain file, if it comes from there.
    listed_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    name: str
    title: str
    networks: Mapping[str, NetworkFacts]
    # The name of a file in `config/families`.
    family: str = "evm"
    native: Native = Native("ETH", 18)
    aliases: tuple[str, ...] = ()
    multicall: str | None = None
    listing: PriceListing | None = None
    entry_points: Mapping[str, str] = field(default_factory=dict)
    factories: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Network:
    """One network of one chain, to which requests are routed. `rules`: those of its family."""

    chain: Chain
    name: str
    facts: NetworkFacts
    rules: Family = field(repr=False, compare=False)

    @property
    def id(self) -> str:
        return f"{self.chain.name}/{self.name}"

    @property
    def family(self) -> str:
        return self.chain.family

    @property
    def is_live(self) -> bool:
        return self.facts.class_ == "live"

    @property
    def identity(self) -> str:
        """The name that an upstream gives its chain: the chain id or the hash of the first block. Empty if it is unknown."""
        return self.facts.genesis or str(self.facts.chain_id or "")

    def word(self, *, live: bool) -> str:
        """The word that means this network for a key of this class: the chain's name, if that is enough."""
        is_meant = self.is_live if live else self.facts.default
        return self.chain.name if is_meant else f"{self.chain.name}-{self.name}"


class Registry:
    """All networks, found by chain and network or by one word."""

    def __init__(self, chains: Iterable[Chain], families: Mapping[str, Family]) -> None:
        """`families` has the family of each chain."""
        self.chains = {chain.name: chain for chain in chains}
        self.families = families
        self._chain_of = dict(self._chain_names())
        self._networks = [
            Network(chain, name, facts, families[chain.family])
            for chain in self.chains.values()
            for name, facts in chain.networks.items()
        ]
        self._network_of = dict(self._network_paths())
        self._by_word = dict(self._network_words())

    def _chain_names(self) -> Iterator[tuple[str, Chain]]:
        for chain in self.chains.values():
            yield chain.name, chain
            for alias in chain.aliases:
                yield alias, chain

    def _network_paths(self) -> Iterator[tuple[tuple[str, str], Network]]:
        for network in self._networks:
            for name in (network.chain.name, *network.chain.aliases):
                yield (name, network.name), network
            if network.facts.chain_id is not None:
                yield (str(network.facts.chain_id), network.name), network

    def _network_words(self) -> Iterator[tuple[str, Network]]:
        for network in self._networks:
            for name in (network.chain.name, *network.chain.aliases):
                yield f"{name}-{network.name}", network
        # Two networks may share an id (the dev chain's do): the live one has it.
        for network in sorted(self._networks, key=lambda network: network.is_live):
            if network.facts.chain_id is not None:
                yield str(network.facts.chain_id), network

    def find(self, chain: str, network: str) -> Network | None:
        """The network of a path such as /rpc/{chain}/{network}."""
        return self._network_of.get((chain, network))

    def find_word(self, word: str, *, live: bool) -> Network | None:
        """The network of a path that names a chain only: outright, or the one that the key's class means."""
        if network := self._by_word.get(word):
            return network
        if (chain := self._chain_of.get(word)) is None:
            return None
        for name, facts in chain.networks.items():
            if (facts.class_ == "live") if live else facts.default:
                return self._network_of[chain.name, name]
        return None

    def networks(self) -> Iterator[Network]:
        yield from self._networks

    def positions(self) -> dict[str, int]:
        """A number for each network by its id, which stays the same if another network of the list is added or removed."""
        filed = [network for network in self._networks if network.facts.listed_at is None]
        listed = [(each.id, each.facts.listed_at) for each in self._networks if each.facts.listed_at is not None]
        return {network.id: place for place, network in enumerate(filed)} | {
            name: len(filed) + place for name, place in listed
        }

    def faults(self) -> Iterator[str]:
        """Faults that the schema of a single file cannot detect."""
        seen: dict[str, str] = {}
        for chain in self.chains.values():
            # Networks of one chain may share an id; networks of different chains may not.
            ids = {str(facts.chain_id) for facts in chain.networks.values() if facts.chain_id is not None}
            names = (chain.name, *chain.aliases)
            free = [name for name in names if name not in seen]
            words = (*names, *sorted(ids), *(f"{name}-{network}" for name in free for network in chain.networks))
            yield from (f"{chain.name}.toml: the name {w!r} is taken by {seen[w]}.toml" for w in words if w in seen)
            seen.update(dict.fromkeys(words, chain.name))
            defaults = [name for name, facts in chain.networks.items() if facts.default]
            if len(defaults) > 1:
                yield f"{chain.name}.toml: more than one default test network: {', '.join(defaults)}"
            if any(chain.networks[name].class_ == "live" for name in defaults):
                yield f"{chain.name}.toml: a live network is the default test network"

    def __repr__(self) -> str:
        return f"<Registry {len(self.chains)} chains, {sum(len(c.networks) for c in self.chains.values())} networks>"


def nearest_network(name: str, names: Sequence[str]) -> str:
    """The name that is nearest to this one, or an empty string. The chain decides: many networks are called mainnet."""
    chain, slash, network = name.partition("/")
    near = get_close_matches(chain, {each.partition("/")[0] for each in names}, n=1)
    if not near or not slash:
        return near[0] if near else ""
    of_chain = [each.partition("/")[2] for each in names if each.startswith(f"{near[0]}/")]
    matches = get_close_matches(network, of_chain, n=1)
    return f"{near[0]}/{matches[0]}" if matches else ""
