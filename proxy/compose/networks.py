"""What every process that asks upstreams is built on: the networks that have any, each with its upstreams or its bundlers."""

from __future__ import annotations

import hmac
from collections import defaultdict
from collections.abc import Callable, MutableSequence, Sequence

from proxy.chains.registry import Network
from proxy.core.caching import ReplyCache
from proxy.core.routing import UpstreamHealth
from proxy.services.bundler import routes as bundler
from proxy.services.rpc.method_policy import policies_of, unknown_of
from proxy.services.rpc.networks import Networks, Route, SharedHead
from proxy.settings import BundlerSettings, Settings, Tables, UpstreamSettings
from proxy.telemetry import Tally
from proxy.wire.address import UpstreamAddress
from proxy.wire.http_upstream import HttpUpstream
from proxy.wire.upstream import Upstream
from proxy.wire.websocket_upstream import WebSocketUpstream
from proxy.wire.write_buffer import WriteBuffer


class NetworkBuilder:
    """Makes the routes. `marks` is where processes of a host keep in step; one that answers nobody has its own."""

    def __init__(
        self,
        settings: Settings,
        tables: Tables,
        write_buffer: WriteBuffer,
        *,
        tally: Callable[[str, str], Tally],
        shared_heads: MutableSequence[int] | memoryview[int],
    ) -> None:
        self._settings = settings
        self._tables = tables
        self._write_buffer = write_buffer
        self._tally = tally
        self._shared_heads = shared_heads

    def networks(self) -> Networks:
        by_network = self._by_network(self._settings.upstreams)
        share = self._settings.cache.bytes // max(1, len(by_network))
        # The place among all networks there are, so that workers with other upstreams mean the same.
        places = {network.id: (place, network) for place, network in enumerate(self._tables.chains.networks())}
        return Networks([self._route(*places[name], found, share) for name, found in by_network.items()])

    def _route(self, place: int, network: Network, found: list[UpstreamSettings], cache_bytes: int) -> Route:
        settings = self._settings
        return Route(
            network,
            [self._upstream(network, index, each) for index, each in enumerate(found)],
            policies_of(network, self._tables.prices, self._tally),
            ReplyCache(cache_bytes),
            SharedHead(self._shared_heads, place),
            unknown=unknown_of(network, self._tally),
            broadcast=settings.rpc.broadcast,
            call_timeout_s=settings.rpc.call_timeout_s,
            lag_s=settings.rpc.lag_s,
            keeps=settings.cache.enabled,
            coalesces=settings.cache.coalesce,
        )

    def bundlers(self) -> Networks:
        """The bundlers of each network that has any: routes of the same kind, on which nothing is kept."""
        known = {network.id: network for network in self._tables.chains.networks()}
        found = self._by_network([_as_upstream(each) for each in self._settings.bundlers])
        return Networks([self._bundler_route(known[name], each) for name, each in found.items()])

    def _bundler_route(self, network: Network, found: list[UpstreamSettings]) -> Route:
        settings = self._settings
        return Route(
            network,
            [self._upstream(network, index, each, "bundler ") for index, each in enumerate(found)],
            bundler.policies_of(network, self._tables.prices, self._tally),
            ReplyCache(0),
            # Nothing is remembered, so nobody has to be told when it ends.
            SharedHead([0, 0], 0),
            unknown=bundler.unknown_of(network, self._tally),
            broadcast=1,
            call_timeout_s=settings.bundler.call_timeout_s,
            lag_s=settings.rpc.lag_s,
            keeps=False,
            coalesces=False,
            any_scope=bundler.ANY_SCOPE,
            max_body=settings.bundler.max_body_bytes,
        )

    def _by_network(self, given: Sequence[UpstreamSettings]) -> dict[str, list[UpstreamSettings]]:
        found: defaultdict[str, list[UpstreamSettings]] = defaultdict(list)
        for upstream in given:
            network = self._tables.chains.find(*upstream.network.split("/"))
            assert network is not None  # checked when the settings were read
            found[network.id].append(upstream)
        return found

    def _upstream(self, network: Network, index: int, given: UpstreamSettings, kind: str = "") -> Upstream:
        health = UpstreamHealth(
            f"{network.id}#{kind}{index + 1}",
            index=index,
            weight=given.weight,
            tier=given.tier,
            archive=given.archive,
            allow=given.allow,
            deny=given.deny,
            requests_per_second=given.requests_per_second,
            mark=self._mark(network, given, kind),
        )
        if given.url.startswith("ws"):
            return WebSocketUpstream(health, given.url, dict(given.headers), batch=given.batch)
        address = UpstreamAddress.of(given.url, given.headers)
        depth = given.depth or self._settings.rpc.depth
        return HttpUpstream(
            health, address, self._write_buffer, limit=given.connections, depth=depth, batch=given.batch
        )

    def _mark(self, network: Network, given: UpstreamSettings, kind: str) -> str:
        """A digest: it is shown, and an address holds credentials."""
        text = f"{network.id}\0{kind}\0{given.url}".encode()
        return hmac.digest(self._settings.keys.pepper.encode(), text, "sha256")[:8].hex()


def _as_upstream(given: BundlerSettings) -> UpstreamSettings:
    """A bundler is asked one call at a time on a connection: most of its calls are slow, and none may wait behind another."""
    return UpstreamSettings(
        network=given.network,
        url=given.url,
        weight=given.weight,
        tier=given.tier,
        headers=given.headers,
        requests_per_second=given.requests_per_second,
        batch=1,
        connections=given.connections,
        depth=1,
    )
