"""Delivers what is due: claims it, signs it, posts it, and writes down how it went.

One loop takes what is due, as much as there is room for (see core/lanes); each delivery is a task of its own; one loop writes
the results, all that have come since the last time in one statement. A delivery keeps its place until its result is written,
so that what a crash repeats is at most what was under way. Nothing here remembers what is still to be delivered: that is in
Postgres, and however much it is costs no memory.

It wakes when Postgres tells that something is due, when a place is free again, and when the next delivery has its time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

import asyncpg

from proxy import telemetry
from proxy.core import attempts, retries, signatures
from proxy.core.lanes import Lanes, receiver_of
from proxy.core.retries import Format
from proxy.errors import Unavailable
from proxy.store.deliveries import LEASE_S, AttemptResult, ClaimedDelivery, DeliveryStore, DueWebhooks
from proxy.store.notices import Notices
from proxy.store.pool import AWAY
from proxy.store.secrets import Vault
from proxy.tasks import until_set
from proxy.wire.receiver import DeliveryReply, Receiver

log = logging.getLogger("penstock.deliverer")

# Looks at the outbox when nobody says anything: heals a missed notice.
QUIET_S = 5.0
# Where something is due and somebody else has it, or there is no place for it.
SOON_S = 0.05
# Where many are under way, so many that end, or all that end within this time, are written together, and their places filled
# together: statements for each would cost more than the delivery.
MANY, GATHER_S = 48, 0.005
# How long it is believed what was found due, while it is and nobody tells of more.
BELIEVED_S = 0.05
# How long to wait before Postgres is tried again.
RETRY_S = 0.5
# Opened secrets that are remembered.
SECRETS = 10_000

_LOST = (Unavailable, *AWAY, asyncpg.DeadlockDetectedError, asyncpg.OperatorInterventionError)
# A delivery, its reply, when it began by the monotonic clock, and how long it took.
FinishedAttempt = tuple[ClaimedDelivery, DeliveryReply, float, float]


class DeliveryPlan(Protocol):
    """Of a plan. 0: no limit."""

    @property
    def webhook_deliveries_per_day(self) -> int: ...


class Deliverer:
    def __init__(
        self,
        store: DeliveryStore,
        notices: Notices,
        receiver: Receiver,
        vault: Vault,
        *,
        lanes: Lanes,
        plans: Mapping[str, DeliveryPlan],
        schedules: Mapping[Format, tuple[float, ...]] = retries.SCHEDULES,
        lease_s: float = LEASE_S,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._receiver = receiver
        self._vault = vault
        self._lanes = lanes
        self._day_limits = {name: plan.webhook_deliveries_per_day for name, plan in plans.items()}
        self._schedules = schedules
        self._lease_s = lease_s
        self._now = now
        self._secrets: dict[tuple[str, bytes], str] = {}
        self._done: list[FinishedAttempt] = []
        # What was found due, and when; None where that may have changed. And whether somebody told of more since.
        self._due: DueWebhooks | None = None
        self._listed_at = 0.0
        self._has_news = False
        self._wake = asyncio.Event()
        self._written = asyncio.Event()
        self._finished = asyncio.Event()
        self._changed_accounts: set[str] = set()
        self._stopping = False
        notices.listen("penstock_deliveries", self._note_due)
        notices.listen("penstock_accounts", self._note_account)

    def __repr__(self) -> str:
        return f"<Deliverer {self._lanes!r}{' stopping' if self._stopping else ''}>"

    async def run(self) -> None:
        """A supervised loop. One that was stopped before has left nothing under way: its leases end, and all is sent again."""
        self._lanes.clear()
        self._done.clear()
        self._due = None
        async with asyncio.TaskGroup() as group:
            group.create_task(self._write_for_ever())
            while not self._stopping:
                self._wake.clear()
                wait_s = await self._try_look(group)
                await until_set(self._wake, within_s=wait_s)

    async def drain(self) -> None:
        """Take nothing more, and wait until what is under way is written down. The caller sets the limit."""
        self._stopping = True
        self._wake.set()
        while self._lanes.busy:
            await self._written.wait()
            self._written.clear()

    def _note_due(self, _: str | None) -> None:
        self._due, self._has_news = None, True
        self._wake.set()

    def _note_account(self, account: str | None) -> None:
        if account is not None:
            self._changed_accounts.add(account)
            self._note_due(account)

    # Taking

    async def _try_look(self, group: asyncio.TaskGroup) -> float:
        try:
            return await self._look(group)
        except (*_LOST, asyncpg.PostgresError) as exc:
            log.warning("nothing can be taken from the outbox", extra={"reason": type(exc).__name__})
            return RETRY_S

    async def _look(self, group: asyncio.TaskGroup) -> float:
        """Take what is due and has a place. In how many seconds to look again, if nothing happens before."""
        if self._changed_accounts:
            accounts, self._changed_accounts = self._changed_accounts, set()
            await self._store.release_held([*accounts])  # one that may more now need not wait for the next day
        due = await self._list_due()
        if due.inactive:
            await self._store.park(due.inactive)
        rooms = self._lanes.rooms({webhook: receiver_of(url) for webhook, url in due.active.items()})
        if rooms:
            claimed, exhausted = await self._store.claim(rooms, day_limits=self._day_limits, lease_s=self._lease_s)
            for account in exhausted:
                log.warning(
                    "the account's deliveries of the day are used up: the rest is held", extra={"account": account}
                )
            for each in claimed:
                self._lanes.begin(receiver_of(each.url))
                group.create_task(self._attempt(each))
            if len(claimed) < sum(rooms.values()):
                self._due = None
        if due.inactive or due.active:
            # More may be there than was taken; if it only waits for places, those who leave them tell.
            return SOON_S if rooms or due.inactive else QUIET_S
        return QUIET_S if due.next_s is None else min(max(due.next_s, 0.0), QUIET_S)

    async def _list_due(self) -> DueWebhooks:
        now = time.monotonic()
        due = self._due if now - self._listed_at < BELIEVED_S else None
        if due is None:
            self._has_news = False
            due = await self._store.list_due()
            is_good = due.active and not due.inactive and not self._has_news
            self._due, self._listed_at = (due if is_good else None), now
        return due

    # Delivering

    async def _attempt(self, claimed: ClaimedDelivery) -> None:
        began = time.monotonic()
        try:
            headers = self._headers(claimed)
            reply = await self._receiver.post(claimed.url, claimed.body, headers=headers)
        except Exception:  # one delivery that cannot be made must not end all others
            log.exception("a delivery could not be attempted", extra={"event": claimed.event_id})
            reply = DeliveryReply("invalid")
        self._done.append((claimed, reply, began, time.monotonic() - began))
        self._finished.set()

    def _headers(self, claimed: ClaimedDelivery) -> dict[str, str]:
        """Signed anew for each attempt, with the time of it."""
        sealed = (claimed.secret,) if claimed.old_secret is None else (claimed.secret, claimed.old_secret)
        headers = signatures.headers(
            event_type=claimed.type,
            event_id=claimed.event_id,
            secrets=[self._secret(claimed.webhook_id, each) for each in sealed],
            timestamp=int(self._now()),
            body=claimed.body,
        )
        headers["X-Webhook-Attempt"] = str(claimed.claim)
        return headers

    def _secret(self, webhook_id: str, sealed: bytes) -> str:
        found = self._secrets.get((webhook_id, sealed))
        if found is None:
            if len(self._secrets) >= SECRETS:
                self._secrets.clear()
            found = signatures.secret_of(self._vault.open(webhook_id, sealed))
            self._secrets[webhook_id, sealed] = found
        return found

    # Writing down

    async def _write_for_ever(self) -> None:
        while True:
            await self._finished.wait()
            if len(self._done) < MANY < self._lanes.busy:
                await asyncio.sleep(GATHER_S)
            self._finished.clear()
            while self._done:
                batch, self._done = self._done[:MANY], self._done[MANY:]
                await self._write(batch)

    async def _write(self, batch: list[FinishedAttempt]) -> None:
        """However long Postgres is away: what was delivered is known here only."""
        while True:
            now = time.monotonic()
            results = [self._result(claimed, reply, took_s, now - began) for claimed, reply, began, took_s in batch]
            try:
                await self._write_once(results)
                break
            except _LOST as exc:
                log.warning("results of deliveries wait", extra={"count": len(batch), "reason": type(exc).__name__})
                await asyncio.sleep(RETRY_S)
            except asyncpg.PostgresError as exc:
                if len(batch) > 1:  # one of them, or somebody in its way: the others are not to suffer for it
                    for each in batch:
                        await self._write([each])
                    return
                log.error(
                    "a result is lost; it is delivered again", extra={"event": batch[0][0].event_id, "reason": str(exc)}
                )
                break
        for claimed, reply, _, took_s in batch:
            self._lanes.end(receiver_of(claimed.url), took_s=took_s, ok=attempts.is_delivered(reply.status))
        self._count(batch)
        self._wake.set()
        self._written.set()

    def _count(self, batch: list[FinishedAttempt]) -> None:
        ends = Counter(
            "delivered" if attempts.is_delivered(reply.status) else reply.outcome for _, reply, _, _ in batch
        )
        for outcome, count in ends.items():
            telemetry.delivery_attempts_total.labels(outcome).inc(count)
        telemetry.deliveries_under_way.set(self._lanes.busy)

    async def _write_once(self, results: list[AttemptResult]) -> None:
        plain = [result for result in results if result.verdict.cause is None]
        if plain:
            await self._store.finish(plain)
        for result in results:
            if result.verdict.cause is not None:
                await self._change_webhook(result)

    async def _change_webhook(self, result: AttemptResult) -> None:
        cause, claimed = result.verdict.cause, result.claimed
        assert cause is not None
        about = {
            "webhook": claimed.webhook_id,
            "url": claimed.url,
            "network": claimed.network,
            "event_type": claimed.event_type,
            "event": claimed.event_id,
            "attempts": claimed.tries + 1,
            "outcome": result.outcome,
            "status": result.status,
        }
        if await self._store.finish_with(result, cause, about):
            said = (
                "paused: every retry of a delivery failed"
                if cause == "exhaust"
                else "disabled: its receiver is gone (410)"
            )
            telemetry.webhooks_stopped_total.labels(cause).inc()
            log.warning(f"webhook {said}", extra={"webhook": claimed.webhook_id, "event": claimed.event_id})

    def _result(self, claimed: ClaimedDelivery, reply: DeliveryReply, took_s: float, ago_s: float) -> AttemptResult:
        form = retries.format_of(claimed.type)
        verdict = attempts.judge(
            form,
            claimed.tries,
            reply.status,
            wait_s=retries.retry_after(reply.retry_after, self._now()),
            test=claimed.test,
            schedule=self._schedules[form],
        )
        return AttemptResult(claimed, verdict, reply.outcome, reply.status, reply.excerpt, int(took_s * 1000), ago_s)
