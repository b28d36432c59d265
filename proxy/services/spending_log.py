"""The spending on calls to upstreams: gathered from the meters of this process and written to Postgres.

A meter counts each attempt, in memory. Every few seconds the counts are written as a numbered batch. A batch whose outcome is
unknown is sent again under the same number; while Postgres is down, counts accumulate. A killed process loses what it had not
written.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import secrets
from collections.abc import Sequence

import asyncpg

from proxy import telemetry
from proxy.core.credits import CreditMeter, Spent, in_usd
from proxy.errors import Fault
from proxy.store.postgres.spending import SpendingPlace, SpendingStore

log = logging.getLogger("penstock.spending")

_REFUSED = (Fault, asyncpg.PostgresError)


class SpendingLog:
    def __init__(self, store: SpendingStore, meters: Sequence[CreditMeter], *, flush_s: float) -> None:
        self._store = store
        self._meters = meters
        self._flush_s = flush_s
        self._process = f"spending-{secrets.token_hex(8)}"
        self._waiting: dict[SpendingPlace, Spent] = {}
        # The batch that was sent and whose outcome is unknown, with its day.
        self._sent: tuple[datetime.date, dict[SpendingPlace, Spent]] | None = None
        self._number = 0
        # Credits that the metrics have counted too much: they only rise, and a refund may come after its call was counted.
        self._ahead: dict[tuple[str, str], Spent] = {}

    def __repr__(self) -> str:
        return f"<SpendingLog of {len(self._meters)} upstreams, {self._number} batches written>"

    async def run(self) -> None:
        """Supervised loop."""
        while True:
            await asyncio.sleep(self._flush_s)
            try:
                await self.flush()
            except _REFUSED as exc:
                log.warning("spending was not written; it is tried again", extra={"reason": str(exc)[:300]})

    async def flush(self) -> None:
        """Write what was counted, after resending a batch whose outcome is unknown."""
        self._gather()
        while self._sent is not None or self._waiting:
            if self._sent is None:
                self._sent = datetime.datetime.now(datetime.UTC).date(), self._waiting
                self._waiting = {}
                self._number += 1
            await self._store.write(self._process, self._number, *self._sent)
            self._sent = None

    async def close(self) -> None:
        try:
            await self.flush()
        except _REFUSED:
            log.warning("spending was not written", extra={"rows": len(self._waiting)})

    def _gather(self) -> None:
        for meter in self._meters:
            for spender, spent in meter.take().items():
                have = self._waiting.setdefault((meter.label, meter.network, spender), Spent())
                have.add(spent)
                self._count(meter.label, spender[0], spent)

    def _count(self, label: str, method: str, spent: Spent) -> None:
        ahead = self._ahead.setdefault((label, method), Spent())
        ahead.add(spent)
        if ahead.credits > 0:
            telemetry.upstream_credits_total.labels(label, method).inc(ahead.credits)
            telemetry.upstream_cost_total.labels(label).inc(float(in_usd(ahead.nanos)))
            self._ahead[label, method] = Spent()
