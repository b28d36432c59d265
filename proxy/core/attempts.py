"""The consequences of a delivery attempt: the delivery ends or gets its next due time, and sometimes its webhook changes too.

Only a 2xx counts as success. 410 means that the receiver is gone for good. Everything else is retried on the format's
schedule. After the last retry the formats differ: A pauses the webhook and keeps the event until it is resumed, B drops
the event. A test delivery is tried once, and its failure does not affect the webhook.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from proxy.core import retries
from proxy.core.retries import Format

DeliveryState = Literal["due", "parked", "delivered", "failed"]
# The webhook's transition, as in core/lifecycle.
WebhookEnd = Literal["exhaust", "gone"]


class AttemptVerdict(NamedTuple):
    """The delivery's next state. `tries`: how often it failed in this round. `again_s`: when it is due again, from now."""

    state: DeliveryState
    tries: int = 0
    again_s: float | None = None
    cause: WebhookEnd | None = None


DELIVERED = AttemptVerdict("delivered")


def is_delivered(status: int | None) -> bool:
    return status is not None and 200 <= status < 300


def judge(
    form: Format,
    tries: int,
    status: int | None,
    *,
    wait_s: float = 0.0,
    test: bool = False,
    schedule: tuple[float, ...] | None = None,
) -> AttemptVerdict:
    """After an attempt. `tries`: failures before it. `status`: None without a reply. `wait_s`: what the receiver asked for."""
    if is_delivered(status):
        return AttemptVerdict("delivered", tries)
    failures = tries + 1
    if test:
        return AttemptVerdict("failed", failures)
    if status == 410:
        return AttemptVerdict("failed", failures, cause="gone")
    again_s = retries.next_due(form, failures, 0.0, after_s=wait_s, schedule=schedule)
    if again_s is not None:
        return AttemptVerdict("due", failures, again_s)
    return AttemptVerdict("parked", 0, cause="exhaust") if form == "A" else AttemptVerdict("failed", failures)
