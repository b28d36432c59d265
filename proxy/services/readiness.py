"""Readiness: whether this worker can serve, and which dependencies are missing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from proxy import telemetry
from proxy.services.accounts.keyring import Keyring
from proxy.store.pool import Pool

log = logging.getLogger("penstock.database")

PROBE_S = 2.0


@dataclass(frozen=True, slots=True)
class ReadinessState:
    missing: tuple[str, ...]
    degraded: tuple[str, ...]

    @property
    def ready(self) -> bool:
        return not self.missing


class Readiness:
    """Loaded keys are enough to serve. A missing database is reported as degraded. A draining worker is not ready."""

    def __init__(self, keyring: Keyring, pool: Pool) -> None:
        self._keyring = keyring
        self._pool = pool
        self.database_up = False
        self.keys_loaded = False
        self.draining = False

    def state(self) -> ReadinessState:
        missing = [name for name, absent in (("keys", not self.keys_loaded), ("draining", self.draining)) if absent]
        return ReadinessState(tuple(missing), () if self.database_up else ("database",))

    async def watch(self) -> None:
        """Supervised loop: probe the database."""
        async for is_up in probes(self._pool):
            self.database_up = is_up
            telemetry.keys_loaded.set(len(self._keyring))


async def probes(pool: Pool) -> AsyncIterator[bool]:
    """Probe the database every few seconds, show the result as a metric and log each change."""
    was_up = True
    while True:
        is_up = await pool.is_up()
        telemetry.database_up.set(is_up)
        if is_up != was_up:
            log.warning("Postgres answers again" if is_up else "Postgres does not answer")
        was_up = is_up
        yield is_up
        await asyncio.sleep(PROBE_S)
