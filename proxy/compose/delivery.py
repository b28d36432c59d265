"""Build the delivery feature: it sends webhook events to their receivers and mails to account holders.

It needs Postgres and outgoing connections, but no upstreams.
"""

from __future__ import annotations

import asyncio
import logging
import secrets

from proxy.compose.fleet import link_to
from proxy.core.delivery_concurrency import Lanes
from proxy.errors import Unavailable
from proxy.services.delivery.alert_watch import AlertWatch
from proxy.services.delivery.deliverer import Deliverer
from proxy.services.delivery.mails import Mails
from proxy.settings import Settings, Tables
from proxy.store.postgres.alerts import AlertStore
from proxy.store.postgres.deliveries import DeliveryStore
from proxy.store.postgres.mails import MailStore
from proxy.store.postgres.notices import Notices
from proxy.store.postgres.pool import COMMAND_S, Pool
from proxy.store.postgres.secrets import vault_of
from proxy.store.postgres.webhooks import WebhookStore
from proxy.store.valkey.live_members import LiveMembers
from proxy.tasks import Tasks
from proxy.tracing import tracer_of
from proxy.wire.mailer import Mailer
from proxy.wire.receiver import Receiver
from proxy.wire.webhook_guard import WebhookGuard

log = logging.getLogger("penstock.deliverer")

# How often old deliveries are removed, and the pause between two batches of a removal.
PURGE_S, PURGE_PAUSE_S = 600.0, 0.2
# How often deliveries left parked by an interrupted resume are requeued.
UNPARK_S = 30.0
POOL_SIZE = 6


class DeliveryFeature:
    def __init__(self, settings: Settings, tables: Tables) -> None:
        self.tracer = tracer_of(settings.tracing, "deliverer")
        given = settings.webhooks
        # A separate pool: there is a statement for every few deliveries, and it must not wait for other work.
        self.pool = pool = Pool.of(
            settings.database, size=POOL_SIZE, request_timeout_s=COMMAND_S, application="penstock-deliverer"
        )
        self._keep_days = given.keep_days
        url = settings.dashboard.url
        alerts = AlertStore(pool, sends_mail=bool(settings.mail.host), dashboard_url=url)
        self.alerts = AlertWatch(alerts, tables.plans)
        self.store = DeliveryStore(pool, alerts.sender)
        self.notices = Notices(pool)
        self.receiver = Receiver(WebhookGuard(settings.egress, dev=settings.server.dev), timeout_s=given.timeout_s)
        valkey = settings.valkey.limits_url
        self._link = link_to(valkey) if valkey else None
        self._members = LiveMembers(self._link, "deliverers", secrets.token_hex(8)) if self._link else None
        self.deliverer = Deliverer(
            self.store,
            self.receiver,
            vault_of(settings),
            lanes=Lanes(total=given.in_flight, each=given.per_receiver),
            plans=tables.plans,
            # Longer than any attempt takes.
            lease_s=2 * given.timeout_s,
            tracer=self.tracer,
            owns=self._members.owns if self._members else _owns_all,
        )
        self.mails = Mails(MailStore(pool), Mailer(settings.mail), dashboard_url=url)

    def __repr__(self) -> str:
        return f"<DeliveryFeature {self.deliverer!r} {self.mails!r}>"

    async def start(self, tasks: Tasks) -> None:
        await self.pool.open()
        self.deliverer.listen(self.notices)
        if self._link is not None and self._members is not None:
            tasks.start("valkey", self._link.run)
            tasks.start("live deliverers", self._members.run)
        tasks.start("deliverer", self.deliverer.run)
        tasks.start("delivery notifications", self.notices.run)
        tasks.start("mails", self.mails.run)
        tasks.start("alerts", self.alerts.run)
        tasks.start("purge", self._purge)
        tasks.start("parked", self._unpark)

    async def _purge(self) -> None:
        while True:
            try:
                has_more = await self.store.purge(self._keep_days)
            except Unavailable as exc:
                log.warning("cannot remove old events", extra={"reason": str(exc)})
                has_more = False
            await asyncio.sleep(PURGE_PAUSE_S if has_more else PURGE_S)

    async def _unpark(self) -> None:
        while True:
            try:
                await WebhookStore(self.pool).requeue_parked()
            except Unavailable as exc:
                log.warning("cannot requeue parked deliveries", extra={"reason": str(exc)})
            await asyncio.sleep(UNPARK_S)

    async def drain(self, within_s: float) -> None:
        """Finish the attempts in progress and store their results, so that they are not repeated."""
        try:
            async with asyncio.timeout(within_s):
                await self.deliverer.drain()
                await self.mails.drain()
        except TimeoutError:
            log.warning("deliveries were interrupted and will be sent again", extra={"deliverer": repr(self.deliverer)})

    async def close(self) -> None:
        await self.receiver.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)
        await self.pool.close()


def _owns_all(_: str) -> bool:
    return True
