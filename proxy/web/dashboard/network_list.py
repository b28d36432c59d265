"""The networks as the page needs them: the features of each, and calls to try.

The page knows no chain family. It offers a network wherever the network has the feature, so a new family appears there as soon
as it is registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import orjson

from proxy.chains.families import family_of
from proxy.chains.family import Family, MethodTable
from proxy.chains.registry import Network


def network_list(
    networks: Iterable[Network], methods: Mapping[str, MethodTable], follows: Callable[[str], bool]
) -> dict[str, Any]:
    """`methods`: the method tables by family. `follows`: whether a network is indexed, which webhooks need."""
    listed = [*networks]
    families = {each.family: family_of(each) for each in listed}
    return {
        "networks": [_network(each, follows) for each in listed],
        "methods": {name: _samples(families[name], methods[name]) for name in sorted(families)},
    }


def _network(network: Network, follows: Callable[[str], bool]) -> dict[str, Any]:
    family = family_of(network)
    features = family.features | {"rest" if family.rest is not None else "rpc"}
    return {
        "network": network.id,
        "title": network.chain.title,
        "family": network.family,
        "class": network.facts.class_,
        "features": sorted(features if follows(network.id) else features - {"webhooks"}),
    }


def _samples(family: Family, methods: MethodTable) -> list[dict[str, Any]]:
    """Methods with sample params, in the order of their file, after the one that returns the head."""
    head, params = family.head.lookups.number.first
    others = [(name, method.sample) for name, method in methods.items() if method.sample and name != head]
    return [{"method": name, "params": orjson.loads(text)} for name, text in [(head, params.decode()), *others]]
