"""Build the feed of each network by the kind that its chain family declares."""

from __future__ import annotations

from collections.abc import Callable

from proxy.chains.families import family_of
from proxy.chains.family import FeedKind
from proxy.services.feed.evm_feed import EvmFeed
from proxy.services.feed.feed_terms import FeedTerms
from proxy.services.feed.stream_feed import StreamFeed
from proxy.services.feed.svm_feed import SvmFeed
from proxy.services.feed.topics import Feeds, NetworkFeed
from proxy.services.rpc.networks import Networks, Route

_FEEDS: dict[FeedKind, Callable[[Route, FeedTerms], NetworkFeed]] = {
    "evm": EvmFeed,
    "svm": SvmFeed,
    "stream": StreamFeed,
}


def feeds_of(networks: Networks, terms: FeedTerms) -> Feeds:
    """Families without subscriptions or event streams have no feed."""
    kinds = {name: _kind(route) for name, route in networks.routes.items()}
    return Feeds({name: _FEEDS[kind](networks.routes[name], terms) for name, kind in kinds.items() if kind})


def _kind(route: Route) -> FeedKind | None:
    family = family_of(route.network)
    if family.rest is not None and family.rest.events is not None:
        return "stream"
    return None if family.subscriptions is None else family.subscriptions.feed
