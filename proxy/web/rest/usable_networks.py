"""/chains: the networks that a key can use, with what is available on each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from proxy.chains.families import family_of
from proxy.chains.registry import Registry
from proxy.core.data_bounds import DATA_INDEX
from proxy.core.fleet import status_of
from proxy.services.rpc.networks import Networks, Route
from proxy.services.sponsor.paymasters import Paymasters
from proxy.web.rest.endpoint import RestHandler, RestRequest


class UsableNetworks:
    def __init__(
        self,
        chains: Registry,
        networks: Networks,
        bundlers: Networks,
        paymasters: Paymasters,
        *,
        follows: Callable[[str], bool],
    ) -> None:
        """`follows`: whether a network is indexed, which webhooks, balances and NFTs need."""
        self._chains = chains
        self._networks = networks
        self._bundlers = bundlers
        self._paymasters = paymasters
        self._follows = follows

    def __repr__(self) -> str:
        return f"<UsableNetworks {len(self._networks.routes)}>"

    def handlers(self) -> dict[str, RestHandler]:
        return {"list_chains": self.read}

    async def read(self, request: RestRequest) -> dict[str, Any]:
        routes = (self._networks.find(network) for network in self._chains.networks())
        may_use = request.key.may_use
        usable = [
            route for route in routes if route is not None and may_use(route.network.id, is_live=route.network.is_live)
        ]
        return {"networks": [self._shown(route) for route in usable]}

    def _shown(self, route: Route) -> dict[str, Any]:
        network = route.network
        native = network.chain.native
        return {
            "chain": network.chain.name,
            "network": network.name,
            "title": network.chain.title,
            "aliases": list(network.chain.aliases),
            "family": network.family,
            "class": network.facts.class_,
            "chain_id": network.facts.chain_id,
            "genesis": network.facts.genesis,
            "native": {"symbol": native.symbol, "decimals": native.decimals},
            "block_time_s": network.facts.block_time_s,
            "features": self._features(route),
            "explorers": list(network.facts.explorers),
            "status": status_of((upstream.health for upstream in route.upstreams), time.monotonic()),
            "block": route.heads.tip or None,
        }

    def _features(self, route: Route) -> list[str]:
        network = route.network
        known, follows = family_of(network).features, self._follows(network.id)
        has = {
            "rpc": family_of(network).rest is None,
            "rest": family_of(network).rest is not None,
            "archive": route.state.oldest_block(DATA_INDEX["state"]) <= 1,
            "subscriptions": family_of(network).subscriptions is not None,
            "tokens": family_of(network).tokens is not None and (follows or "follower" not in known),
            "nfts": "nfts" in known and follows,
            "webhooks": "webhooks" in known and follows,
            "gas_prices": "gas_prices" in known,
            "bundler": self._bundlers.find(network) is not None,
            "sponsorship": bool(self._paymasters.versions(network)),
        }
        return [name for name, is_there in has.items() if is_there]
