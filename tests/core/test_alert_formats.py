"""Alerts as messages of Slack and as events of PagerDuty."""

from __future__ import annotations

import orjson
import pytest

from proxy.core.alert_formats import pagerduty_body, slack_body, with_routing_key
from proxy.core.alerts import Alert


def test_names_cannot_mention_a_channel() -> None:
    about = {"policy": "<!channel> & co", "used_usd": "1.00", "limit_usd": "2.00"}
    alert = Alert("policy_budget", 50, "always", "pol_1", about)
    body = slack_body(alert, "50 % of the budget of policy <!channel> & co is spent", "")
    assert b"<!" not in body
    assert "&lt;!channel&gt; &amp; co" in orjson.loads(body)["text"]


def test_long_texts_are_cut_to_what_the_services_take() -> None:
    alert = Alert("webhook_paused", 0, "now", "wh_1", {"url": "x" * 9000, "state": "paused"})
    message = orjson.loads(slack_body(alert, "y" * 9000, "https://penstock.example/dashboard"))
    assert max(len(each["text"]["text"]) for each in message["blocks"] if "text" in each) <= 3000
    assert len(message["blocks"][1]["fields"][0]["text"]) <= 2000
    event = orjson.loads(pagerduty_body(alert, "y" * 9000, "", event_id="evt_1", at="2026-01-15T09:30:00Z"))
    assert len(event["payload"]["summary"]) == 1024
    assert "links" not in event


@pytest.mark.parametrize(
    ("kind", "threshold", "severity"),
    [("day_usage", 90, "warning"), ("day_usage", 100, "error"), ("webhook_paused", 0, "error"), ("test", 0, "info")],
)
def test_severity_follows_the_threshold(kind: str, threshold: int, severity: str) -> None:
    alert = Alert(kind, threshold, "2026-01-15", about={"state": "paused"})
    event = orjson.loads(pagerduty_body(alert, "title", "", event_id="evt_1", at="2026-01-15T09:30:00Z"))
    assert event["payload"]["severity"] == severity


def test_routing_key_is_added_when_an_event_is_sent() -> None:
    assert orjson.loads(with_routing_key(b'{"event_action":"trigger"}', "abc")) == {
        "routing_key": "abc",
        "event_action": "trigger",
    }
