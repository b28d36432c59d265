"""Makes the examples of the API spec work on this installation: each names a network that has an upstream here.

The files in `schemas/` name well-known chains. An example for a network that is not served is moved to a served network of the
same family. If the family has none, the example is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from proxy.chains.families import family_of
from proxy.chains.registry import Network, Registry

# The parameters of a path that name a chain, alone or together with a network.
_WORDS, _CHAINS, _NETWORKS = "Chain", "RpcChain", "Network"


class LocalExamples:
    def __init__(self, chains: Registry, served: Iterable[Network]) -> None:
        self._chains = chains
        self._served = {network.id for network in served}
        self._by_family: dict[str, Network] = {}
        # The examples are of JSON-RPC and of our own operations: families with routes have neither.
        shown = [each for each in chains.networks() if each.id in self._served and family_of(each).rest is None]
        for network in sorted(shown, key=_rank):
            self._by_family.setdefault(network.family, network)

    def __repr__(self) -> str:
        return f"<LocalExamples {', '.join(network.id for network in self._by_family.values())}>"

    def applied(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of the document with examples for the served networks."""
        if not self._by_family:
            return dict(document)
        moved: dict[str, Any] = self._moved(document)
        parameters = moved["components"]["parameters"]
        parameters[_WORDS]["examples"] = self._examples(lambda network: network.word(live=True))
        parameters[_CHAINS]["examples"] = self._examples(lambda network: network.chain.name)
        parameters[_NETWORKS]["examples"] = self._examples(lambda network: network.name)
        return moved

    def _examples(self, value: Any) -> dict[str, Any]:
        """One example per family, under the family's name. Examples of bodies have the same names."""
        return {family: {"value": value(network)} for family, network in self._by_family.items()}

    def _moved(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self._moved(each) for each in node]
        if not isinstance(node, dict):
            return node
        copied = {name: self._moved(each) for name, each in node.items() if not self._is_foreign(name, each)}
        if isinstance(word := copied.get("chain"), str) and "network" not in copied:
            self._move(copied, word)
        return copied

    def _is_foreign(self, name: str, node: Any) -> bool:
        """Whether this is an example of a family without a served network."""
        is_example = isinstance(node, dict) and "value" in node
        return is_example and name in self._chains.families and name not in self._by_family

    def _move(self, example: dict[str, Any], word: str) -> None:
        meant = self._chains.find_word(word, live=True)
        if meant is None or meant.id in self._served or meant.family not in self._by_family:
            return
        network = self._by_family[meant.family]
        example["chain"] = network.word(live=True)
        if "chainId" in example:
            example["chainId"] = network.facts.chain_id


def _rank(network: Network) -> tuple[int, bool, int]:
    """First the family that most operations are for, then live networks; among them, well-known chains have low ids."""
    return -len(family_of(network).features), not network.is_live, network.facts.chain_id or 0
