"""Tells the holders of accounts, by mail, what happened to what is theirs.

What is to be told stands in Postgres, written with what it tells of. Here it becomes a letter, and is sent until a server
takes it or the day is over. The same letter always has the same id.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from proxy.errors import Unavailable
from proxy.store.mails import MailStore, QueuedMail
from proxy.tasks import until_set
from proxy.wire.mailer import Mailer, OutgoingMail, Undelivered

log = logging.getLogger("penstock.mail")

# Seconds from one try to the next: a server that is away for a night is waited for.
AGAIN_S = (30.0, 300.0, 1800.0, 7200.0, 21600.0, 43200.0)
QUIET_S, SOON_S = 5.0, 0.05


class Mails:
    def __init__(
        self, store: MailStore, mailer: Mailer, *, again_s: tuple[float, ...] = AGAIN_S, quiet_s: float = QUIET_S
    ) -> None:
        self._store = store
        self._mailer = mailer
        self._again_s = again_s
        self._quiet_s = quiet_s
        self._stop = asyncio.Event()
        self._over = asyncio.Event()
        self._over.set()

    def __repr__(self) -> str:
        return f"<Mails {self._mailer!r}>"

    async def run(self) -> None:
        """A supervised loop."""
        self._over.clear()
        try:
            while not self._stop.is_set() and not _is_cancelled():
                await until_set(self._stop, within_s=await self._look())
        finally:
            self._over.set()

    async def drain(self) -> None:
        """Begin no more, and wait until what is being sent is written down: it need not be sent again."""
        self._stop.set()
        await self._over.wait()

    async def _look(self) -> float:
        """Send what is due. In how many seconds to look again."""
        try:
            await self.send_due()
            next_s = await self._store.next_s()
        except Unavailable:
            return self._quiet_s
        return self._quiet_s if next_s is None else min(max(next_s, SOON_S), self._quiet_s)

    async def send_due(self) -> None:
        for mail in await self._store.claim():
            await self._send(mail)

    async def _send(self, mail: QueuedMail) -> None:
        letter = _WRITTEN[mail.kind](mail)
        try:
            await self._mailer.send(letter, at=time.time())
        except Undelivered as exc:
            if not exc.final and mail.tries <= len(self._again_s):
                log.warning("mail not sent yet", extra={"mail": mail.id, "reason": str(exc)})
                await self._store.postpone(mail.id, self._again_s[mail.tries - 1])
                return
            log.error("mail given up", extra={"mail": mail.id, "reason": str(exc)})
            await self._store.finish(mail.id, sent=False)
            return
        await self._store.finish(mail.id, sent=True)


def _is_cancelled() -> bool:
    """The SMTP library waits by `asyncio.wait_for`, which before Python 3.12 may swallow that it was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def paused(mail: QueuedMail) -> OutgoingMail:
    """Every retry of a delivery failed."""
    about = mail.about
    ended = f"the reply was {about['status']}" if about["status"] else _WORDS.get(about["outcome"], about["outcome"])
    facts = {
        "Webhook": about["webhook"],
        "Address": about["url"],
        "Events": f"{about['event_type']} on {about['network']}",
        "Last event": f"{about['event']}, {about['attempts']} attempts; at the last one {ended}",
        "Paused at": mail.created_at.strftime("%Y-%m-%d %H:%M:%S UTC"),
    }
    first = "A webhook of your account is paused: every retry of a delivery failed."
    last = (
        "Nothing is lost: its events are kept, and delivered when you resume it. Mend the receiver, then send "
        f"POST /v1/webhooks/{about['webhook']}/resume, or PATCH it with the status active."
    )
    return OutgoingMail(
        id=f"mail-{mail.id}-{mail.created_at.timestamp():.0f}",
        to=mail.email,
        subject=f"Webhook {about['webhook']} is paused",
        text=f"{first}\n\n" + "\n".join(f"{name}: {value}" for name, value in facts.items()) + f"\n\n{last}\n",
        html=_page(first, facts, last),
    )


def _page(first: str, facts: Mapping[str, Any], last: str) -> str:
    rows = "".join(
        f"<tr><td><b>{escape(name)}</b></td><td>{escape(str(value))}</td></tr>" for name, value in facts.items()
    )
    return (
        '<!doctype html><html><body style="font-family: sans-serif">'
        f"<p>{escape(first)}</p><table cellpadding=4>{rows}</table><p>{escape(last)}</p></body></html>"
    )


_WORDS = {
    "timeout": "no reply came in time",
    "unreachable": "the receiver could not be reached",
    "reset": "the receiver closed the connection",
    "refused": "its address may not be reached",
    "invalid": "the reply was no HTTP",
}
_WRITTEN: dict[str, Callable[[QueuedMail], OutgoingMail]] = {"webhook_paused": paused}
