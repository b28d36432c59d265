"""Builds the networks of a process. Each has upstreams, bundlers or relays, and a dispatcher that sends calls to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import TypeVar

from proxy.chains.evm.bundler_methods import BUNDLER as BUNDLER_FAMILY
from proxy.chains.evm.signer import Signer, relay_header
from proxy.chains.families import family_of
from proxy.chains.family import Family
from proxy.chains.registry import Network
from proxy.compose.credit_budgets import budget_of, included_of, prices_of
from proxy.compose.upstream_ids import BUNDLER, RELAY, upstream_id_of
from proxy.core import verification
from proxy.core.budgets import CreditBudget
from proxy.core.caching import ReplyCache
from proxy.core.credits import CreditMeter
from proxy.core.data_bounds import DataBounds, of_archive
from proxy.core.fixed_replies import FixedReplies
from proxy.core.heads import NetworkHead
from proxy.core.limits import CallRate, ProcessRate
from proxy.core.pace import MethodLimit
from proxy.core.rest_routes import RestTransport
from proxy.core.routing import USUAL_COSTS, CostPolicy
from proxy.core.routing_rules import RoutingRule, RuleTerms
from proxy.core.upstream_health import UpstreamHealth
from proxy.services.bundler import bundler_policies
from proxy.services.rpc.dispatcher import Dispatcher, Takeovers
from proxy.services.rpc.method_policy import policies_of, unknown_of
from proxy.services.rpc.network_state import HEAD_NUMBERS, FleetHeads, NetworkState, SharedHead
from proxy.services.rpc.networks import CallGuard, Networks, Route
from proxy.services.rpc.recent_writes import RecentWrites
from proxy.services.rpc.shadow import Shadow
from proxy.services.rpc.shared_cache import SharedCache
from proxy.settings import (
    BundlerSettings,
    RelaySettings,
    Settings,
    Tables,
    UpstreamSettings,
    environment,
    signer_key,
)
from proxy.settings.sections import RoutingSettings
from proxy.store.shared_memory.bucket_table import SharedRate
from proxy.store.shared_memory.host_memory import HostMemory
from proxy.store.valkey.shared_replies import SharedReplies
from proxy.store.valkey.upstream_leases import LEAST_PER_SECOND, UpstreamLeases
from proxy.telemetry import Tally
from proxy.turn_queue import TurnQueue
from proxy.wire.address import UpstreamAddress, headers_of
from proxy.wire.http_upstream import HttpUpstream, PoolTerms
from proxy.wire.ok_upstream import OkUpstream
from proxy.wire.redaction import private_words
from proxy.wire.rest_upstream import RestUpstream
from proxy.wire.signing_upstream import SigningUpstream
from proxy.wire.upstream import ReplyMemory, Upstream
from proxy.wire.websocket_client import WebSocketLink
from proxy.wire.websocket_upstream import WebSocketUpstream
from proxy.wire.write_buffer import WriteBuffer

N = TypeVar("N", UpstreamSettings, RelaySettings)
# Upstreams of one network with their positions in the settings.
Numbered = Sequence[tuple[int, UpstreamSettings]]


class NetworkBuilder:
    """`memory` is shared by the processes of a host, and so are the heads in `heads_memory`. A process that serves no clients
    needs none: its heads are its own."""

    def __init__(
        self,
        settings: Settings,
        tables: Tables,
        write_buffer: WriteBuffer,
        turns: TurnQueue,
        *,
        tally: Callable[[str, str], Tally],
        heads_memory: HostMemory | None = None,
        memory: HostMemory | None = None,
        held: ReplyMemory | None = None,
        hosts: Callable[[], int] = lambda: 1,
        leases: UpstreamLeases | None = None,
        exchange: FleetHeads | None = None,
    ) -> None:
        """`held`: memory for large replies. `hosts`: how many hosts share the upstreams. `leases`: the upstreams' limits over
        all hosts. `exchange`: shares heads with other hosts."""
        self._settings = settings
        self._tables = tables
        self._write_buffer = write_buffer
        self._turns = turns
        self._tally = tally
        self._heads_memory = heads_memory
        self._memory = memory
        self._held = held
        self._hosts = hosts
        self._leases = leases
        self._exchange = exchange
        # The budgets of upstreams, by name.
        self._budgets: dict[str, CreditBudget] = {}
        # The upstreams on trial, by network.
        self._shadows: dict[str, list[Shadow]] = {}

    def states(self, shared: SharedReplies | None = None) -> dict[str, NetworkState]:
        """The networks that have upstreams, by id. `shared`: the cache that workers and hosts share."""
        by_network = self._by_network(self._settings.upstreams)
        share = self._settings.cache.bytes // max(1, len(by_network))
        # Workers with different upstreams agree on a network's position.
        known, positions = self._known(), self._tables.chains.positions()
        places = max(positions.values(), default=-1) + 1
        memory = self._heads_memory
        heads = [0] * HEAD_NUMBERS * places if memory is None else memory.heads(HEAD_NUMBERS * places)
        holders = [0] * places if memory is None else memory.holders(places)
        states = {}
        for name, upstreams in by_network.items():
            network = known[name]
            calls, streams = _by_use(network, upstreams)
            taken = [each for each in calls if not each[1].shadow or each[1].canary]
            takers = self._upstreams(network, taken)
            states[name] = state = NetworkState(
                network,
                takers,
                self._heads(network),
                family_of(network).head,
                ReplyCache(share),
                SharedHead(heads, holders, positions[name]),
                caches=self._settings.cache.enabled,
                archive_minimum=self._tables.prices.archive_minimum,
                streams=self._upstreams(network, streams),
                shared_cache=None if shared is None else SharedCache(name, shared),
                exchange=self._exchange,
                writes=self._writes(network, takers),
                methods=tuple(self._tables.methods[network.family]),
                costs=_cost_policy(self._settings, name),
            )
            tried = [each for each in calls if each not in taken]
            built = [*zip(takers, taken, strict=True), *zip(self._upstreams(network, tried), tried, strict=True)]
            self._shadows[name] = [
                Shadow(upstream, given.shadow, state, frozenset(given.trial_without))
                for upstream, (_, given) in built
                if given.shadow
            ]
            state.observe_reads(self._shadows[name])
        return states

    def _known(self) -> dict[str, Network]:
        return {network.id: network for network in self._tables.chains.networks()}

    def _writes(self, network: Network, upstreams: Sequence[Upstream]) -> RecentWrites | None:
        """Which of several upstreams, or whether only relays, have received a write matters only to clients."""
        has_relays = any(each.network == network.id for each in self._settings.relays)
        if self._heads_memory is None or (len(upstreams) < 2 and not has_relays):
            return None
        return RecentWrites(network.id, upstreams if len(upstreams) > 1 else (), self._heads_memory.writes)

    def networks(
        self, states: Mapping[str, NetworkState], takeovers: Mapping[str, Takeovers] | None = None
    ) -> Networks:
        """Routes to these networks. `takeovers`: by network id."""
        by_network = takeovers or {}
        return Networks([self._route(state, by_network.get(name, Takeovers())) for name, state in states.items()])

    def _route(self, state: NetworkState, takeovers: Takeovers) -> Route:
        settings, network = self._settings, state.network
        policies = policies_of(network, self._tables.methods[network.family], self._tally)
        rules = rules_of(settings.routing, network.id)
        fixed: dict[str, list[tuple[str, str, str]]] = {}
        for reply in settings.replies:
            if reply.network == network.id:
                fixed.setdefault(reply.method, []).append((reply.params, reply.result, reply.error))
        for name, replies in fixed.items():
            policies[name].fixed = FixedReplies(replies)
        for rule in settings.verify:
            if rule.network == network.id:
                for name in rule.methods:
                    policies[name].verify = verification.parse(rule.by)
        for policy in policies.values():
            policy.rules = tuple(rule for rule in rules if rule.covers(policy.method.name))
            if policy.method.highest:
                policy.most_asked = min(settings.rpc.highest_nonces, len(state.upstreams))
        return Route(
            policies,
            Dispatcher(state, call_timeout_s=settings.rpc.call_timeout_s, takeovers=takeovers),
            unknown=unknown_of(network, self._tally),
            broadcast=len(state.upstreams) if family_of(network).sends_to_all else settings.rpc.broadcast,
            coalesces=settings.cache.coalesce,
            shadows=self._shadows.get(network.id, ()),
            rules=rules,
        )

    def bundlers(self, chains: Networks, takeovers: Takeovers, guard: Callable[[Dispatcher], CallGuard]) -> Networks:
        """The bundlers by network, as routes without a cache. `chains`: the networks that they serve."""
        known = self._known()
        by_network = self._by_network([_as_upstream(each) for each in self._settings.bundlers])
        bundler_routes = []
        for name, bundlers in by_network.items():
            chain = chains.find(known[name])
            takers = self._upstreams(known[name], list(enumerate(bundlers)), BUNDLER)
            state = self._headless_state(known[name], takers, None if chain is None else chain.state)
            timeout_s = self._settings.bundler.call_timeout_s
            dispatcher = Dispatcher(state, call_timeout_s=timeout_s, takeovers=takeovers)
            bundler_routes.append(self._bundler_route(dispatcher, guard(dispatcher)))
        return Networks(bundler_routes)

    def relays(self) -> Networks:
        """The private relays by network, as routes without a cache."""
        known, by_network = self._known(), self._by_network(self._settings.relays)
        relay_routes = []
        for name, relays in by_network.items():
            network = known[name]
            takers: list[Upstream] = [self._relay(network, index, each) for index, each in enumerate(relays)]
            state = self._headless_state(network, takers, None)
            relay_routes.append(
                Route(
                    policies_of(network, self._tables.methods[network.family], self._tally),
                    Dispatcher(state, call_timeout_s=self._settings.rpc.call_timeout_s, takeovers=Takeovers()),
                    unknown=unknown_of(network, self._tally),
                    broadcast=1,
                    coalesces=False,
                )
            )
        return Networks(relay_routes)

    def flashbots_labels(self) -> frozenset[str]:
        """The labels of the relays that take transactions as Flashbots' does."""
        by_network = self._by_network(self._settings.relays)
        return frozenset(
            _relay_label(name, index, each)
            for name, relays in by_network.items()
            for index, each in enumerate(relays)
            if each.style == "flashbots"
        )

    def _relay(self, network: Network, index: int, given: RelaySettings) -> Upstream:
        link = _as_upstream(given)
        health = self._health(network, _relay_label(network.id, index, given), index, link, RELAY)
        if given.signs:
            sign = partial(relay_header, Signer(signer_key(given, environment())))
            upstream: Upstream = SigningUpstream(health, self._pool_terms(link), sign)
        else:
            upstream = self._built(health, link, 1, None)
        upstream.memory = self._held
        upstream.private_words = private_words(link.url, headers_of(link), link.proxy)
        return upstream

    def _headless_state(self, network: Network, upstreams: list[Upstream], chain: NetworkState | None) -> NetworkState:
        """The state of bundlers or relays. Nothing is cached, so this process shares no head with the other workers."""
        return NetworkState(
            network,
            upstreams,
            self._heads(network),
            family_of(network).head,
            ReplyCache(0),
            SharedHead([0] * HEAD_NUMBERS, [0], 0),
            caches=False,
            archive_minimum=self._tables.prices.archive_minimum,
            chain=chain,
        )

    def _bundler_route(self, dispatcher: Dispatcher, guard: CallGuard) -> Route:
        network = dispatcher.state.network
        return Route(
            bundler_policies.policies_of(network, self._tables.methods[BUNDLER_FAMILY.name], self._tally),
            dispatcher,
            unknown=bundler_policies.unknown_of(network, self._tally),
            broadcast=1,
            coalesces=False,
            guard=guard,
            any_scope=bundler_policies.ANY_SCOPE,
            max_body=self._settings.bundler.max_body_bytes,
        )

    def _heads(self, network: Network) -> NetworkHead:
        facts = network.facts
        return NetworkHead(
            block_time_s=facts.block_time_s,
            finality_blocks=facts.finality_blocks,
            behind_blocks=family_of(network).lag_blocks or max(2, round(self._settings.rpc.lag_s / facts.block_time_s)),
        )

    def _by_network(self, given: Sequence[N]) -> dict[str, list[N]]:
        by_network: defaultdict[str, list[N]] = defaultdict(list)
        for upstream in given:
            network = self._tables.chains.find(*upstream.network.split("/"))
            assert network is not None  # The settings were validated.
            by_network[network.id].append(upstream)
        return by_network

    def _upstreams(self, network: Network, numbered: Numbered, kind: str = "") -> list[Upstream]:
        """They are labelled by their name or their position in the settings, and indexed by their position in the group."""
        return [
            self._upstream(network, f"{network.id}#{kind}{given.name or position + 1}", index, given, kind)
            for index, (position, given) in enumerate(numbered)
        ]

    def _upstream(self, network: Network, label: str, index: int, given: UpstreamSettings, kind: str) -> Upstream:
        batch = given.batch if family_of(network).batches else 1
        family = None if kind else family_of(network)
        upstream = self._built(self._health(network, label, index, given, kind), given, batch, family)
        upstream.memory = self._held
        upstream.private_words = private_words(given.url, headers_of(given), given.proxy)
        return upstream

    def _health(self, network: Network, label: str, index: int, given: UpstreamSettings, kind: str) -> UpstreamHealth:
        upstream_id = upstream_id_of(self._settings.keys.pepper, network.id, given.place, kind)
        return UpstreamHealth(
            label,
            index=index,
            weight=given.weight,
            tier=given.tier,
            bounds=_bounds(network, given),
            allow=given.allow,
            deny=given.deny,
            rate=self._rate(upstream_id, given.requests_per_second) if given.requests_per_second else None,
            method_limits={
                name: MethodLimit(self._rate(f"{upstream_id}:{name}", per_second), per_second)
                for name, per_second in given.method_rates.items()
            },
            upstream_id=upstream_id,
            operator=given.operated_by,
            operator_name=given.operator,
            host=given.host,
            labels=given.labels,
            meter=self._meter(network, label, given, upstream_id),
            share=0.0 if given.canary else 1.0,
        )

    def _meter(self, network: Network, label: str, given: UpstreamSettings, upstream_id: str) -> CreditMeter | None:
        """Counts what the calls cost; None if they cost nothing."""
        if not given.is_metered:
            return None
        prices, price = prices_of(given, network, self._tables)
        budget, included = (
            None if limit is None else self._budgets.setdefault(limit.name, limit)
            for limit in (budget_of(given, upstream_id), included_of(given, upstream_id))
        )
        for each in (budget, included):
            if each is not None:
                each.expect(prices.credits(""))
        return CreditMeter(
            label, network.id, prices, price, budget=budget, included=included, billing_day=given.billing_day
        )

    def _rate(self, upstream_id: str, per_second: float) -> CallRate:
        if self._memory is None:
            return ProcessRate(per_second)
        if self._leases is not None and per_second >= LEAST_PER_SECOND:
            return self._leases.rate(upstream_id, per_second)
        return SharedRate(self._memory.upstreams, upstream_id, per_second, self._hosts)

    def _built(self, health: UpstreamHealth, given: UpstreamSettings, batch: int, family: Family | None) -> Upstream:
        """`family`: that of the chain, if the upstream is one of its nodes."""
        if given.url.startswith("ws"):
            return WebSocketUpstream(health, given, limit=given.connections, batch=batch)
        if family is not None and (family.rest is not None or family.dialect.says_ok):
            kind, transport = (OkUpstream, RestTransport()) if family.rest is None else (RestUpstream, family.rest)
            return kind(health, self._pool_terms(given), transport, WebSocketLink(given))
        depth = given.depth or self._settings.rpc.depth
        return HttpUpstream(health, self._pool_terms(given, depth, batch))

    def _pool_terms(self, given: UpstreamSettings, depth: int = 1, batch: int = 1) -> PoolTerms:
        return PoolTerms(UpstreamAddress.of(given), self._write_buffer, self._turns, given.connections, depth, batch)


def _bounds(network: Network, given: UpstreamSettings) -> DataBounds:
    """The bounds that the settings declare. All others are found."""
    known = family_of(network).kept_blocks
    meant = {} if given.archive is None else of_archive(archive=given.archive, usual_kept=known)
    return DataBounds({**meant, **given.bounds})


def _relay_label(network_id: str, index: int, given: RelaySettings) -> str:
    return f"{network_id}#{RELAY}{given.name or index + 1}"


def _by_use(network: Network, upstreams: list[UpstreamSettings]) -> tuple[Numbered, Numbered]:
    """The upstreams that take calls, and those that carry subscriptions only."""
    takes_all = family_of(network).socket_calls
    numbered = list(enumerate(upstreams))
    calls = [(n, each) for n, each in numbered if takes_all or not each.url.startswith("ws")]
    return calls, [each for each in numbered if each not in calls]


def _as_upstream(given: BundlerSettings | RelaySettings) -> UpstreamSettings:
    """A bundler or relay handles one call at a time per connection: its calls are slow, and one must not wait for another."""
    taken = {each.name for each in fields(UpstreamSettings)}
    common = {each.name: getattr(given, each.name) for each in fields(given) if each.name in taken}
    return UpstreamSettings(**common, batch=1, depth=1)


def _cost_policy(settings: Settings, network_id: str) -> CostPolicy:
    policies = [each for each in settings.cost_routing if each.network == network_id]
    return CostPolicy(policies[0].equally_fast, policies[0].ms_per_cent) if policies else USUAL_COSTS


def rules_of(given: Sequence[RoutingSettings], network_id: str) -> list[RoutingRule]:
    """The rules for a network, with their places in the settings."""
    return [
        RoutingRule(number=number, **{term.name: getattr(rule, term.name) for term in fields(RuleTerms)})
        for number, rule in enumerate(given, 1)
        if rule.network == network_id
    ]
