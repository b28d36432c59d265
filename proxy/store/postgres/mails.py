"""The email queue in Postgres. A mail is added in the transaction of the change it reports, and sent afterwards."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from proxy.store.postgres import sql
from proxy.store.postgres.json_text import json_text
from proxy.store.postgres.pool import PATIENT_S, DatabaseConnection, Pool

# Longer than sending takes; after a crash the mail is sent again.
LEASE_S = 120.0
AT_ONCE = 10


@dataclass(frozen=True, slots=True)
class QueuedMail:
    """An email to an account's holder. `tries`: how often it was claimed, including this time."""

    id: int
    kind: str
    about_text: str
    tries: int
    name: str
    email: str
    created_at: datetime.datetime

    @property
    def about(self) -> Mapping[str, Any]:
        """Read late: a text that cannot be read must not keep other mails from being claimed."""
        about: Mapping[str, Any] = orjson.loads(self.about_text)
        return about


class MailStore:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __repr__(self) -> str:
        return f"<MailStore {self._pool!r}>"

    async def claim(self, kinds: Sequence[str]) -> list[QueuedMail]:
        """Claim due mails of these kinds. Kinds that only a later version knows are left for its senders."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            rows = await connection.fetch(sql.mails.claim, LEASE_S, AT_ONCE, kinds)
        return [
            QueuedMail(r["id"], r["kind"], r["about"], r["tries"], r["name"], r["email"], r["created_at"]) for r in rows
        ]

    async def finish(self, mail: int, *, sent: bool) -> None:
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await connection.execute(sql.mails.finish, mail, sent)

    async def postpone(self, mail: int, by_s: float) -> None:
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await connection.execute(sql.mails.postpone, mail, by_s)

    async def next_s(self, kinds: Sequence[str]) -> float | None:
        """Return the seconds until the next mail of these kinds is due, or None if there is none."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            due_s = await connection.fetchval(sql.mails.next_due, kinds)
        return None if due_s is None else float(due_s)


async def add(connection: DatabaseConnection, webhook_id: str, kind: str, about: Mapping[str, Any]) -> None:
    """Queue a mail to the holder of the webhook's account."""
    await connection.execute(sql.mails.add, webhook_id, kind, json_text(about))
