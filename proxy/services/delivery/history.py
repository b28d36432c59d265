"""List deliveries for webhook owners, redeliver one event or all since a time, and send test events."""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Callable, Mapping, Sequence

from proxy.chains.evm import samples
from proxy.chains.registry import Network
from proxy.core import webhook_bodies
from proxy.core.iso_time import iso_millis
from proxy.core.paging import Page
from proxy.core.webhook_bodies import BodyChain
from proxy.errors import InvalidRequest, NotFound, RateLimited
from proxy.store.postgres.deliveries import Attempt, Delivery, DeliveryStore, WebhookHealth
from proxy.store.postgres.webhooks import Webhook

__all__ = ("STATES", "Attempt", "Delivery", "DeliveryHistory", "Webhook", "WebhookHealth")

# The states by their API names. A delivery of an existing webhook is dropped only when a reorganisation withdraws its event.
STATES = {
    "pending": "due",
    "held": "over_quota",
    "parked": "parked",
    "delivered": "delivered",
    "failed": "failed",
    "taken_back": "dropped",
}

_DAY_S = 86_400


def _present() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class DeliveryHistory:
    def __init__(
        self,
        store: DeliveryStore,
        day_limits: Mapping[str, int],
        *,
        now: Callable[[], datetime.datetime] = _present,
    ) -> None:
        """`day_limits`: the events that an account may store per day, by plan; 0 means no limit."""
        self._store = store
        self._day_limits = day_limits
        self._now = now

    def __repr__(self) -> str:
        return f"<DeliveryHistory {self._store!r}>"

    async def page(
        self, webhook: Webhook, page: Page, *, status: str | None, since: datetime.datetime | None
    ) -> tuple[list[Delivery], int]:
        state = None if status is None else STATES[status]
        return await self._store.page(webhook.id, page, state=state, since=since)

    async def read(self, webhook: Webhook, event_id: str) -> Delivery:
        """One delivery with its body, and its attempts with what was sent and received."""
        delivery = await self._store.read(webhook.id, event_id)
        if delivery is None:
            raise NotFound("this webhook has no delivery of this event")
        return delivery

    async def health(self, webhooks: Sequence[Webhook]) -> dict[str, WebhookHealth]:
        """The last attempts of each webhook, by its id."""
        return await self._store.health([each.id for each in webhooks])

    async def redeliver(self, webhook: Webhook, event_id: str) -> None:
        if not await self._store.redeliver(webhook.id, event_id):
            raise NotFound("this webhook has no delivery of this event, or a reorganisation withdrew the event")

    async def redeliver_since(self, webhook: Webhook, since: datetime.datetime, *, status: str | None) -> int:
        """Requeue the deliveries that exist at the time of the request, and return their number."""
        state = None if status is None else STATES[status]
        return await self._store.redeliver_since(webhook.id, since, self._now(), state=state)

    async def test(self, webhook: Webhook, network: Network, *, event_type: str | None) -> str:
        """Send an event with sample data that is marked as a test, and return its id. Its type selects the format."""
        kind = event_type or webhook.event_type
        if webhook.status != "active":
            raise InvalidRequest(f"the webhook is {webhook.status}: resume it to send test events")
        event_id = "evt_test_" + secrets.token_hex(14)
        body = self._body(webhook, network, event_id, kind)
        if not await self._store.add_test(webhook, event_id, kind, body, day_limits=self._day_limits):
            now = self._now()
            raise RateLimited(
                "the account has as many webhook events as its plan allows per day: wait until 00:00 UTC",
                retry_after_s=_DAY_S - int(now.timestamp()) % _DAY_S,
                details={"reason": "daily_quota"},
            )
        return event_id

    def _body(self, webhook: Webhook, network: Network, event_id: str, kind: str) -> bytes:
        assert network.facts.chain_id is not None
        at = iso_millis(self._now())
        chain, coin = BodyChain(network.word(live=True), network.facts.chain_id), network.chain.native
        data = samples.sample_of(
            kind, chain=chain.name, symbol=coin.symbol, decimals=coin.decimals, block=1, time=at[:19] + "Z"
        )
        return webhook_bodies.body_of(event_id, kind, webhook.id, chain=chain, at=at, data=data, test=True)
