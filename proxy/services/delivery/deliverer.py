"""Deliver webhook events: claim them, sign them, post them, and store the results.

One loop claims due deliveries, as many as the lanes have slots for (core/delivery_concurrency). Each attempt is a task. Another
loop stores the results, all that have finished since the last time in one statement. A delivery keeps its slot until its result
is stored, so a crash repeats at most the attempts in progress. The queue is in Postgres, not here, so its length costs no
memory.

The deliverer wakes up when Postgres notifies it, when a slot is free again, and when the next delivery is due.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from proxy import telemetry
from proxy.core import attempts, signatures, webhook_faults
from proxy.core.alert_formats import with_routing_key
from proxy.core.attempts import Format
from proxy.core.delivery_concurrency import Lanes, receiver_of
from proxy.core.iso_time import iso_millis
from proxy.core.lru_cache import LruCache
from proxy.core.retry_after import retry_after_s
from proxy.errors import Unavailable
from proxy.store.postgres.alerts import EVENT_TYPES
from proxy.store.postgres.bad_rows import BadRows
from proxy.store.postgres.deliveries import LEASE_S, AttemptResult, ClaimedDelivery, DeliveryStore, DueWebhooks
from proxy.store.postgres.notices import Notices
from proxy.store.postgres.pool import AWAY, UNABLE
from proxy.store.postgres.secrets import SealBroken, Vault
from proxy.tasks import FirstFailure, client_of_task, report_failure, until_set
from proxy.tracing import Attributes, Tracer
from proxy.wire.receiver import DeliveryReply, Receiver

log = logging.getLogger("penstock.deliverer")

# How often to check the outbox without a notification, in case one was missed.
CHECK_S = 5.0
# How soon to check again while deliveries are due that another process has claimed or that have no slot.
SOON_S = 0.05
# How soon to check again while only receivers of other deliverers have due deliveries.
OTHERS_S = 0.5
# With more attempts in progress than this, results are stored together: up to this many, or all that finish within this time.
# One statement per result would cost more than the delivery.
BATCH, GATHER_S = 48, 0.005
# How long the list of webhooks with due deliveries is reused without a notification.
LIST_REUSE_S = 0.05
# Pause before Postgres is tried again.
RETRY_S = 0.5
# Bounds memory: decrypted secrets.
CACHED_SECRETS = 10_000

_DATABASE_AWAY = (Unavailable, *AWAY, *UNABLE)
# A delivery, its reply, its start on the monotonic clock, and its duration in seconds.
FinishedAttempt = tuple[ClaimedDelivery, DeliveryReply, float, float]


class DeliveryPlan(Protocol):
    """The delivery limit of a plan. 0 means no limit."""

    @property
    def webhook_deliveries_per_day(self) -> int: ...


class Deliverer:
    def __init__(
        self,
        store: DeliveryStore,
        receiver: Receiver,
        vault: Vault,
        *,
        lanes: Lanes,
        plans: Mapping[str, DeliveryPlan],
        schedules: Mapping[Format, tuple[float, ...]] = attempts.SCHEDULES,
        lease_s: float = LEASE_S,
        now: Callable[[], float] = time.time,
        tracer: Tracer | None = None,
        owns: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """`owns`: whether this deliverer, and no other, serves a receiver. Otherwise each would give it a lane."""
        self._owns = owns
        self._tracer = tracer
        self._store = store
        self._receiver = receiver
        self._vault = vault
        self._lanes = lanes
        self._day_limits = {name: plan.webhook_deliveries_per_day for name, plan in plans.items()}
        self._schedules = schedules
        self._lease_s = lease_s
        self._now = now
        self._secrets: LruCache[tuple[str, bytes], str] = LruCache(CACHED_SECRETS)
        self._finished_attempts: list[FinishedAttempt] = []
        self._claim_failure = FirstFailure(log, "cannot claim deliveries")
        self._write_failure = FirstFailure(log, "cannot store delivery results yet")
        self._bad = BadRows("delivery_result")
        # The webhooks with due deliveries and when they were listed; None if that may have changed. And whether a
        # notification arrived since the listing began.
        self._due: DueWebhooks | None = None
        self._listed_at = 0.0
        self._was_notified = False
        self._wake = asyncio.Event()
        self._written = asyncio.Event()
        self._finished = asyncio.Event()
        # In the order of their turns.
        self._changed_accounts: dict[str, None] = {}
        self._stopping = False

    def __repr__(self) -> str:
        return f"<Deliverer {self._lanes!r}{' stopping' if self._stopping else ''}>"

    def listen(self, notices: Notices) -> None:
        """Wake up when a delivery is due, and when an account's plan may have changed."""
        notices.listen("penstock_deliveries", self._on_due)
        notices.listen("penstock_accounts", self._on_account)

    async def run(self) -> None:
        """Supervised loop. Attempts of a cancelled run are gone: their leases expire, and they are sent again."""
        self._lanes.clear()
        self._finished_attempts.clear()
        self._due = None
        async with asyncio.TaskGroup() as group:
            group.create_task(self._store_results())
            while not self._stopping:
                self._wake.clear()
                wait_s = await self._try_claim(group)
                await until_set(self._wake, within_s=wait_s)

    async def drain(self) -> None:
        """Claim no more, and wait until the attempts in progress are stored. The caller sets the time limit."""
        self._stopping = True
        self._wake.set()
        while self._lanes.busy:
            await self._written.wait()
            self._written.clear()

    def _on_due(self, _: str | None) -> None:
        self._due, self._was_notified = None, True
        self._wake.set()

    def _on_account(self, account: str | None) -> None:
        if account is not None:
            self._changed_accounts[account] = None
            self._on_due(account)

    # Claiming

    async def _try_claim(self, group: asyncio.TaskGroup) -> float:
        try:
            next_s = await self._claim(group)
        except _DATABASE_AWAY as exc:
            self._claim_failure.report(reason=str(exc) or type(exc).__name__)
            return RETRY_S
        except Exception as exc:  # The deliveries in progress go on.
            report_failure("deliverer", exc, RETRY_S)
            return RETRY_S
        self._claim_failure.clear()
        return next_s

    async def _claim(self, group: asyncio.TaskGroup) -> float:
        """Claim and start the due deliveries that have a slot. Returns the seconds until the next check."""
        if self._changed_accounts:
            await self._release_held(next(iter(self._changed_accounts)))
        due = await self._list_due()
        if due.inactive:
            await self._store.park(due.inactive)
        receivers = {each: receiver_of(url) for each, url in due.active.items()}
        own = {each: receiver for each, receiver in receivers.items() if self._owns(receiver)}
        slots = self._lanes.rooms(own, due.accounts)
        if slots:
            claimed, exhausted = await self._store.claim(slots, day_limits=self._day_limits, lease_s=self._lease_s)
            for account in exhausted:
                log.warning(
                    "daily delivery limit reached: further deliveries wait until 00:00 UTC", extra={"account": account}
                )
            for each in claimed:
                self._lanes.begin(each.account, receiver_of(each.url))
                group.create_task(self._attempt(each))
            if len(claimed) < sum(slots.values()):
                self._due = None
        if due.inactive or own:
            # More may be due than was claimed. Deliveries that only lack a slot are claimed when an attempt finishes.
            return SOON_S if slots or due.inactive else CHECK_S
        # Receivers of a deliverer that has died get another owner.
        check_s = OTHERS_S if due.active else CHECK_S
        return check_s if due.next_s is None else min(max(due.next_s, 0.0), check_s)

    async def _release_held(self, account: str) -> None:
        """The account's limit may be higher now. One account and a bounded number per claim: other accounts do not wait for the
        many deliveries of one."""
        del self._changed_accounts[account]
        if await self._store.release_held(account, self._day_limits):
            self._changed_accounts[account] = None
        if self._changed_accounts:
            self._wake.set()

    async def _list_due(self) -> DueWebhooks:
        now = time.monotonic()
        due = self._due if now - self._listed_at < LIST_REUSE_S else None
        if due is None:
            self._was_notified = False
            due = await self._store.list_due()
            is_reusable = due.active and not due.inactive and not self._was_notified
            self._due, self._listed_at = (due if is_reusable else None), now
        return due

    # Delivering

    async def _attempt(self, claimed: ClaimedDelivery) -> None:
        began = time.monotonic()
        client_of_task.set(claimed.account)
        try:
            reply = await self._post(claimed, self._headers(claimed))
        except SealBroken as exc:
            self._leave(claimed, str(exc))
            return
        except Exception:  # One broken delivery must not end all others.
            log.exception("cannot attempt a delivery", extra={"event": claimed.event_id})
            reply = DeliveryReply("invalid")
        self._finished_attempts.append((claimed, reply, began, time.monotonic() - began))
        self._finished.set()

    async def _post(self, claimed: ClaimedDelivery, headers: dict[str, str]) -> DeliveryReply:
        attributes: Attributes = {"penstock.event": claimed.event_id, "penstock.attempt": claimed.claim}
        span = None if self._tracer is None else self._tracer.start("webhook delivery", attributes)
        if span is None:
            return await self._receiver.post(claimed.url, self._body(claimed), headers=headers)
        with span:
            sent = {**headers, "traceparent": span.traceparent}
            reply = await self._receiver.post(claimed.url, self._body(claimed), headers=sent)
            span.set({"penstock.outcome": reply.outcome, "http.response.status_code": reply.status or 0})
            return reply

    def _leave(self, claimed: ClaimedDelivery, reason: str) -> None:
        """Leave a delivery to a deliverer that can open its secret, when the lease ends. The receiver has not failed."""
        log.error("cannot sign a delivery: it stays queued", extra={"event": claimed.event_id, "reason": reason})
        self._lanes.end(claimed.account, receiver_of(claimed.url), took_s=0.0, ok=False)
        telemetry.delivery_attempts_total.labels("unsigned").inc()
        self._wake.set()
        self._written.set()

    def _headers(self, claimed: ClaimedDelivery) -> dict[str, str]:
        """The headers of one attempt, signed with its own timestamp."""
        if claimed.event_type == EVENT_TYPES["pagerduty"]:
            return {"Content-Type": "application/json"}
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

    def _body(self, claimed: ClaimedDelivery) -> bytes:
        """The body as it is stored; events for PagerDuty get their routing key, which is stored as the webhook's secret."""
        if claimed.event_type != EVENT_TYPES["pagerduty"]:
            return claimed.body
        return with_routing_key(claimed.body, self._vault.open(claimed.webhook_id, claimed.secret).decode())

    def _secret(self, webhook_id: str, sealed: bytes) -> str:
        secret = self._secrets.get((webhook_id, sealed))
        if secret is None:
            secret = signatures.secret_of(self._vault.open(webhook_id, sealed))
            self._secrets[webhook_id, sealed] = secret
        return secret

    # Results

    async def _store_results(self) -> None:
        while True:
            await self._finished.wait()
            if len(self._finished_attempts) < BATCH < self._lanes.busy:
                await asyncio.sleep(GATHER_S)
            self._finished.clear()
            while self._finished_attempts:
                batch, self._finished_attempts = self._finished_attempts[:BATCH], self._finished_attempts[BATCH:]
                await self._write(batch)

    async def _write(self, batch: Sequence[FinishedAttempt]) -> None:
        """Store results, retrying for as long as Postgres is unavailable: no other copy of them exists."""
        while True:
            try:
                # The text of a receiver's reply may be impossible to store. The result is then stored without it.
                bad = await self._bad.write(batch, self._write_once)
                await self._bad.write([_without_words(each) for each in bad], self._write_once)
                break
            except _DATABASE_AWAY as exc:
                self._write_failure.report(count=len(batch), reason=str(exc) or type(exc).__name__)
                await asyncio.sleep(RETRY_S)
            except Exception as exc:
                if len(batch) > 1:  # One of them fails, or is locked. Store the others.
                    for each in batch:
                        await self._write([each])
                    return
                log.error(
                    "cannot store a delivery result: the event will be delivered again",
                    extra={"event": batch[0][0].event_id, "error": type(exc).__name__},
                )
                break
        self._write_failure.clear()
        for claimed, reply, _, took_s in batch:
            is_delivered = attempts.is_delivered(reply.status)
            self._lanes.end(claimed.account, receiver_of(claimed.url), took_s=took_s, ok=is_delivered)
        self._count(batch)
        self._wake.set()
        self._written.set()

    def _count(self, batch: Sequence[FinishedAttempt]) -> None:
        ends = Counter(
            "delivered" if attempts.is_delivered(reply.status) else reply.outcome for _, reply, _, _ in batch
        )
        for outcome, count in ends.items():
            telemetry.delivery_attempts_total.labels(outcome).inc(count)
        telemetry.deliveries_under_way.set(self._lanes.busy)

    async def _write_once(self, batch: Sequence[FinishedAttempt]) -> None:
        """Store results. If this fails, some of them may be stored: storing a result twice changes nothing."""
        now = time.monotonic()
        results = [self._result(claimed, reply, took_s, now - began) for claimed, reply, began, took_s in batch]
        plain = [result for result in results if result.verdict.cause is None and not _is_taken_back(result)]
        if plain:
            await self._store.finish(plain)
        for result in results:
            if result.verdict.cause is not None:
                await self._change_webhook(result)
            elif _is_taken_back(result):
                await self._take_back(result)

    async def _take_back(self, result: AttemptResult) -> None:
        claimed, at = result.claimed, datetime.datetime.fromtimestamp(self._now(), datetime.UTC)
        try:
            injected = webhook_faults.reorganised(
                claimed.event_id, claimed.type, claimed.webhook_id, claimed.body, at=iso_millis(at)
            )
        except (KeyError, ValueError):
            # A body of an unknown form must not hold up the results of other webhooks.
            log.exception("fault plan not applied", extra={"event": claimed.event_id})
            await self._store.finish([result])
            return
        await self._store.finish_injecting(result, injected)

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
            "cause": cause,
        }
        if await self._store.finish_with(result, cause, about):
            what = (
                "paused: all retries of a delivery failed"
                if cause == "exhaust"
                else "disabled: its receiver returned 410 Gone"
            )
            telemetry.webhooks_stopped_total.labels(cause).inc()
            log.warning(f"webhook {what}", extra={"webhook": claimed.webhook_id, "event": claimed.event_id})

    def _result(self, claimed: ClaimedDelivery, reply: DeliveryReply, took_s: float, ago_s: float) -> AttemptResult:
        form = attempts.format_of(claimed.type)
        verdict = attempts.judge(
            form,
            claimed.tries,
            reply.status,
            wait_s=retry_after_s(reply.retry_after, self._now()),
            test=claimed.test,
            schedule=self._schedules[form],
        )
        if claimed.fault is not None:
            verdict = claimed.fault.after(verdict)
        exchange = reply.exchange or ("", "", "")
        return AttemptResult(
            claimed, verdict, reply.outcome, reply.status, reply.excerpt, int(took_s * 1000), ago_s, *exchange
        )


def _without_words(finished: FinishedAttempt) -> FinishedAttempt:
    """The attempt without anything that its receiver wrote, except the status."""
    claimed, reply, began, took_s = finished
    return claimed, DeliveryReply(reply.outcome, reply.status), began, took_s


def _is_taken_back(result: AttemptResult) -> bool:
    fault = result.claimed.fault
    return fault is not None and fault.takes_back(result.verdict)
