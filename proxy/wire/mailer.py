"""Sending mail by SMTP. Without an SMTP server, mail is written to the log."""

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
    """`id` becomes the Message-ID, so that duplicates can be recognised."""

    id: str
    to: str
    subject: str
    text: str
    html: str = ""


class Undelivered(Exception):
    """The server did not accept the mail. `final`: it never will."""

    def __init__(self, reason: str, *, final: bool) -> None:
        super().__init__(reason)
        self.final = final


class Mailer:
    def __init__(self, settings: MailSettings) -> None:
        self._settings = settings

    def __repr__(self) -> str:
        return f"<Mailer {self._settings.host or 'to the log'}>"

    @property
    def is_configured(self) -> bool:
        return bool(self._settings.host)

    async def send(self, mail: OutgoingMail, *, at: float) -> None:
        """Returns when the server has accepted the mail."""
        if not self.is_configured:
            log.warning("mail not sent: no SMTP server is configured (mail.host)", extra={"mail": mail.text})
            return
        try:
            await self._send(self._message(mail, at))
        except aiosmtplib.SMTPResponseException as exc:
            # RFC 5321, 4.2.1: 5yz is a permanent refusal. A refused password is not final: the operator can correct it.
            is_final = 500 <= exc.code < 600 and not isinstance(exc, aiosmtplib.SMTPAuthenticationError)
            raise Undelivered(f"the server replied {exc.code}", final=is_final) from None
        except aiosmtplib.SMTPRecipientsRefused as exc:
            is_final = all(500 <= refused.code < 600 for refused in exc.recipients)
            raise Undelivered("the server refused the address", final=is_final) from None
        except (aiosmtplib.SMTPException, OSError, TimeoutError) as exc:
            raise Undelivered(type(exc).__name__, final=False) from None
        except ValueError:
            raise Undelivered("the address is not valid", final=True) from None

    def _message(self, mail: OutgoingMail, at: float) -> EmailMessage:
        message = EmailMessage()
        message["From"] = self._settings.sender
        message["To"] = mail.to
        message["Subject"] = mail.subject
        message["Date"] = formatdate(at)
        message["Message-ID"] = f"<{mail.id}@{self._settings.sender.rpartition('@')[2].rstrip('>')}>"
        # RFC 3834, 5: prevents automatic replies.
        message["Auto-Submitted"] = "auto-generated"
        message.set_content(mail.text)
        if mail.html:
            message.add_alternative(mail.html, subtype="html")
        return message

    async def try_connection(self) -> None:
        """Connect and log in without sending a mail. Raises Undelivered with the reason."""
        try:
            async with self._connection():
                pass
        except aiosmtplib.SMTPAuthenticationError as exc:
            raise Undelivered(f"the server refused mail.username and mail.password ({exc.code})", final=False) from None
        except (aiosmtplib.SMTPException, OSError, TimeoutError) as exc:
            raise Undelivered(str(exc) or type(exc).__name__, final=False) from None

    async def _send(self, message: EmailMessage) -> None:
        async with self._connection() as connection:
            await connection.send_message(message)

    def _connection(self) -> aiosmtplib.SMTP:
        given = self._settings
        return aiosmtplib.SMTP(
            hostname=given.host,
            port=given.port,
            username=given.username or None,
            password=given.password or None,
            use_tls=given.security == "tls",
            start_tls=given.security == "starttls",
            timeout=given.timeout_s,
        )
