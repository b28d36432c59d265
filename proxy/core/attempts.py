"""The consequences of a delivery attempt: the delivery ends or gets its next due time, and sometimes its webhook changes too.

Only a 2xx counts as success. Everything else is retried on the format's schedule (specification, section 6), or later if the
receiver asks for it. In Format B, 410 means that the receiver is gone for good; Format A retries every status that is no 2xx.
After the last retry the formats differ: A pauses the webhook and keeps the event until it is resumed, B drops the event. A test
delivery is tried once, and its failure does not affect the webhook.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Format = Literal["A", "B"]
DeliveryState = Literal["due", "parked", "delivered", "failed"]
# The webhook's transition, as in core/lifecycle.
WebhookEnd = Literal["exhaust", "gone"]

MINUTE, HOUR, DAY = 60, 3600, 86400
# Seconds from each failed attempt to the next. A failure of the last attempt ends the delivery.
SCHEDULES: dict[Format, tuple[int, ...]] = {
    "A": (10, 1 * MINUTE, 10 * MINUTE, 1 * HOUR, 6 * HOUR),
    "B": (1, 5, 30, 5 * MINUTE, 30 * MINUTE, 2 * HOUR, 8 * HOUR),
}
# The longest pause that a receiver may ask for.
LONGEST_S = 1 * DAY


class AttemptVerdict(NamedTuple):
    """The delivery's next state. `tries`: how often it failed in this round. `again_s`: when it is due again, from now."""

    state: DeliveryState
    tries: int = 0
    again_s: float | None = None
    cause: WebhookEnd | None = None


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
    """After an attempt. `tries`: failures before it. `status`: None without a reply. `wait_s`: the receiver's Retry-After."""
    if is_delivered(status):
        return AttemptVerdict("delivered", tries)
    failures = tries + 1
    if test:
        return AttemptVerdict("failed", failures)
    if status == 410 and form == "B":
        return AttemptVerdict("failed", failures, cause="gone")
    again_s = pause_s(form, failures, wait_s=wait_s, schedule=schedule)
    if again_s is not None:
        return AttemptVerdict("due", failures, again_s)
    return AttemptVerdict("parked", 0, cause="exhaust") if form == "A" else AttemptVerdict("failed", failures)


def pause_s(
    form: Format, failures: int, *, wait_s: float = 0.0, schedule: tuple[float, ...] | None = None
) -> float | None:
    """Seconds until the next attempt, after this many failures; None after the last. At least the receiver's Retry-After."""
    delays = SCHEDULES[form] if schedule is None else schedule
    return max(delays[failures - 1], min(wait_s, LONGEST_S)) if failures <= len(delays) else None


def format_of(event_type: str) -> Format:
    """The case of an event type picks the format, its headers and its schedule."""
    return "A" if event_type.islower() else "B"
