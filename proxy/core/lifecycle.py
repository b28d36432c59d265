"""The states of a webhook and their transitions: the whole table.

The first half is the specification's (section 3), which leaves `disabled` open: a Format B receiver that returns 410 is
gone for good, and an operator may disable any webhook. Only the dashboard and the operator can leave that state. A transition
that is not in the table does not happen.
"""

from __future__ import annotations

from typing import Literal

WebhookState = Literal["active", "paused", "disabled", "removed"]
WebhookTrigger = Literal[
    "create",  # POST /webhooks
    "pause",  # PATCH with status paused
    "activate",  # PATCH with status active
    "exhaust",  # all scheduled retries of a delivery failed
    "resume",  # from the dashboard
    "gone",  # the receiver answered 410 (Format B)
    "disable",  # the operator
    "enable",  # the operator
    "delete",  # DELETE /webhooks/{id}
]

TRANSITIONS: dict[tuple[WebhookState | None, WebhookTrigger], WebhookState] = {
    (None, "create"): "active",
    ("active", "pause"): "paused",
    ("paused", "activate"): "active",
    ("active", "exhaust"): "paused",
    ("paused", "resume"): "active",
    ("active", "delete"): "removed",
    ("paused", "delete"): "removed",
    ("disabled", "delete"): "removed",
    ("active", "gone"): "disabled",
    ("paused", "gone"): "disabled",
    ("active", "disable"): "disabled",
    ("paused", "disable"): "disabled",
    ("disabled", "resume"): "active",
    ("disabled", "enable"): "active",
}
# A request for the current state changes nothing.
_ALREADY: dict[tuple[WebhookState | None, WebhookTrigger], WebhookState] = {
    ("active", "activate"): "active",
    ("active", "resume"): "active",
    ("active", "enable"): "active",
    ("paused", "pause"): "paused",
    ("paused", "exhaust"): "paused",
    ("disabled", "gone"): "disabled",
    ("disabled", "disable"): "disabled",
}


def after(state: WebhookState | None, cause: WebhookTrigger) -> WebhookState | None:
    """The next state; None if the transition does not exist."""
    next_state = TRANSITIONS.get((state, cause))
    return next_state if next_state is not None else _ALREADY.get((state, cause))
