"""The states of webhooks against the specification's own table (section 3)."""

from __future__ import annotations

import pytest

from proxy.core import lifecycle
from proxy.core.lifecycle import TRANSITIONS, WebhookState, WebhookTrigger

# State, what moves it, next state: line by line. "any" is each of the three.
SPECIFIED: list[tuple[WebhookState | None, WebhookTrigger, WebhookState]] = [
    (None, "create", "active"),
    ("active", "pause", "paused"),
    ("paused", "activate", "active"),
    ("active", "exhaust", "paused"),
    ("paused", "resume", "active"),
    ("active", "delete", "removed"),
    ("paused", "delete", "removed"),
    ("disabled", "delete", "removed"),
]
# Transitions that the specification leaves open: into or out of `disabled`.
OURS: list[tuple[WebhookState | None, WebhookTrigger, WebhookState]] = [
    ("active", "gone", "disabled"),
    ("paused", "gone", "disabled"),
    ("active", "disable", "disabled"),
    ("paused", "disable", "disabled"),
    ("disabled", "resume", "active"),
    ("disabled", "enable", "active"),
]


def test_table_is_the_specifications_and_what_it_leaves_open() -> None:
    assert [(state, cause, after) for (state, cause), after in TRANSITIONS.items()] == SPECIFIED + OURS


@pytest.mark.parametrize(("state", "cause", "after"), SPECIFIED + OURS)
def test_webhook_moves_by_the_table(state: WebhookState | None, cause: WebhookTrigger, after: WebhookState) -> None:
    assert lifecycle.after(state, cause) == after


@pytest.mark.parametrize(
    ("state", "cause"), [("active", "activate"), ("paused", "pause"), ("paused", "exhaust"), ("disabled", "gone")]
)
def test_trigger_of_the_current_state_changes_nothing(state: WebhookState, cause: WebhookTrigger) -> None:
    assert lifecycle.after(state, cause) == state


@pytest.mark.parametrize("cause", ["pause", "activate", "exhaust"])
def test_nothing_but_the_dashboard_and_the_operator_leads_out_of_disabled(cause: WebhookTrigger) -> None:
    assert lifecycle.after("disabled", cause) is None


def test_nothing_follows_on_removal() -> None:
    assert not [cause for (state, cause) in TRANSITIONS if state == "removed"]
    assert lifecycle.after("removed", "activate") is None
