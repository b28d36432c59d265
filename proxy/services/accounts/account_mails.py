"""Mails to the members of an account, each sent at most once, in the background. Their links are stored only as digests, so the
mails cannot be queued in Postgres."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Awaitable, Callable

from proxy.errors import Unavailable
from proxy.tasks import Tasks
from proxy.wire.mailer import Mailer, OutgoingMail, Undelivered

log = logging.getLogger("penstock.sessions")


class AccountMails:
    def __init__(self, mailer: Mailer, tasks: Tasks) -> None:
        self._mailer = mailer
        self._tasks = tasks

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
        self._tasks.start_once("mail", lambda: self._write_and_send(write, what), of=secrets.token_hex(8))

    async def _write_and_send(self, write: Callable[[], Awaitable[OutgoingMail | None]], what: str) -> None:
        try:
            mail = await write()
            if mail is not None:
                await self._mailer.send(mail, at=time.time())
        except (Unavailable, Undelivered) as exc:
            log.warning(f"{what} not sent", extra={"reason": str(exc)})
        except Exception:
            # Do not let it propagate: a supervised task that raises is restarted, and this mail is sent at most once.
            log.exception(f"{what} not sent")
