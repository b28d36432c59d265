"""/webhooks/{id}/deliveries, redeliver and test: the history of deliveries, and sending events again."""

from __future__ import annotations

import datetime
from collections.abc import Awaitable, Callable
from typing import Any

from proxy.core.attempts import is_delivered
from proxy.core.iso_time import iso_millis
from proxy.errors import InvalidRequest, NotFound
from proxy.services.delivery.history import STATES, Attempt, Delivery, DeliveryHistory, Webhook, WebhookHealth
from proxy.web.rest.endpoint import RestHandler, RestReply, RestRequest

# A webhook is failing if none of its last attempts, up to this many, was delivered.
FAILING_AFTER = 5
_WORDS = {state: word for word, state in STATES.items()}


class DeliveryHandlers:
    def __init__(self, deliveries: DeliveryHistory, own: Callable[[RestRequest], Awaitable[Webhook]]) -> None:
        """`own`: returns the webhook that the path names, if it belongs to the caller."""
        self._deliveries = deliveries
        self._own = own

    def handlers(self) -> dict[str, RestHandler]:
        return {
            "list_deliveries": self.list,
            "read_delivery": self.read,
            "redeliver_event": self.redeliver,
            "redeliver_since": self.redeliver_since,
            "test_webhook": self.test,
        }

    async def list(self, request: RestRequest) -> dict[str, Any]:
        webhook = await self._own(request)
        given = request.query["since"]
        since = None if given is None else _moment(given)
        deliveries, total = await self._deliveries.page(
            webhook, request.page, status=request.query["status"], since=since
        )
        return request.listed("deliveries", [_shown(each) for each in deliveries], total)

    async def read(self, request: RestRequest) -> dict[str, Any]:
        webhook = await self._own(request)
        delivery = await self._deliveries.read(webhook, request.path["event_id"])
        attempts = [{**_attempt(each), **_exchange(each)} for each in delivery.attempts]
        return {**_shown(delivery), "payload": delivery.body.decode(), "attempts": attempts}

    async def redeliver(self, request: RestRequest) -> RestReply:
        webhook = await self._own(request)
        event_id = request.path["event_id"]
        await self._deliveries.redeliver(webhook, event_id)
        status = "pending" if webhook.status == "active" else "parked"
        return RestReply({"webhook_id": webhook.id, "event_id": event_id, "status": status}, status=202)

    async def redeliver_since(self, request: RestRequest) -> RestReply:
        webhook = await self._own(request)
        count = await self._deliveries.redeliver_since(
            webhook, _moment(request.body["since"]), status=request.body.get("status")
        )
        return RestReply({"webhook_id": webhook.id, "redelivering": count}, status=202)

    async def test(self, request: RestRequest) -> RestReply:
        webhook = await self._own(request)
        network = request.resolver.configured(webhook.network)
        if network is None:
            raise NotFound("the webhook's network is no longer configured")
        event_id = await self._deliveries.test(webhook, network, event_type=request.body.get("event_type"))
        event_type = request.body.get("event_type") or webhook.event_type
        return RestReply({"webhook_id": webhook.id, "event_id": event_id, "event_type": event_type}, status=202)


def _shown(delivery: Delivery) -> dict[str, Any]:
    return {
        "event_id": delivery.event_id,
        "event_type": delivery.type,
        "status": _WORDS[delivery.state],
        "test": delivery.test,
        "block_number": delivery.block,
        "created_at": iso_millis(delivery.created_at),
        "next_attempt_at": iso_millis(delivery.due_at) if delivery.state in ("due", "over_quota") else None,
        "finished_at": None if delivery.finished_at is None else iso_millis(delivery.finished_at),
        "attempts": [_attempt(each) for each in delivery.attempts],
    }


def _attempt(attempt: Attempt) -> dict[str, Any]:
    return {
        "number": attempt.number,
        "started_at": iso_millis(attempt.began_at),
        "duration_ms": attempt.took_ms,
        "outcome": attempt.outcome,
        "status_code": attempt.status,
        "response_excerpt": attempt.excerpt,
    }


def _exchange(attempt: Attempt) -> dict[str, Any]:
    """The recorded exchange of an attempt: null for what was not sent or not received."""
    return {
        "request_headers": attempt.sent or None,
        "response_headers": attempt.reply_headers or None,
        "response_body": None if attempt.status is None else attempt.reply_body,
    }


def shown_health(health: WebhookHealth) -> dict[str, Any]:
    """The rate of success of the last attempts, the last failure, every attempt for a small chart, and the day's events."""
    failed = [each for each in health.attempts if not is_delivered(each.status)]
    count = len(health.attempts)
    return {
        "success_rate": None if not count else round((count - len(failed)) / count, 4),
        "failing": count > 0 and not any(is_delivered(each.status) for each in health.attempts[-FAILING_AFTER:]),
        "last_failure": _attempt(failed[-1]) if failed else None,
        "recent": [{"duration_ms": each.took_ms, "delivered": is_delivered(each.status)} for each in health.attempts],
        "events_last_day": health.events,
    }


def _moment(text: str) -> datetime.datetime:
    """Parse a time with its zone. The API spec has validated the form, which also admits some times that do not exist."""
    try:
        return datetime.datetime.fromisoformat(text).astimezone(datetime.UTC)
    except (ValueError, OverflowError):
        raise InvalidRequest(f"since: {text[:40]} is not a valid time", param="since") from None
