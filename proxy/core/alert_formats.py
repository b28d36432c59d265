"""Alerts in the formats of services that receive them: Slack's incoming webhooks, and PagerDuty's Events API v2.

https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks/
https://developer.pagerduty.com/docs/send-alert-event
"""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

import msgspec

from proxy.core import alerts
from proxy.core.alerts import Alert

AlertFormat = Literal["json", "slack", "pagerduty"]
ALERT_FORMATS: Final[tuple[AlertFormat, ...]] = get_args(AlertFormat)
# PagerDuty's URL for events, except for accounts in its EU region.
PAGERDUTY_URL: Final = "https://events.pagerduty.com/v2/enqueue"
# "The maximum permitted length of this property is 1024 characters."
_MOST_SUMMARY: Final = 1024
# Slack: "Maximum length for the text in this field is 3000 characters", and "2000 characters" for each of "10" fields.
_MOST_TEXT, _MOST_FIELD = 3000, 2000
_SOURCE: Final = "penstock"


def slack_body(alert: Alert, title: str, link: str) -> bytes:
    """A message with a heading, the figures, and a link to the page that shows more. `link` may be empty."""
    text = _escaped(title)
    blocks: list[dict[str, Any]] = [_section(f"*{text}*")]
    if facts := alerts.facts_of(alert.kind, alert.about):
        fields = [_mrkdwn(f"*{_escaped(name)}*\n{_escaped(value)}", _MOST_FIELD) for name, value in facts.items()]
        blocks.append({"type": "section", "fields": fields})
    if link:
        blocks.append(_section(f"<{_escaped(link)}|Open the dashboard>"))
    return msgspec.json.encode({"text": f"Penstock: {text}"[:_MOST_TEXT], "blocks": blocks})


def pagerduty_body(alert: Alert, title: str, link: str, *, event_id: str, at: str) -> bytes:
    """An event that triggers an incident, without its routing key, which is added when it is sent. Repeated deliveries of an
    alert have the same `dedup_key`, and so are one incident."""
    event: dict[str, Any] = {
        "event_action": "trigger",
        "dedup_key": event_id,
        "payload": {
            "summary": title[:_MOST_SUMMARY],
            "source": _SOURCE,
            "severity": _severity(alert),
            "timestamp": at,
            "component": alert.subject or "account",
            "class": alert.kind,
            "custom_details": {**alert.about, "threshold": alert.threshold},
        },
        "client": "Penstock",
    }
    if link:
        event |= {"client_url": link, "links": [{"href": link, "text": "Open the dashboard"}]}
    return msgspec.json.encode(event)


def with_routing_key(body: bytes, routing_key: str) -> bytes:
    """`body`: one of `pagerduty_body`, which is an object with members."""
    return b'{"routing_key":%b,%b' % (msgspec.json.encode(routing_key), body[1:])


def _severity(alert: Alert) -> Literal["critical", "error", "warning", "info"]:
    """A limit that is used up stops work; the steps before it announce that."""
    if alert.kind == "test":
        return "info"
    return "error" if alert.threshold == 100 or alert.kind == "webhook_paused" else "warning"


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": _mrkdwn(text, _MOST_TEXT)}


def _mrkdwn(text: str, most: int) -> dict[str, str]:
    return {"type": "mrkdwn", "text": text[:most]}


def _escaped(text: str) -> str:
    """Slack's control characters, so that a name cannot mention a channel: "replace these characters with HTML entities"."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
