"""The networks and methods that a key may be limited to. A key that is limited to a mistyped one would never work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from proxy.chains.registry import nearest_network
from proxy.core.near_names import near_names
from proxy.errors import InvalidRequest
from proxy.store.postgres.keys import KeyRestrictionChange

# Unknown names of each list that are reported at once: looking for the nearest network takes up to 1 ms.
MOST_NAMED = 5


class KnownUses:
    def __init__(self, networks: Sequence[str], methods: Iterable[str]) -> None:
        self._networks = networks
        self._methods = frozenset(methods)

    def __repr__(self) -> str:
        return f"<KnownUses {len(self._networks)} networks, {len(self._methods)} methods>"

    def check(self, change: KeyRestrictionChange) -> None:
        """Raise InvalidRequest with the names that are unknown. Their form is checked where they are stored."""
        networks = [each for each in change.networks or () if each.count("/") == 1 and each not in self._networks]
        methods = [each for each in change.methods or () if each not in self._methods]
        errors = [
            *(("allowed_networks", self._no_network(each)) for each in networks[:MOST_NAMED]),
            *(("allowed_methods", self._no_method(each)) for each in methods[:MOST_NAMED]),
        ]
        if errors:
            raise InvalidRequest.listing([(param, f"{param}: {message}") for param, message in errors])

    def _no_network(self, name: str) -> str:
        nearest = nearest_network(name, self._networks)
        advice = f"did you mean {nearest}?" if nearest else "GET /v1/chains lists those with an upstream"
        return f"there is no network {name[:100]}; {advice}"

    def _no_method(self, name: str) -> str:
        nearest = near_names(self._methods).nearest(name)
        advice = f"did you mean {nearest}?" if nearest else "names are written in full, such as eth_call"
        return f"there is no method {name[:100]}; {advice}"
