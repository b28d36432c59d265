"""Letters by SMTP; where none is configured, a line in the log."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from email.message import EmailMessage
from email.utils import formatdate

import aiosmtplib

from proxy.settings import MailSettings

log = logging.getLogger("penstock.mail")


@dataclass(frozen=True, slots=True)
class OutgoingMail:
    """`id` names it: who gets it twice can tell."""

    id: str
    to: str
    subject: str
    text: str
    html: str


class Undelivered(Exception):
    """The server did not take it. `final`: it never will."""

    def __init__(self, reason: str, *, final: bool) -> None:
        super().__init__(reason)
        self.final = final


class Mailer:
    def __init__(self, settings: MailSettings) -> None:
        self._settings = settings

    def __repr__(self) -> str:
        return f"<Mailer {self._settings.host or 'to the log'}>"

    async def send(self, letter: OutgoingMail, *, at: float) -> None:
        """Returns when the server has taken it."""
        if not self._settings.host:
            log.warning("mail not sent: no SMTP server is configured (mail.host)", extra={"mail": letter.text})
            return
        try:
            await self._send(self._message(letter, at))
        except aiosmtplib.SMTPResponseException as exc:
            # RFC 5321, 4.2.1: 5yz is a permanent refusal; one of our password is the operator's to mend.
            is_final = 500 <= exc.code < 600 and not isinstance(exc, aiosmtplib.SMTPAuthenticationError)
            raise Undelivered(f"the server answered {exc.code}", final=is_final) from None
        except aiosmtplib.SMTPRecipientsRefused as exc:
            is_final = all(500 <= refused.code < 600 for refused in exc.recipients)
            raise Undelivered("the server refused the address", final=is_final) from None
        except (aiosmtplib.SMTPException, OSError, TimeoutError) as exc:
            raise Undelivered(type(exc).__name__, final=False) from None
        except ValueError:
            raise Undelivered("the address is not one", final=True) from None

    def _message(self, letter: OutgoingMail, at: float) -> EmailMessage:
        message = EmailMessage()
        message["From"] = self._settings.sender
        message["To"] = letter.to
        message["Subject"] = letter.subject
        message["Date"] = formatdate(at)
        message["Message-ID"] = f"<{letter.id}@{self._settings.sender.rpartition('@')[2].rstrip('>')}>"
        # RFC 3834, 5: so that nobody's holiday answers it.
        message["Auto-Submitted"] = "auto-generated"
        message.set_content(letter.text)
        message.add_alternative(letter.html, subtype="html")
        return message

    async def _send(self, message: EmailMessage) -> None:
        given = self._settings
        await aiosmtplib.send(
            message,
            hostname=given.host,
            port=given.port,
            username=given.username or None,
            password=given.password or None,
            use_tls=given.security == "tls",
            start_tls=given.security == "starttls",
            timeout=given.timeout_s,
        )
