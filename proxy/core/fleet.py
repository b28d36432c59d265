"""The upstream health that all workers report, combined.

Each worker learns the health of its upstreams from its own calls (core/upstream_health). For the operator these views are
merged: counts are added, averages are weighted by calls, and the state is the worst that any worker reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from proxy.core.upstream_health import UpstreamHealth
from proxy.core.usage import BUCKETS, quantile_ms

# The condition of each state, the worst state first. An upstream is in the first state that applies.
_STATES: dict[str, Callable[[UpstreamHealth, float], bool]] = {
    "cordoned": lambda health, now: health.cordoned,
    "wrong_chain": lambda health, now: health.standing == "wrong_chain",
    "wrong_version": lambda health, now: health.standing == "wrong_version",
    "forked": lambda health, now: health.standing == "forked",
    "distrusted": lambda health, now: now < health.distrusted_until,
    "open": lambda health, now: bool(health.pause_s),
    "silent": lambda health, now: health.silent,
    "unchecked": lambda health, now: health.standing == "unchecked",
    "resting": lambda health, now: now < health.rests_until,
    "ahead": lambda health, now: health.ahead,
    "lagging": lambda health, now: health.lagging,
    "on_trial": lambda health, now: health.share == 0.0,
    "up": lambda health, now: True,
}
STATES = tuple(_STATES)
# States in which an upstream still takes calls if there is no better one.
_LIMPING = frozenset({"silent", "resting", "ahead", "lagging"})
# The explanation of each state, for the log.
REASONS = {
    "cordoned": "an operator took it out of use",
    "wrong_chain": "it is on another chain than the settings name",
    "wrong_version": "it serves another version of the API than the first upstream of its network",
    "forked": "it is on another branch than most upstreams",
    "distrusted": "its replies were contradicted by others or by a proof",
    "open": "too many calls failed",
    "silent": "it does not report its head",
    "unchecked": "its chain is not known yet",
    "resting": "it limits our rate",
    "ahead": "its head is far above that of the others",
    "lagging": "its head is behind that of the others",
    "on_trial": "it is tried, and gets no calls until an operator promotes it",
    "up": "it replies and is at the head",
}


def state_of(health: UpstreamHealth, now: float) -> str:
    return next(state for state, holds in _STATES.items() if holds(health, now))


def _badness(state: str) -> int:
    """Sorts the worst state first. Another version may report states that this one does not know."""
    return STATES.index(state) if state in STATES else 0


def breaker_of(health: UpstreamHealth, now: float) -> str:
    if not health.pause_s:
        return "closed"
    return "open" if now < health.paused_until else "half_open"


def seen(health: UpstreamHealth, now: float) -> dict[str, Any]:
    """One worker's view of one upstream, as data."""
    return {
        "id": health.upstream_id,
        "label": health.label,
        "operator": health.operator,
        "host": health.host,
        "tier": health.tier,
        "labels": health.labels,
        "client": health.client,
        "bounds": health.bounds.text,
        "state": state_of(health, now),
        "breaker": breaker_of(health, now),
        "cordoned": health.cordoned,
        "head": health.head,
        "failing": round(health.failing_share, 4),
        "latency_s": round(health.latency_s, 6),
        "in_flight": health.inflight,
        "answered": health.good,
        "failed": health.bad,
        "contradicted": health.contradicted_replies,
        "contradiction": health.last_contradiction,
        "exclusions": health.exclusions,
        "took": health.latencies.recent(now),
    }


@dataclass(slots=True)
class UpstreamView:
    """One upstream, as all workers see it."""

    id: str
    label: str
    kind: str
    operator: str = ""
    host: str = ""
    tier: int = 0
    labels: tuple[str, ...] = ()
    client: str = ""
    bounds: str = ""
    state: str = "up"
    breaker: str = "closed"
    cordoned: bool = False
    workers: int = 0
    head: int = 0
    in_flight: int = 0
    answered: int = 0
    failed: int = 0
    contradicted: int = 0
    contradiction: str = ""
    exclusions: tuple[str, ...] = ()
    took: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    _failing: float = 0.0
    _latency_s: float = 0.0
    _weight: float = 0.0

    def add(self, view: dict[str, Any]) -> None:
        self.workers += 1
        self.operator = view["operator"] or self.operator
        # Workers of the previous version do not report these.
        self.host = view.get("host") or self.host
        self.tier = view.get("tier", self.tier)
        self.labels = tuple(view.get("labels", self.labels))
        self.client = view.get("client") or self.client
        self.bounds = view.get("bounds") or self.bounds
        self.state = min(self.state, view["state"], key=_badness)
        self.breaker = max(self.breaker, view["breaker"], key=("closed", "half_open", "open").index)
        self.cordoned = self.cordoned or view["cordoned"]
        self.head = max(self.head, view["head"])
        self.in_flight += view["in_flight"]
        self.answered += view["answered"]
        self.failed += view["failed"]
        self.contradicted += view["contradicted"]
        self.contradiction = view["contradiction"] or self.contradiction
        self.exclusions = tuple(view.get("exclusions", ())) or self.exclusions
        self.took = [have + more for have, more in zip(self.took, view["took"], strict=True)]
        # A worker without calls gets a tiny weight, so its figures matter only if no worker has calls.
        weight = sum(view["took"]) + 0.01
        self._failing += weight * view["failing"]
        self._latency_s += weight * view["latency_s"]
        self._weight += weight

    def shown(self, tip: int) -> dict[str, Any]:
        return {
            "id": self.id,
            "label": self.label,
            "kind": self.kind,
            "operator": self.operator or None,
            "host": self.host or None,
            "tier": self.tier,
            "labels": self.labels,
            "client": self.client or None,
            "bounds": self.bounds or None,
            "state": self.state,
            "breaker": self.breaker,
            "cordoned": self.cordoned,
            "workers": self.workers,
            "head": self.head or None,
            "lag_blocks": max(0, tip - self.head) if self.head and tip else None,
            "error_rate": round(self._failing / self._weight, 4),
            "latency_ms": round(self._latency_s / self._weight * 1000, 3),
            "p50_ms": quantile_ms(self.took, 0.5),
            "p99_ms": quantile_ms(self.took, 0.99),
            "in_flight": self.in_flight,
            "answered": self.answered,
            "failed": self.failed,
            "contradicted": self.contradicted,
            "contradiction": self.contradiction or None,
            "exclusions": self.exclusions,
        }


def networks_of(views: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The merged views of all workers, by network: upstreams of the chain first, then others, by label."""
    sights: dict[str, dict[tuple[str, str], UpstreamView]] = {}
    tips: dict[str, int] = {}
    for view in views:
        for network in view["networks"]:
            name = network["network"]
            tips[name] = max(tips.get(name, 0), network["tip"])
            upstream_views = sights.setdefault(name, {})
            for upstream in network["upstreams"]:
                place = (network["kind"], upstream["label"])
                if place not in upstream_views:
                    upstream_views[place] = UpstreamView(upstream["id"], upstream["label"], network["kind"])
                upstream_views[place].add(upstream)
    return [
        {
            "network": name,
            "tip": tips[name] or None,
            "upstreams": [sight.shown(tips[name]) for _, sight in sorted(sights[name].items(), key=_chain_first)],
        }
        for name in sorted(sights)
    ]


def status_of(healths: Iterable[UpstreamHealth], now: float) -> Literal["up", "degraded", "down"]:
    """How the states of a network's upstreams affect its users. A withheld upstream takes no calls, whatever its state."""
    states = {state_of(health, now) for health in healths if not health.withheld}
    if "up" in states:
        return "up"
    return "degraded" if states & _LIMPING else "down"


def last_upstream_of(networks: Iterable[dict[str, Any]], mark: str) -> str | None:
    """The network of which this is the last upstream, or the last bundler, that is not cordoned. Workers report a cordon some
    moments after it is stored as `cordon`, so either counts."""
    for network in networks:
        takers = [each for each in network["upstreams"] if each.get("state") != "on_trial"]
        left = [each for each in takers if not each["cordoned"] and not each.get("cordon")]
        upstream = next((each for each in left if each["id"] == mark), None)
        if upstream is not None and sum(each["kind"] == upstream["kind"] for each in left) == 1:
            return str(network["network"])
    return None


def _chain_first(place: tuple[tuple[str, str], UpstreamView]) -> tuple[bool, str]:
    return place[1].kind != "upstream", place[1].label
