"""Facts of public EVM networks, most of them without a file in config/chains: `config/chain-list.tsv`, one network per line.

`deploy/release/chain_list.py` writes the list. It is read only when a name is not known otherwise, and only the chains that the
settings name are kept. Chains of config/chains come first: a listed network adds to such a chain, and never replaces one there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from proxy.chains.registry import Chain, Native, Network, NetworkClass, NetworkFacts, Registry

FILE = "chain-list.tsv"
# The address of Multicall3 on most chains, which the list shortens to `y`.
_MULTICALL3 = "0xcA11bde05977b3631167028862bE2a173976CA11"
# Networks whose block time is not listed are treated as fast ones, which have most blocks within the time of finality.
_FAST_BLOCK_S = 2.0
# A block is treated as final after this time, and after 64 blocks: as long as rollups need to post their batches to a final
# block of Ethereum. It only decides how long replies are cached, how deeply reorganisations are looked for, and what
# webhooks treat as final.
_FINAL_S, _FINAL_BLOCKS, _MOST_BLOCKS = 1800.0, 64, 100_000


@dataclass(frozen=True, slots=True)
class ListedNetwork:
    """One line. `words`: names of the network in other programs' settings. `slot`: its position in the list."""

    chain: str
    network: str
    chain_id: int
    class_: NetworkClass
    native: Native
    block_time_s: float | None
    multicall: str | None
    title: str
    explorers: tuple[str, ...]
    words: tuple[str, ...]
    slot: int

    @property
    def id(self) -> str:
        return f"{self.chain}/{self.network}"

    def facts(self, *, default: bool) -> NetworkFacts:
        block_time_s = self.block_time_s or _FAST_BLOCK_S
        return NetworkFacts(
            class_=self.class_,
            block_time_s=block_time_s,
            finality_blocks=min(_MOST_BLOCKS, max(_FINAL_BLOCKS, round(_FINAL_S / block_time_s))),
            chain_id=self.chain_id,
            default=default,
            explorers=self.explorers,
            listed_at=self.slot,
        )

    def is_named(self, name: str) -> bool:
        """By `chain/network`, `id/network`, `chain-network`, the id, the chain's name for its mainnet, or another program's
        word."""
        own = (self.id, f"{self.chain_id}/{self.network}", f"{self.chain}-{self.network}", str(self.chain_id))
        return name in own or name in self.words or (self.network == "mainnet" and name == self.chain)


def listed_networks(config: Path) -> Iterator[ListedNetwork]:
    """All lines. None if the directory has no list."""
    path = config / FILE
    lines = path.read_text("utf-8").splitlines()[1:] if path.exists() else []
    for slot, line in enumerate(lines):
        chain, network, chain_id, class_, symbol, decimals, time, multicall, title, explorer, words = line.split("\t")
        yield ListedNetwork(
            chain,
            network,
            int(chain_id),
            "test" if class_ == "test" else "live",
            Native(symbol, int(decimals)),
            float(time) if time else None,
            _MULTICALL3 if multicall == "y" else multicall or None,
            title,
            (explorer,) if explorer else (),
            tuple(words.split()),
            slot,
        )


def find_network(registry: Registry, config: Path, name: str) -> Network | None:
    """The network of a name in any form, from the registry or from the list."""
    if (network := _registered(registry, name)) is not None:
        return network
    listed = next((each for each in listed_networks(config) if each.is_named(name)), None)
    if listed is None:
        return None
    whole = with_listed(registry, config, (listed.id,))
    return whole.find(listed.chain, listed.network) or _registered(registry, str(listed.chain_id))


def _registered(registry: Registry, name: str) -> Network | None:
    chain, slash, network = name.partition("/")
    return registry.find(chain, network) if slash else registry.find_word(name, live=True)


def with_listed(registry: Registry, config: Path, names: Iterable[str]) -> Registry:
    """A registry that also has the listed chains of these names. The same one if it knows all names that the list knows."""
    unknown = {name for name in names if _registered(registry, name) is None}
    if not unknown:
        return registry
    listed = [each for each in listed_networks(config) if registry.find_word(str(each.chain_id), live=True) is None]
    wanted = {each.chain for each in listed for name in unknown if each.is_named(name)}
    if not wanted:
        return registry
    groups = {chain: [each for each in listed if each.chain == chain] for chain in sorted(wanted)}
    return Registry((registry.chains | _chains(registry.chains, groups)).values(), registry.families)


def _chains(known: Mapping[str, Chain], groups: Mapping[str, list[ListedNetwork]]) -> dict[str, Chain]:
    chains = {}
    for name, group in groups.items():
        if name in known:
            chain = known[name]
            # The file has chosen a default test network already.
            added = {each.network: each.facts(default=False) for each in group if each.network not in chain.networks}
            chains[name] = replace(chain, networks={**chain.networks, **added})
        else:
            chains[name] = _chain(group)
    return chains


def _chain(group: list[ListedNetwork]) -> Chain:
    """A chain of listed networks. Its default test network is Sepolia, or the first one."""
    tests = sorted((each for each in group if each.class_ == "test"), key=lambda each: each.network != "sepolia")
    first = group[0]
    return Chain(
        name=first.chain,
        title=first.title,
        native=first.native,
        # A network without it, or with another address, is noticed by the first call, and uses single calls.
        multicall=next((each.multicall for each in group if each.multicall), None),
        networks={each.network: each.facts(default=tests[:1] == [each]) for each in group},
    )
