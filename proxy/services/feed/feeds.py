"""Build the feed of each network by the kind that its chain family declares."""

from __future__ import annotations

from collections.abc import Callable

from proxy.chains.families import family_of
from proxy.chains.family import FeedKind
from proxy.services.feed.evm_feed import EvmFeed
from proxy.services.feed.feed_terms import FeedTerms
from proxy.services.feed.svm_feed import SvmFeed
from proxy.services.feed.topics import Feeds, NetworkFeed
from proxy.services.rpc.networks import Networks, Route

_FEEDS: dict[FeedKind, Callable[[Route, FeedTerms], NetworkFeed]] = {"evm": EvmFeed, "svm": SvmFeed}


def feeds_of(networks: Networks, terms: FeedTerms) -> Feeds:
    """Families without subscriptions have no feed."""
    rules = {name: family_of(route.network).subscriptions for name, route in networks.routes.items()}
    return Feeds({name: _FEEDS[found.feed](networks.routes[name], terms) for name, found in rules.items() if found})
