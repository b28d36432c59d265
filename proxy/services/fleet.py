"""The fleet as operators see it: every worker publishes its view of the upstreams, and applies cordons.

A *cordon* takes an upstream out of use without a change of the settings. It is a row in Postgres. A notice reaches every
process that calls upstreams, and a poll every few seconds makes up for a missed one. While Postgres is unavailable the last
known cordons stay in force, also in a worker that starts meanwhile: it reads its predecessor's copy.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from proxy import telemetry
from proxy.core.canary import STEPS
from proxy.core.fleet import REASONS, last_upstream_of, networks_of, seen, state_of
from proxy.core.routing_rules import exclusions
from proxy.core.trials import Trial, is_safe, trials_of
from proxy.core.upstream_health import UpstreamHealth
from proxy.errors import InvalidRequest, NotFound, Unavailable
from proxy.services.rpc.networks import Networks, Route
from proxy.store.postgres.fleet import CHANNEL, FleetStore
from proxy.store.postgres.index_databases import INDEX
from proxy.store.postgres.local_copy import LocalCopy
from proxy.store.postgres.notices import Notices
from proxy.tasks import repeat, until_set

log = logging.getLogger("penstock.fleet")

# How often cordons are polled, in addition to the notices.
POLL_S = 5.0
# How many reports a worker writes before it deletes those of workers that are gone, which readers leave out anyway.
REPORTS_PER_PURGE = 10


class Cordons:
    """Applies the operators' cordons, and the shares of upstreams that are being promoted, to the upstreams of this process."""

    def __init__(self, store: FleetStore, networks: Iterable[Networks], *, copy: LocalCopy | None = None) -> None:
        self._store = store
        self._copy = copy
        self._copied: frozenset[str] | None = None
        self._networks = tuple(networks)
        self._wake = asyncio.Event()
        # The upstreams that can be promoted, by id.
        self.canaries = {
            shadow.upstream.health.upstream_id: shadow
            for each in self._networks
            for shadow in each.shadows
            if shadow.upstream.health.share < 1.0
        }

    def __repr__(self) -> str:
        return f"<Cordons {[health.label for health in self._healths() if health.cordoned]}>"

    @property
    def canary_ids(self) -> dict[str, str]:
        """The ids of the upstreams that can be promoted, by label."""
        return {shadow.upstream.label: upstream_id for upstream_id, shadow in self.canaries.items()}

    def _healths(self) -> list[UpstreamHealth]:
        routes = [route for networks in self._networks for route in networks.routes.values()]
        return [upstream.health for route in routes for upstream in route.every_upstream]

    def find(self, upstream_id: str) -> UpstreamHealth:
        health = next((each for each in self._healths() if each.upstream_id == upstream_id), None)
        if health is None:
            raise NotFound(f"there is no upstream {upstream_id}")
        return health

    async def refresh(self) -> None:
        """Read the cordons and apply them."""
        wanted = frozenset(await self._store.cordons(within_s=5.0))
        self._apply(wanted)
        self._apply_methods(
            [(row["upstream"], row["method"]) for row in await self._store.method_cordons(within_s=5.0)]
        )
        if self.canaries:
            shares = await self._store.shares(within_s=5.0)
            for upstream_id, shadow in self.canaries.items():
                share = shares[upstream_id]["share"] if upstream_id in shares else 0.0
                if share != shadow.upstream.health.share:
                    shadow.promoted(share)
        if self._copy is not None and wanted != self._copied:
            await self._copy.replace(dict.fromkeys(wanted, True))
            self._copied = wanted

    async def load_copy(self) -> None:
        """Apply the cordons that the worker's predecessor knew."""
        if self._copy is not None:
            self._apply(frozenset(await self._copy.read()))

    def _apply(self, wanted: frozenset[str]) -> None:
        now = time.monotonic()
        for health in self._healths():
            if health.cordoned != (health.upstream_id in wanted):
                health.cordon(cordoned=not health.cordoned, now=now)
                log.warning(
                    "upstream cordoned" if health.cordoned else "upstream uncordoned", extra={"upstream": health.label}
                )

    def _apply_methods(self, wanted: Sequence[tuple[str, str]]) -> None:
        for health in self._healths():
            methods = frozenset(method for upstream_id, method in wanted if upstream_id == health.upstream_id)
            if methods != health.cordoned_methods:
                health.cordon_methods(methods, time.monotonic())
                log.warning("methods cordoned", extra={"upstream": health.label, "methods": sorted(methods)})

    def listen(self, notices: Notices) -> None:
        notices.listen(CHANNEL, self._note)

    async def follow(self) -> None:
        """Refresh on every notice and every POLL_S: a supervised loop."""
        while True:
            with suppress(Unavailable):
                await self.refresh()
            await until_set(self._wake, within_s=POLL_S)
            self._wake.clear()

    def _note(self, _: str | None) -> None:
        self._wake.set()


class UpstreamWatch:
    """Measures the upstreams of this process, and logs each change of their state."""

    def __init__(self, networks: Iterable[Networks]) -> None:
        self._networks = tuple(networks)
        self._states: dict[str, str] = {}
        # The rules whose limits each upstream exceeds, by number.
        self._exceeded: dict[str, dict[int, str]] = {}

    def __repr__(self) -> str:
        return f"<UpstreamWatch {self._states}>"

    def observe(self) -> None:
        now = time.monotonic()
        for networks in self._networks:
            for route in networks.routes.values():
                for upstream in route.every_upstream:
                    self._measure(upstream.health, route.heads.tip, now)
                    self._compare(upstream.health, now)
                    if route.rules:
                        self._judge(upstream.health, route)

    def _judge(self, health: UpstreamHealth, route: Route) -> None:
        """Report the rules whose limits it has begun to exceed."""
        exceeded, before = exclusions(route.rules, health, route.heads.tip), self._exceeded.get(health.label, {})
        self._exceeded[health.label] = exceeded
        health.judged(tuple(exceeded.values()))
        for number in exceeded.keys() - before.keys():
            telemetry.upstream_exclusions_total.labels(health.label, str(number)).inc()
            log.warning("upstream exceeds a rule", extra={"upstream": health.label, "reason": exceeded[number]})

    def _measure(self, health: UpstreamHealth, tip: int, now: float) -> None:
        telemetry.upstream_up.labels(health.label).set(state_of(health, now) in ("up", "on_trial"))
        telemetry.upstream_breaker_open.labels(health.label).set(bool(health.pause_s))
        telemetry.upstream_blocks_behind.labels(health.label).set(max(0, tip - health.head) if health.head else 0)
        telemetry.upstream_latency_seconds.labels(health.label).set(health.latency_s)
        telemetry.upstream_calls_in_flight.labels(health.label).set(health.inflight)

    def _compare(self, health: UpstreamHealth, now: float) -> None:
        state, before = state_of(health, now), self._states.get(health.label, "unchecked")
        self._states[health.label] = state
        if state == before:
            return
        report = log.info if state == "up" else log.warning
        report(
            "upstream state changed",
            extra={
                "upstream": health.label,
                "state": state,
                "before": before,
                "reason": REASONS[state],
                "failures_in_a_row": health.failures_in_a_row,
                "head": health.head,
            },
        )


class FleetView:
    """Publishes this process's view of the upstreams, and reads the views of all processes."""

    def __init__(
        self,
        store: FleetStore,
        *,
        networks: Mapping[str, Networks],
        cordons: Cordons,
        figures: Callable[[], dict[str, Any]],
        report_s: float,
    ) -> None:
        self._store = store
        self._networks = networks
        self._figures = figures
        self._report_s = report_s
        self._worker = secrets.token_hex(8)
        self._reports = 0
        self.cordons = cordons

    def __repr__(self) -> str:
        return f"<FleetView {self._worker}>"

    def view(self) -> dict[str, Any]:
        now = time.monotonic()
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            **self._figures(),
            "networks": [
                {
                    "network": name,
                    "kind": kind,
                    "tip": route.heads.tip,
                    "upstreams": [seen(upstream.health, now) for upstream in route.every_upstream],
                    "trials": [shadow.report() for shadow in route.shadows],
                }
                for kind, networks in self._networks.items()
                for name, route in networks.routes.items()
            ],
        }

    async def run(self) -> None:
        """A supervised loop."""
        await repeat(self._report, every_s=self._report_s)

    async def _report(self) -> None:
        await self._store.write_view(self._worker, self.view())
        if self._reports % REPORTS_PER_PURGE == 0:
            await self._store.purge_views()
        self._reports += 1

    async def close(self) -> None:
        try:
            await self._store.delete_view(self._worker)
        except Unavailable:
            pass

    # For operators

    async def read(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The views of all workers, and the networks merged from them, with their cordons."""
        views = await self._store.views()
        cordons = await self._store.cordons()
        networks = networks_of(views)
        for network in networks:
            for upstream in network["upstreams"]:
                cordon = cordons.get(upstream["id"])
                upstream["cordon"] = cordon and {
                    "reason": cordon["reason"],
                    "by": cordon["by_whom"],
                    "at": cordon["created_at"],
                }
        return views, networks

    async def trials(self) -> list[Trial]:
        """The upstreams on trial, with what all workers have found."""
        return trials_of(await self._store.views())

    async def cordon(self, upstream_id: str, *, reason: str, by: str, last: bool = False) -> UpstreamHealth:
        """Cordon an upstream. `last`: also if it is the network's last one, without which no call can be served."""
        health = self.cordons.find(upstream_id)
        if not last and (network := last_upstream_of((await self.read())[1], upstream_id)):
            raise InvalidRequest(
                f"last: {health.label} is the last upstream of {network} that is not cordoned, so its calls would fail: "
                "send last true to cordon it nevertheless",
                param="last",
            )
        await self._store.cordon(upstream_id, label=health.label, reason=reason, by=by)
        await self.cordons.refresh()
        return health

    async def uncordon(self, upstream_id: str) -> UpstreamHealth:
        health = self.cordons.find(upstream_id)
        await self._store.uncordon(upstream_id)
        await self.cordons.refresh()
        return health

    async def promote(self, upstream_id: str, *, by: str, anyway: bool = False) -> tuple[UpstreamHealth, float]:
        """Let an upstream on trial take the first step. `anyway`: even if its trial does not say that it is safe. Returns its
        share before."""
        health = self._canary(upstream_id)
        verdict = next((each.verdict for each in await self.trials() if each.label == health.label), "no reads yet")
        if not anyway and not is_safe(verdict):
            raise InvalidRequest(
                f"anyway: the trial of {health.label} says {verdict!r}: send anyway true to promote it nevertheless",
                param="anyway",
            )
        return await self._set_share(health, STEPS[0], f"promoted by {by}")

    async def withdraw(self, upstream_id: str, *, by: str) -> tuple[UpstreamHealth, float]:
        """Send no more calls to an upstream that is being promoted. Its trial goes on."""
        return await self._set_share(self._canary(upstream_id), 0.0, f"withdrawn by {by}")

    def _canary(self, upstream_id: str) -> UpstreamHealth:
        health = self.cordons.find(upstream_id)
        if upstream_id not in self.cordons.canaries:
            raise InvalidRequest(f"{health.label} cannot be promoted: set canary = true and shadow in its settings")
        return health

    async def _set_share(self, health: UpstreamHealth, share: float, reason: str) -> tuple[UpstreamHealth, float]:
        before = health.share
        await self._store.set_share(health.upstream_id, label=health.label, share=share, reason=reason)
        await self.cordons.refresh()
        return health, before

    async def followers(self) -> list[dict[str, Any]]:
        """The followers of all networks, each with the tip that the workers see."""
        _, networks = await self.read()
        tips = {network["network"]: network["tip"] for network in networks}
        return [{**row, "tip": tips.get(row["network"].removesuffix(INDEX))} for row in await self._store.followed()]

    async def processes(self) -> list[dict[str, Any]]:
        """The processes of all hosts."""
        return await self._store.processes()

    async def deliveries(self) -> tuple[dict[str, Any], dict[str, int]]:
        return await self._store.deliveries()
