"""What operators see of all workers, and what they tell them: each tells the others what it sees, and obeys the cordons.

A *cordon* takes an upstream out of use without touching the settings. It is a row in Postgres; a notice reaches every process
that asks upstreams, and a look every few seconds heals one that was missed. While Postgres is away the last known cordons hold.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from proxy.core.fleet import networks_of, seen
from proxy.core.routing import UpstreamHealth
from proxy.errors import NotFound, Unavailable
from proxy.services.rpc.networks import Networks
from proxy.store.fleet import CHANNEL, FleetStore
from proxy.store.notices import Notices
from proxy.tasks import until_set

log = logging.getLogger("penstock.fleet")

# How often cordons are looked at beside the notices.
LOOK_S = 5.0


class Cordons:
    """Keeps the upstreams of one process cordoned as the operators want it."""

    def __init__(self, store: FleetStore, notices: Notices, networks: Iterable[Networks]) -> None:
        self._store = store
        self._networks = tuple(networks)
        self._wake = asyncio.Event()
        notices.listen(CHANNEL, self._note)

    def __repr__(self) -> str:
        return f"<Cordons {[health.label for health in self._healths() if health.cordoned]}>"

    def _healths(self) -> list[UpstreamHealth]:
        routes = [route for networks in self._networks for route in networks.routes.values()]
        return [upstream.health for route in routes for upstream in route.upstreams]

    def find(self, mark: str) -> UpstreamHealth:
        found = next((health for health in self._healths() if health.mark == mark), None)
        if found is None:
            raise NotFound(f"there is no upstream {mark}")
        return found

    async def look(self) -> None:
        """Obey what is written now."""
        wanted = await self._store.cordons(within_s=5.0)
        now = time.monotonic()
        for health in self._healths():
            if health.cordoned != (health.mark in wanted):
                health.cordon(cordoned=not health.cordoned, now=now)
                log.warning(
                    "upstream cordoned" if health.cordoned else "upstream uncordoned", extra={"upstream": health.label}
                )

    async def follow(self) -> None:
        """Keep true for ever: a supervised loop."""
        while True:
            with suppress(Unavailable):
                await self.look()
            await until_set(self._wake, within_s=LOOK_S)
            self._wake.clear()

    def _note(self, _: str | None) -> None:
        self._wake.set()


class FleetView:
    """One process's own view, told to all; and all views, for whoever asks."""

    def __init__(
        self,
        store: FleetStore,
        *,
        networks: Networks,
        bundlers: Networks,
        cordons: Cordons,
        figures: Callable[[], dict[str, Any]],
        report_s: float,
    ) -> None:
        self._store = store
        self._networks = {"upstream": networks, "bundler": bundlers}
        self._figures = figures
        self._report_s = report_s
        self._worker = secrets.token_hex(8)
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
                    "upstreams": [seen(upstream.health, now) for upstream in route.upstreams],
                }
                for kind, networks in self._networks.items()
                for name, route in networks.routes.items()
            ],
        }

    async def run(self) -> None:
        """A supervised loop."""
        while True:
            try:
                await self._store.write_view(self._worker, self.view())
                await self._store.purge_views()
            except Unavailable:
                pass
            await asyncio.sleep(self._report_s)

    async def close(self) -> None:
        try:
            await self._store.delete_view(self._worker)
        except Unavailable:
            pass

    # For operators

    async def look(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The workers, and what they see together, with who cordoned what."""
        views = await self._store.views()
        cordons = await self._store.cordons()
        networks = networks_of(views)
        for network in networks:
            for upstream in network["upstreams"]:
                found = cordons.get(upstream["id"])
                upstream["cordon"] = None if found is None else {
                    "reason": found["reason"], "by": found["by_whom"], "at": found["created_at"],
                }  # fmt: skip
        return views, networks

    async def cordon(self, mark: str, *, reason: str, by: str) -> UpstreamHealth:
        health = self.cordons.find(mark)
        await self._store.cordon(mark, label=health.label, reason=reason, by=by)
        await self.cordons.look()
        return health

    async def uncordon(self, mark: str) -> UpstreamHealth:
        health = self.cordons.find(mark)
        await self._store.uncordon(mark)
        await self.cordons.look()
        return health

    async def followers(self) -> list[dict[str, Any]]:
        """How far each network's follower is behind what the workers know of the chain."""
        _, networks = await self.look()
        tips = {network["network"]: network["tip"] for network in networks}
        return [{**dict(row), "tip": tips.get(row["network"])} for row in await self._store.followed()]

    async def deliveries(self) -> tuple[dict[str, Any], dict[str, int]]:
        return await self._store.deliveries()
