"""Mails to the members of an account, sent in the background. Their links are stored only as digests, so the mails cannot be
queued in Postgres. A worker holds and retries them itself while their reader may be waiting, and sends them before it ends.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable

from proxy.errors import Unavailable
from proxy.tasks import Tasks, until_set
from proxy.wire.mailer import Mailer, OutgoingMail, Undelivered

log = logging.getLogger("penstock.sessions")

# Seconds between attempts: soon, because a person waits for the mail. With the time that attempts take, the last one is well
# before a sign-in link expires (`dashboard.link_s`).
RETRY_S = (2.0, 10.0, 30.0, 120.0)


class AccountMails:
    def __init__(self, mailer: Mailer, tasks: Tasks, *, retry_s: tuple[float, ...] = RETRY_S) -> None:
        self._mailer = mailer
        self._tasks = tasks
        self._retry_s = retry_s
        self._open = 0
        self._stop = asyncio.Event()
        self._all_ended = asyncio.Event()
        self._all_ended.set()

    def __repr__(self) -> str:
        return f"<AccountMails {self._mailer!r}>"

    @property
    def is_configured(self) -> bool:
        return self._mailer.is_configured

    def send(self, to: str, subject: str, text: str) -> None:
        mail = OutgoingMail(id=f"account-{secrets.token_hex(8)}", to=to, subject=subject, text=text)

        async def written() -> OutgoingMail:
            return mail

        self.write_and_send(written, what=f"mail '{subject}'")

    def write_and_send(self, write: Callable[[], Awaitable[OutgoingMail | None]], *, what: str) -> None:
        """Send the mail that `write` returns, if any, in the background.

        Returns at once: neither the time nor a failure may reveal anything about the address. `what`: the mail, in the log.
        """
        self._open += 1
        self._all_ended.clear()
        self._tasks.start_once("mail", lambda: self._write_and_send(write, what), of=secrets.token_hex(8))

    async def drain(self, within_s: float) -> None:
        """Wait until the mails are sent. Those that wait for another attempt get it at once, as their last one."""
        self._stop.set()
        if not await until_set(self._all_ended, within_s=within_s):
            log.warning("mails not sent before the worker's end", extra={"mails": self._open})

    async def _write_and_send(self, write: Callable[[], Awaitable[OutgoingMail | None]], what: str) -> None:
        try:
            await self._attempts(write, what)
        finally:
            self._open -= 1
            if not self._open:
                self._all_ended.set()

    async def _attempts(self, write: Callable[[], Awaitable[OutgoingMail | None]], what: str) -> None:
        mail: OutgoingMail | None = None
        for pause_s in (*self._retry_s, None):
            # An attempt that was under way when the worker began to stop is followed by a last one.
            is_last = self._stop.is_set()
            try:
                # Written once: a retry has the same link and message id.
                mail = mail or await write()
                if mail is not None:
                    await self._mailer.send(mail, at=time.time())
                return
            except (Unavailable, Undelivered) as exc:
                if pause_s is None or is_last or (isinstance(exc, Undelivered) and exc.final):
                    log.warning(f"{what} not sent", extra={"reason": str(exc)})
                    return
                log.warning(f"cannot send {what} yet", extra={"reason": str(exc), "again_in_s": pause_s})
            except Exception:
                # Do not let it propagate, nor retry it: its client may have caused it.
                log.exception(f"{what} not sent")
                return
            await until_set(self._stop, within_s=pause_s)
