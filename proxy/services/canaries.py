"""Raises and lowers the shares of upstreams that are being promoted: a loop that one process of the fleet runs at a time.

The shares are in Postgres, and every process applies them (`services/fleet.py`). Each step is in the log of actions.
"""

from __future__ import annotations

import asyncio
import datetime
import logging

from proxy.core.canary import next_share
from proxy.core.trials import trials_of
from proxy.errors import Unavailable
from proxy.store.postgres.actions import Action, ActionStore, Actor
from proxy.store.postgres.fleet import FleetStore

log = logging.getLogger("penstock.canaries")

CHECK_S = 5.0
# The least time between two steps up: trouble may need a while to show.
STEP_S = 60.0
# A process makes the check if the last one is older than this share of the interval: clocks and pauses are never exact.
CLAIM_SHARE = 0.9
OPERATION = "canary_step"


class CanaryWatch:
    def __init__(
        self, store: FleetStore, actions: ActionStore, *, check_s: float = CHECK_S, step_s: float = STEP_S
    ) -> None:
        self._store = store
        self._actions = actions
        self._check_s = check_s
        self._step_s = step_s

    def __repr__(self) -> str:
        return f"<CanaryWatch every {self._check_s} s>"

    async def run(self) -> None:
        """Supervised loop."""
        while True:
            try:
                if await self._store.claim("canaries", self._check_s * CLAIM_SHARE):
                    await self.check()
            except Unavailable as exc:
                log.warning("cannot check canaries", extra={"reason": str(exc)})
            await asyncio.sleep(self._check_s)

    async def check(self) -> None:
        """Change the shares that are due."""
        rows = {row["label"]: row for row in (await self._store.shares()).values()}
        promoted = {label: row["share"] for label, row in rows.items() if row["share"] > 0.0}
        if not promoted:
            return
        now = datetime.datetime.now(datetime.UTC)
        for trial in trials_of(await self._store.views(), promoted):
            row = rows[trial.label]
            step = next_share(row["share"], trial)
            is_early = (now - row["changed_at"]).total_seconds() < self._step_s
            if step is None or (step[0] > row["share"] and is_early):
                continue
            share, reason = step
            await self._store.set_share(row["upstream"], label=trial.label, share=share, reason=reason)
            log.warning("canary", extra={"upstream": trial.label, "share": share, "reason": reason})
            before, after = {"share": row["share"]}, {"share": share, "reason": reason}
            done = Action(OPERATION, subject=trial.label, before=before, after=after)
            await self._actions.record(None, Actor("operator", "canary"), done)
