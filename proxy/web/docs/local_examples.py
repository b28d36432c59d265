"""Makes the examples of the API spec work on this installation: each names a network that has an upstream here.

The files in `schemas/` name well-known chains. An example for a network that is not served is moved to a served network of the
same family. If the family has none, the example is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from proxy.chains.families import family_of
from proxy.chains.registry import Network, Registry

# The parameters of a path that name a chain, alone or together with a network.
_WORDS, _CHAINS, _NETWORKS = "Chain", "RpcChain", "Network"
# The same for chains with REST routes, whose paths have examples for each family as well.
_REST_CHAINS, _REST_NETWORKS, _REST_PATHS = "RestChain", "RestNetwork", ("RestPath", "RestPostPath")


class LocalExamples:
    def __init__(self, chains: Registry, served: Iterable[Network]) -> None:
        self._chains = chains
        self._served = {network.id for network in served}
        self._by_family: dict[str, Network] = {}
        # Families with routes have neither JSON-RPC nor our own operations, so they have examples of their own.
        self._with_routes: dict[str, Network] = {}
        shown = [each for each in chains.networks() if each.id in self._served]
        for network in sorted(shown, key=_rank):
            by_family = self._by_family if family_of(network).rest is None else self._with_routes
            by_family.setdefault(network.family, network)

    def __repr__(self) -> str:
        return f"<LocalExamples {', '.join(network.id for network in self._by_family.values())}>"

    def applied(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of the document with examples for the served networks."""
        moved: dict[str, Any] = self._moved(document)
        parameters = moved["components"]["parameters"]
        if self._by_family:
            parameters[_WORDS]["examples"] = _examples(self._by_family, lambda network: network.word(live=True))
            parameters[_CHAINS]["examples"] = _examples(self._by_family, lambda network: network.chain.name)
            parameters[_NETWORKS]["examples"] = _examples(self._by_family, lambda network: network.name)
        given = parameters[_REST_PATHS[0]]["examples"]
        if shown := {family: network for family, network in self._with_routes.items() if family in given}:
            parameters[_REST_CHAINS]["examples"] = _examples(shown, lambda network: network.chain.name)
            parameters[_REST_NETWORKS]["examples"] = _examples(shown, lambda network: network.name)
            for name in _REST_PATHS:
                of_all = parameters[name]["examples"]
                parameters[name]["examples"] = {family: of_all[family] for family in shown}
        return moved

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
        if not (isinstance(node, dict) and "value" in node and name in self._chains.families):
            return False
        served = self._by_family if self._chains.families[name].rest is None else self._with_routes
        return bool(served) and name not in served

    def _move(self, example: dict[str, Any], word: str) -> None:
        meant = self._chains.find_word(word, live=True)
        if meant is None or meant.id in self._served or meant.family not in self._by_family:
            return
        network = self._by_family[meant.family]
        example["chain"] = network.word(live=True)
        if "chainId" in example:
            example["chainId"] = network.facts.chain_id


def _examples(networks: Mapping[str, Network], value: Callable[[Network], str]) -> dict[str, Any]:
    """One example per family, under the family's name. Examples of bodies have the same names."""
    return {family: {"value": value(network)} for family, network in networks.items()}


def _rank(network: Network) -> tuple[int, bool, int]:
    """First the family that most operations are for, then live networks; among them, well-known chains have low ids."""
    return -len(family_of(network).features), not network.is_live, network.facts.chain_id or 0
