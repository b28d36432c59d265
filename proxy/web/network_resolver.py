"""Which network a path means, and whether its key may go there."""

from __future__ import annotations

import re

from proxy.chains.registry import Network, Registry
from proxy.core.access import Key
from proxy.errors import NotFound
from proxy.services.accounts.admission import Admission
from proxy.services.rpc.networks import Networks, Route

_NAME = re.compile(r"[a-z0-9-]{1,40}(?:/[a-z0-9-]{1,40})?", re.ASCII)


class NetworkResolver:
    def __init__(self, chains: Registry, networks: Networks, admission: Admission, *, needs: str = "upstream") -> None:
        """`needs`: what a network must have configured to be found."""
        self._needs = needs
        self._chains = chains
        self._networks = networks
        self._admission = admission

    def route(self, key: Key, scopes: int, chain: str, name: str) -> Route:
        """Of a path that names both, such as /rpc/{chain}/{network}."""
        return self._open(key, scopes, self._chains.find(chain, name), f"{chain}/{name}")

    def network(self, key: Key, scopes: int, word: str) -> Network:
        """Of a path that names a chain only: the class of the key decides, or the word names the network outright."""
        return self._open(key, scopes, self._chains.find_word(word, live=key.live), word).network

    def configured(self, network_id: str) -> Network | None:
        """The network with this id, or None if it is no longer configured."""
        return self._chains.find(*network_id.split("/"))

    def _open(self, key: Key, scopes: int, network: Network | None, asked: str) -> Route:
        if network is None:
            # Only what could be a name is repeated: a key may stand in a path by mistake.
            named = f" {asked}" if _NAME.fullmatch(asked) else ""
            raise NotFound(f"there is no network{named}")
        if refusal := self._admission.may(key, scopes, network):
            raise refusal
        route = self._networks.find(network)
        if route is None:
            raise NotFound(f"the network {network.id} is known, but no {self._needs} is configured for it")
        return route
