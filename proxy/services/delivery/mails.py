"""Send mails to account holders: changes of their webhooks, and alerts.

The mails are queued in Postgres, in the transaction of the change that they report. Each is sent until the mail server
accepts it, for about a day, and keeps its message id.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from proxy.core import alerts
from proxy.core.dashboard_links import page_link
from proxy.errors import Unavailable
from proxy.store.postgres.alerts import EVENT_TYPES
from proxy.store.postgres.bad_rows import BadRows
from proxy.store.postgres.mails import MailStore, QueuedMail
from proxy.tasks import is_cancelled, until_set
from proxy.wire.mailer import Mailer, OutgoingMail, Undelivered

log = logging.getLogger("penstock.mail")

# Facts that are links to the dashboard.
LINKS = ("Deliveries", "See")
MailFacts = Iterable[tuple[str, Any]]
ALERTS_PAGE = alerts.page_of("test", "")
# Seconds between attempts: long enough for a mail server that is down overnight.
RETRY_S = (30.0, 300.0, 1800.0, 7200.0, 21600.0, 43200.0)
# How often to check the queue, and the shortest pause between two checks.
CHECK_S, SOON_S = 5.0, 0.05


class Mails:
    def __init__(
        self,
        store: MailStore,
        mailer: Mailer,
        *,
        dashboard_url: str = "",
        retry_s: tuple[float, ...] = RETRY_S,
        check_s: float = CHECK_S,
    ) -> None:
        """`dashboard_url`: the public URL that links in mails start with; without one they have no links."""
        self._dashboard_url = dashboard_url
        self._store = store
        self._mailer = mailer
        self._retry_s = retry_s
        self._check_s = check_s
        self._bad = BadRows("mail")
        self._stop = asyncio.Event()
        self._stopped = asyncio.Event()
        self._stopped.set()

    def __repr__(self) -> str:
        return f"<Mails {self._mailer!r}>"

    async def run(self) -> None:
        """Supervised loop."""
        self._stopped.clear()
        try:
            # Before Python 3.12 `asyncio.wait_for`, which the SMTP library uses, may swallow a cancellation.
            while not self._stop.is_set() and not is_cancelled():
                await until_set(self._stop, within_s=await self._run_once())
        finally:
            self._stopped.set()

    async def drain(self) -> None:
        """Start no more mails, and wait until those being sent are recorded, so that they are not sent twice."""
        self._stop.set()
        await self._stopped.wait()

    async def _run_once(self) -> float:
        """Send the mails that are due and return the seconds until the next check."""
        try:
            await self.send_due()
            next_s = await self._store.next_s(KINDS)
        except Unavailable:
            return self._check_s
        return self._check_s if next_s is None else min(max(next_s, SOON_S), self._check_s)

    async def send_due(self) -> None:
        for mail in await self._store.claim(KINDS):
            if not await self._bad.attempt(self._send(mail), mail=mail.id):
                await self._store.finish(mail.id, sent=False)

    async def _send(self, mail: QueuedMail) -> None:
        outgoing = _WRITERS[mail.kind](mail, self._dashboard_url)
        try:
            await self._mailer.send(outgoing, at=time.time())
        except Undelivered as exc:
            if not exc.final and mail.tries <= len(self._retry_s):
                log.warning("cannot send a mail yet", extra={"mail": mail.id, "reason": str(exc)})
                await self._store.postpone(mail.id, self._retry_s[mail.tries - 1])
                return
            log.error("gave up sending a mail", extra={"mail": mail.id, "reason": str(exc)})
            await self._store.finish(mail.id, sent=False)
            return
        await self._store.finish(mail.id, sent=True)


def webhook_stopped(mail: QueuedMail, dashboard_url: str) -> OutgoingMail:
    """A webhook was paused because all retries of a delivery failed, or disabled because its receiver replied 410.

    `dashboard_url`: see `Mails`."""
    about = mail.about
    is_for_alerts = about["event_type"] in EVENT_TYPES.values()
    # Mails queued by earlier versions have no cause: they are about pauses.
    state, story = _gone(about) if about.get("cause") == "gone" else _exhausted(about)
    facts = {
        "Webhook": about["webhook"],
        "URL": about["url"],
        "Events": "alerts" if is_for_alerts else f"{about['event_type']} on {about['network']}",
        "Failed event": about["event"],
        "Attempts": about["attempts"],
        state.capitalize(): mail.created_at.strftime("%Y-%m-%d %H:%M:%S UTC"),
    }
    if link := page_link(dashboard_url, ALERTS_PAGE if is_for_alerts else f"#/webhooks/{about['webhook']}"):
        facts["Deliveries"] = link
    why, consequence = story
    opening = [f"Hello {mail.name},", why]
    closing = [
        consequence,
        "To resume it, fix the receiver, then "
        + (
            "save its URL under Alerts again."
            if is_for_alerts
            else f"choose Resume in the dashboard or send POST /v1/webhooks/{about['webhook']}/resume."
        ),
        "Penstock",
    ]
    return OutgoingMail(
        id=f"mail-{mail.id}-{mail.created_at.timestamp():.0f}",
        to=mail.email,
        subject=f"Webhook {about['webhook']} is {state}",
        text=_text(opening, facts.items(), closing),
        html=_html(opening, facts.items(), closing),
    )


def _exhausted(about: Mapping[str, Any]) -> tuple[str, tuple[str, str]]:
    """The webhook's new state, why it has it, and the consequence."""
    reason = f"it replied with status {about['status']}" if about["status"] else _REASONS[about["outcome"]]
    return "paused", (
        f"We paused one of your webhooks because its receiver failed {about['attempts']} times to accept an event. "
        f"On the last attempt {reason}.",
        "New events are stored while the webhook is paused and are delivered when you resume it. Resume it soon: stored "
        "events are deleted after the retention period of the service.",
    )


def _gone(about: Mapping[str, Any]) -> tuple[str, tuple[str, str]]:
    return "disabled", (
        "We disabled one of your webhooks because its receiver replied with status 410 (Gone), which means that it is gone "
        "for good.",
        "No events are recorded while the webhook is disabled. Those that were waiting are delivered if you resume it soon.",
    )


def alerts_raised(mail: QueuedMail, dashboard_url: str) -> OutgoingMail:
    """Alerts of an account that were raised at the same time, each with its figures and a link."""
    raised, more = mail.about["alerts"], mail.about["more"]
    titles = [alerts.title_of(each["kind"], each["threshold"], each["subject"], each["about"]) for each in raised]
    facts: list[tuple[str, Any]] = []
    for title, each in zip(titles, raised, strict=True):
        facts += [("Alert", title)] if len(raised) > 1 else []
        facts += alerts.facts_of(each["kind"], each["about"]).items()
        link = page_link(dashboard_url, alerts.page_of(each["kind"], each["subject"]))
        facts += [("See", link)] if link else []
    others = len(raised) + more - 1
    opening = [f"Hello {mail.name},", "These alerts of your account were raised:" if others else f"{titles[0]}."]
    closing = [f"There are {more} more."] if more else []
    closing += ["You can choose which alerts you get in the dashboard, under Alerts.", "Penstock"]
    return OutgoingMail(
        id=f"mail-{mail.id}-{mail.created_at.timestamp():.0f}",
        to=mail.email,
        subject=titles[0] + (f", and {others} more" if others else ""),
        text=_text(opening, facts, closing),
        html=_html(opening, facts, closing),
    )


def _text(opening: Sequence[str], facts: MailFacts, closing: Sequence[str]) -> str:
    table = "\n".join(f"{name}: {value}" for name, value in facts)
    return "\n\n".join([*opening, table, *closing]) + "\n"


def _html(opening: Sequence[str], facts: MailFacts, closing: Sequence[str]) -> str:
    rows = "".join(f"<tr><td><b>{escape(name)}</b></td><td>{_cell(name, value)}</td></tr>" for name, value in facts)
    return (
        '<!doctype html><html><body style="font-family: sans-serif">'
        f"{_paragraphs(opening)}<table cellpadding=4>{rows}</table>{_paragraphs(closing)}</body></html>"
    )


def _cell(name: str, value: Any) -> str:
    """The link to the dashboard as a link; anything else, such as the receiver's URL, as text."""
    text = escape(str(value))
    return f'<a href="{text}">{text}</a>' if name in LINKS else text


def _paragraphs(texts: Sequence[str]) -> str:
    return "".join(f"<p>{escape(each)}</p>" for each in texts)


# Why an attempt without a status failed, by outcome.
_REASONS = {
    "answered": "it replied without a status",
    "timeout": "it did not reply in time",
    "unreachable": "it could not be reached",
    "reset": "it closed the connection",
    "refused": "its address was not allowed",
    "invalid": "its reply was not valid HTTP",
}
_WRITERS: dict[str, Callable[[QueuedMail, str], OutgoingMail]] = {
    "webhook_paused": webhook_stopped,
    "alert": alerts_raised,
}
KINDS = tuple(_WRITERS)
