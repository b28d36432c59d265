"""Readiness: whether this worker can serve, and which dependencies are missing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from proxy import telemetry
from proxy.services.accounts.keyring import Keyring
from proxy.store.pool import Pool

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
        while True:
            self.database_up = await self._pool.is_up()
            telemetry.database_up.set(self.database_up)
            telemetry.keys_loaded.set(len(self._keyring))
            await asyncio.sleep(PROBE_S)
