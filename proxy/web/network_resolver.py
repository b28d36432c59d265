"""Finds the network that a path names, and checks that the key may use it."""

from __future__ import annotations

import re

from proxy.chains.families import family_of
from proxy.chains.registry import Network, Registry, nearest_network
from proxy.core.access import Key
from proxy.errors import NotFound
from proxy.services.accounts.admission import Admission
from proxy.services.rpc.networks import Networks, Route

_LIST = "GET /v1/chains lists those that this key can use"
_NAME = re.compile(r"[a-z0-9-]{1,40}(?:/[a-z0-9-]{1,40})?", re.ASCII)


def require_json_rpc(network: Network) -> None:
    """Raise NotFound for a network whose upstreams have REST routes only."""
    if family_of(network).rest is not None:
        message = f"the network {network.id} has no JSON-RPC: use its routes at /v1/rest/{network.id}/"
        raise NotFound(message, reason="network")


class NetworkResolver:
    def __init__(self, chains: Registry, networks: Networks, admission: Admission, *, needs: str = "upstream") -> None:
        """`needs` is what a network must have configured, for the error message."""
        self._needs = needs
        self._chains = chains
        self._networks = networks
        self._admission = admission

    def route(self, key: Key, scopes: int, chain: str, name: str) -> Route:
        """The route for a path that names chain and network, such as /rpc/{chain}/{network}."""
        return self._open(key, scopes, self._chains.find(chain, name), f"{chain}/{name}")

    def network(self, key: Key, scopes: int, word: str) -> Network:
        """The network for a path that names only a chain: the key's class selects it, unless the word is a network's id."""
        return self._open(key, scopes, self._chains.find_word(word, live=key.live), word).network

    def known(self, key: Key, scopes: int, word: str) -> Network:
        """Like `network`, whether or not the network has an upstream."""
        return self._known(key, scopes, self._chains.find_word(word, live=key.live), word)

    def configured(self, network_id: str) -> Network | None:
        """The network with this id, or None if it is no longer configured."""
        return self._chains.find(*network_id.split("/"))

    def _open(self, key: Key, scopes: int, network: Network | None, name: str) -> Route:
        network = self._known(key, scopes, network, name)
        route = self._networks.find(network)
        if route is None:
            raise NotFound(
                f"the network {network.id} is known, but no {self._needs} is configured for it", reason="network"
            )
        return route

    def _known(self, key: Key, scopes: int, network: Network | None, name: str) -> Network:
        if network is None:
            raise self._no_network(key, name)
        if refusal := self._admission.authorize(key, scopes, network):
            raise refusal
        return network

    def _no_network(self, key: Key, name: str) -> NotFound:
        """Repeats only valid names: the path may contain an API key by mistake."""
        if not _NAME.fullmatch(name):
            return NotFound(f"there is no such network; {_LIST}", reason="network")
        nearest = nearest_network(name, self._names(key, name))
        advice = f"did you mean {nearest}?" if nearest else _LIST
        return NotFound(f"there is no network {name}; {advice}", reason="network")

    def _names(self, key: Key, name: str) -> list[str]:
        """The names of the networks that the key can use, in the form of the given one."""
        known = (route.network for route in self._networks.routes.values())
        usable = [network for network in known if key.may_use(network.id, is_live=network.is_live)]
        return [network.id if "/" in name else network.word(live=key.live) for network in usable]
