"""/webhooks/{id}/deliveries, redeliver and test: how events were told, and telling them again."""

from __future__ import annotations

import datetime
from collections.abc import Awaitable, Callable
from typing import Any

from proxy.chains.registry import Registry
from proxy.core.iso_time import iso_millis
from proxy.errors import InvalidRequest, NotFound
from proxy.services.delivery.history import STATES, Attempt, Delivery, DeliveryHistory, Webhook
from proxy.web.rest.endpoint import RestHandler, RestReply, RestRequest

_WORDS = {state: word for word, state in STATES.items()}


class DeliveryHandlers:
    def __init__(
        self, deliveries: DeliveryHistory, own: Callable[[RestRequest], Awaitable[Webhook]], chains: Registry
    ) -> None:
        """`own`: the webhook that a path names, if it is the caller's."""
        self._deliveries = deliveries
        self._own = own
        self._networks = {network.id: network for network in chains.networks()}

    def answers(self) -> dict[str, RestHandler]:
        return {
            "list_deliveries": self.list,
            "redeliver_event": self.redeliver,
            "redeliver_since": self.redeliver_since,
            "test_webhook": self.test,
        }

    async def list(self, asked: RestRequest) -> dict[str, Any]:
        webhook = await self._own(asked)
        given = asked.query["since"]
        since = None if given is None else _moment(given)
        found, total = await self._deliveries.page(webhook, asked.page, status=asked.query["status"], since=since)
        return {"deliveries": [_shown(each) for each in found], "page": asked.page.number, "total": total}

    async def redeliver(self, asked: RestRequest) -> RestReply:
        webhook = await self._own(asked)
        event_id = asked.path["event_id"]
        await self._deliveries.redeliver(webhook, event_id)
        status = "pending" if webhook.status == "active" else "parked"
        return RestReply({"webhook_id": webhook.id, "event_id": event_id, "status": status}, status=202)

    async def redeliver_since(self, asked: RestRequest) -> RestReply:
        webhook = await self._own(asked)
        count = await self._deliveries.redeliver_since(
            webhook, _moment(asked.body["since"]), status=asked.body.get("status")
        )
        return RestReply({"webhook_id": webhook.id, "redelivering": count}, status=202)

    async def test(self, asked: RestRequest) -> RestReply:
        webhook = await self._own(asked)
        network = self._networks.get(webhook.network)
        if network is None:
            raise NotFound("the webhook's network is not configured any more")
        event_id = await self._deliveries.test(webhook, network, event_type=asked.body.get("event_type"))
        event_type = asked.body.get("event_type") or webhook.event_type
        return RestReply({"webhook_id": webhook.id, "event_id": event_id, "event_type": event_type}, status=202)


def _shown(found: Delivery) -> dict[str, Any]:
    return {
        "event_id": found.event_id,
        "event_type": found.type,
        "status": _WORDS[found.state],
        "test": found.test,
        "block_number": found.block,
        "created_at": iso_millis(found.created_at),
        "next_attempt_at": iso_millis(found.due_at) if found.state in ("due", "over_quota") else None,
        "finished_at": None if found.finished_at is None else iso_millis(found.finished_at),
        "attempts": [_attempt(each) for each in found.attempts],
    }


def _attempt(found: Attempt) -> dict[str, Any]:
    return {
        "number": found.number,
        "started_at": iso_millis(found.began_at),
        "duration_ms": found.took_ms,
        "outcome": found.outcome,
        "status_code": found.status,
        "response_excerpt": found.excerpt,
    }


def _moment(text: str) -> datetime.datetime:
    """A time with its zone. The contract has checked its form, which allows for a few that there are not."""
    try:
        return datetime.datetime.fromisoformat(text).astimezone(datetime.UTC)
    except (ValueError, OverflowError):
        raise InvalidRequest(f"since: there is no such time as {text[:40]}") from None
