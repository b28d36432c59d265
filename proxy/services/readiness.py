"""Readiness: whether this worker can serve, and which dependencies are missing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial

from proxy import telemetry
from proxy.errors import Unavailable
from proxy.services.accounts.keyring import Keyring
from proxy.store.postgres.blocks import BlockStore
from proxy.store.postgres.index_databases import MAIN
from proxy.store.postgres.pool import Pool
from proxy.tasks import Tasks

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
    """Loaded keys are enough to serve. A database that does not answer, and a network whose index does not move, are reported
    as degraded. A draining worker is not ready."""

    def __init__(self, keyring: Keyring, databases: Mapping[str, Pool]) -> None:
        """`databases`: all that the service uses, by name."""
        self._keyring = keyring
        self._databases = databases
        self._away: set[str] = set()
        # Networks whose follower has stopped or is stuck, by database.
        self._halted: dict[str, list[str]] = {}
        self.keys_loaded = False
        self.draining = False

    def state(self) -> ReadinessState:
        missing = [name for name, absent in (("keys", not self.keys_loaded), ("draining", self.draining)) if absent]
        degraded = [
            "database" if name == MAIN else f"database {name}" for name in self._databases if name in self._away
        ]
        degraded += [f"follower {network}" for name in self._databases for network in self._halted.get(name, ())]
        return ReadinessState(tuple(missing), tuple(degraded))

    def start(self, tasks: Tasks) -> None:
        for name, pool in self._databases.items():
            tasks.start("readiness", partial(self._watch, name, pool), of=name)

    async def _watch(self, name: str, pool: Pool) -> None:
        """Supervised loop: probe a database, and read which of its networks are not followed any more."""
        blocks = BlockStore(pool)
        async for is_up in probes(name, pool):
            (self._away.discard if is_up else self._away.add)(name)
            try:
                self._halted[name] = [*await blocks.halted()] if is_up else []
            except Unavailable:
                continue
            telemetry.keys_loaded.set(len(self._keyring))


async def probes(name: str, pool: Pool) -> AsyncIterator[bool]:
    """Probe a database every few seconds, show the result as a metric and log each change."""
    was_up = True
    while True:
        is_up = await pool.is_up()
        telemetry.database_up.labels(name).set(is_up)
        if is_up != was_up:
            log.warning("Postgres answers again" if is_up else "Postgres does not answer", extra={"database": name})
        was_up = is_up
        yield is_up
        await asyncio.sleep(PROBE_S)
