"""Every process reports itself every few seconds, so that operators see the whole fleet: hosts, versions, roles, lag."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from proxy import __version__, telemetry
from proxy.errors import Unavailable
from proxy.store.postgres.fleet import FleetStore
from proxy.tasks import repeat

REPORT_S = 3.0


class ProcessReports:
    def __init__(
        self,
        store: FleetStore,
        role: str,
        *,
        instance: str = "",
        follows: Callable[[], Mapping[str, Any]] = dict,
        backfills: Callable[[], list[dict[str, Any]]] = list,
        valkey: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """`instance` identifies the host. `follows`: the networks that this process indexes, each with its block and the
        head. `backfills`: the progress of those that it runs. `valkey`: the state of its connection to the Valkey for limits,
        if there is one."""
        self._store = store
        self._role = role
        self._instance = instance
        self._follows = follows
        self._backfills = backfills
        self._valkey = valkey
        self._id = secrets.token_hex(8)
        self._started_at = time.time()

    def __repr__(self) -> str:
        return f"<ProcessReports {self._role} {self._id}>"

    def report(self) -> dict[str, Any]:
        return {
            "host": socket.gethostname(),
            "instance": self._instance,
            "pid": os.getpid(),
            "version": __version__,
            "role": self._role,
            "started_at": self._started_at,
            "follows": dict(self._follows()),
            "backfills": self._backfills(),
            "valkey": None if self._valkey is None else self._valkey(),
        }

    async def run(self) -> None:
        """A supervised loop."""
        telemetry.process_info.labels(self._role, __version__).set(1)
        await repeat(lambda: self._store.write_process(self._id, self.report()), every_s=REPORT_S)

    async def close(self) -> None:
        try:
            await self._store.delete_process(self._id)
        except Unavailable:
            pass
