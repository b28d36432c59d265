"""The networks of a process: each with its methods, its upstreams and the dispatcher that sends calls to them.

A `Route` is built once, with a `MethodPolicy` for each method, so that a call finds its price, its scope and its upstream with
one lookup each.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Protocol

from proxy.chains.families import family_of
from proxy.chains.registry import Network
from proxy.core.access import Key
from proxy.core.credits import CreditMeter
from proxy.core.directives import Directives
from proxy.core.routing_rules import RoutingRule
from proxy.core.upstream_health import UpstreamHealth
from proxy.services.rpc.dispatcher import Dispatcher
from proxy.services.rpc.flights import Caller, Flight
from proxy.services.rpc.method_policy import ANY_SCOPE, MethodPolicy
from proxy.services.rpc.shadow import Shadow
from proxy.services.rpc.shared_lookup import SharedLookup

_NONE: Mapping[str, MethodPolicy] = {}
_NO_LIMIT = 1 << 62


class CallGuard(Protocol):
    """Checks and rewrites calls of a route that must not be passed on as they are."""

    def fault_of(self, policy: MethodPolicy, params: bytes) -> bytes | None:
        """An error if the params are not valid for the method."""

    def contracts_of(self, policy: MethodPolicy, params: bytes) -> Sequence[str] | None:
        """The contracts that the call reaches, whose params are valid; None if it may reach any."""

    def flight(
        self, caller: Caller, key: Key, policy: MethodPolicy, params: bytes, now: float, directives: Directives | None
    ) -> Flight | None:
        """A flight to launch; None if the guard replies to the caller itself."""


class Route:
    """One network, as calls use it."""

    __slots__ = (
        "_short",
        "any_scope",
        "broadcast",
        "candidates",
        "coalesces",
        "dialect",
        "dispatcher",
        "every_upstream",
        "guard",
        "heads",
        "is_live",
        "max_body",
        "network",
        "only",
        "policies",
        "rules",
        "shadows",
        "shared_lookup",
        "state",
        "streams",
        "unknown",
        "upstreams",
    )

    def __init__(
        self,
        policies: dict[str, MethodPolicy],
        dispatcher: Dispatcher,
        *,
        unknown: MethodPolicy,
        broadcast: int,
        coalesces: bool,
        guard: CallGuard | None = None,
        any_scope: int = ANY_SCOPE,
        max_body: int = _NO_LIMIT,
        shadows: Sequence[Shadow] = (),
        rules: Sequence[RoutingRule] = (),
    ) -> None:
        # The operator's rules for all its methods.
        self.rules = tuple(rules)
        self.policies = policies
        # The policy of every method that does not exist.
        self.unknown = unknown
        self.dispatcher = dispatcher
        self.state = state = dispatcher.state
        self.network = state.network
        # The JSON-RPC that clients of the network speak.
        self.dialect = family_of(state.network).dialect
        self.upstreams = state.upstreams
        self.streams = state.streams
        self.every_upstream = state.every_upstream
        # Upstreams on trial, which get copies of reads and no calls.
        self.shadows = tuple(shadows)
        members = set(state.upstreams)
        self.candidates = tuple(shadow.upstream for shadow in shadows if shadow.upstream not in members)
        self.heads = state.heads
        self.only = state.only
        # How many upstreams a signed transaction is sent to.
        self.broadcast = min(broadcast, len(self.upstreams))
        # Whether equal calls share a flight.
        self.coalesces = coalesces
        cache = state.shared_cache
        self.shared_lookup = None if cache is None else SharedLookup(dispatcher, cache)
        self.guard = guard
        # A key needs one of these scopes to call this route at all.
        self.any_scope = any_scope
        self.max_body = max_body
        self.is_live = state.network.is_live
        self._short: dict[int, Mapping[str, MethodPolicy]] = {}
        for policy in policies.values():
            policy.adapt(
                shares=state.caches or coalesces,
                is_served=self._only_serves(policy),
                is_observed=bool(state.read_observers),
            )

    def __repr__(self) -> str:
        return f"<Route {self.state!r}>"

    @property
    def labels(self) -> frozenset[str]:
        """The names and labels by which a request may choose upstreams."""
        words = [upstream.health.words for upstream in self.upstreams]
        return frozenset([upstream.label for upstream in self.upstreams]).union(*words)

    def _only_serves(self, policy: MethodPolicy) -> bool:
        """Whether there is one upstream alone, and it serves the method."""
        return self.only is not None and self.only.health.may_serve(policy.method.name)

    def short_policies(self, key: Key) -> Mapping[str, MethodPolicy]:
        """The methods that this key may call on the short path (web/front/short_call)."""
        if (
            key.needs_full_checks
            or key.records_params
            or key.account.day_limit
            or key.expires_at < math.inf
            or (self.is_live and not key.live)
        ):
            return _NONE
        policies = self._short.get(key.scopes)
        if policies is None:
            policies = {
                name: policy for name, policy in self.policies.items() if policy.short and key.scopes & policy.scope
            }
            self._short[key.scopes] = policies
        return policies


class Networks:
    """All routes of a process, by network id."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = {route.network.id: route for route in routes}

    def __repr__(self) -> str:
        return f"<Networks {len(self.routes)}>"

    def find(self, network: Network) -> Route | None:
        return self.routes.get(network.id)

    def sweep(self) -> None:
        """Check deadlines and send hedges."""
        now = time.monotonic()
        for route in self.routes.values():
            if route.only is not None:
                # The short path earns no retry budget, so retries on an only upstream are paid from this.
                route.dispatcher.budget.earn()
            for upstream in (*route.every_upstream, *route.candidates):
                upstream.tick(now)

    def healths(self) -> list[UpstreamHealth]:
        return [upstream.health for route in self.routes.values() for upstream in route.every_upstream]

    @property
    def shadows(self) -> list[Shadow]:
        return [shadow for route in self.routes.values() for shadow in route.shadows]

    def metered(self) -> list[UpstreamHealth]:
        """Those of the upstreams whose calls cost something, with those on trial."""
        tried = [upstream.health for route in self.routes.values() for upstream in route.candidates]
        return [health for health in [*self.healths(), *tried] if health.meter is not None]

    def meters(self) -> list[CreditMeter]:
        return [health.meter for health in self.metered() if health.meter is not None]

    def counts(self) -> list[tuple[str, str, int, int, int]]:
        """For each upstream: its network, its label, and how many calls succeeded, failed, and were refused as too many."""
        return [
            (route.network.id, upstream.label, upstream.health.good, upstream.health.bad, upstream.shed)
            for route in self.routes.values()
            for upstream in route.every_upstream
        ]

    def close(self) -> Awaitable[object]:
        every = [each for route in self.routes.values() for each in (*route.every_upstream, *route.candidates)]
        return asyncio.gather(*[upstream.close() for upstream in every])
