"""Build the feed of each network according to its chain family."""

from __future__ import annotations

from proxy.services.feed.evm_feed import EvmFeed
from proxy.services.feed.svm_feed import SvmFeed
from proxy.services.feed.topics import Feeds, NetworkFeed
from proxy.services.rpc.networks import Networks, Route


def feeds_of(networks: Networks) -> Feeds:
    return Feeds({name: _feed(route) for name, route in networks.routes.items()})


def _feed(route: Route) -> NetworkFeed:
    return EvmFeed(route) if route.network.family == "evm" else SvmFeed(route)
