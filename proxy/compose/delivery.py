"""The part of the composition root that delivers: webhooks' events to their receivers, letters to the holders of accounts.

It needs Postgres and a way out, and no network of any chain.
"""

from __future__ import annotations

import asyncio
import logging

from proxy.compose.webhooks import vault_of
from proxy.core.lanes import Lanes
from proxy.errors import Unavailable
from proxy.services.delivery.deliverer import Deliverer
from proxy.services.delivery.mails import Mails
from proxy.settings import Settings, Tables
from proxy.store.deliveries import DeliveryStore
from proxy.store.mails import MailStore
from proxy.store.notices import Notices
from proxy.store.pool import Pool
from proxy.store.webhooks import WebhookStore
from proxy.tasks import Tasks
from proxy.wire.mailer import Mailer
from proxy.wire.receiver import Receiver
from proxy.wire.webhook_guard import WebhookGuard

log = logging.getLogger("penstock.deliverer")

# How often it is looked for what is too old to keep; and between two bites of it.
PURGE_S, BITE_S = 600.0, 0.2
# How often it is looked for what is parked although its webhook is active: who resumed it was stopped in the middle.
UNPARK_S = 30.0
POOL = 6


class DeliveryFeature:
    def __init__(self, settings: Settings, tables: Tables) -> None:
        given = settings.webhooks
        # Its own: there is a statement for every few deliveries, and none waits for whatever else runs here.
        self.pool = pool = Pool(
            settings.database.url,
            size=POOL,
            acquire_timeout_s=settings.database.acquire_timeout_s,
            application="penstock-deliverer",
        )
        self._keep_days = given.keep_days
        self.store = DeliveryStore(pool)
        self.notices = Notices(pool)
        self.receiver = Receiver(WebhookGuard(settings.egress, dev=settings.server.dev), timeout_s=given.timeout_s)
        self.deliverer = Deliverer(
            self.store,
            self.notices,
            self.receiver,
            vault_of(settings),
            lanes=Lanes(total=given.in_flight, each=given.per_receiver),
            plans=tables.plans,
            # An attempt is over well before its lease is.
            lease_s=2 * given.timeout_s,
        )
        self.letters = Mails(MailStore(pool), Mailer(settings.mail))

    def __repr__(self) -> str:
        return f"<DeliveryFeature {self.deliverer!r} {self.letters!r}>"

    async def start(self, tasks: Tasks) -> None:
        await self.pool.open()
        tasks.start("deliverer", self.deliverer.run)
        tasks.start("notices of deliveries", self.notices.run)
        tasks.start("letters", self.letters.run)
        tasks.start("purge", self._purge)
        tasks.start("parked", self._unpark)

    async def _purge(self) -> None:
        while True:
            try:
                has_more = await self.store.purge(self._keep_days)
            except Unavailable as exc:
                log.warning("old events were not removed", extra={"reason": str(exc)})
                has_more = False
            await asyncio.sleep(BITE_S if has_more else PURGE_S)

    async def _unpark(self) -> None:
        while True:
            try:
                await WebhookStore(self.pool).requeue_parked()
            except Unavailable as exc:
                log.warning("parked deliveries were not looked at", extra={"reason": str(exc)})
            await asyncio.sleep(UNPARK_S)

    async def drain(self, within_s: float) -> None:
        """What is under way ends, and is written down: it need not be sent again."""
        try:
            async with asyncio.timeout(within_s):
                await self.deliverer.drain()
                await self.letters.drain()
        except TimeoutError:
            log.warning("deliveries were cut short: they are sent again", extra={"deliverer": repr(self.deliverer)})

    async def close(self) -> None:
        await self.receiver.close()
        await self.pool.close()
