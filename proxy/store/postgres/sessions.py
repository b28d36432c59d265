"""Passwords, sessions, one-time links and admin tokens in Postgres. Secrets are stored only as digests."""

from __future__ import annotations

import datetime
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg

from proxy.core.roles import Role
from proxy.core.sessions import PLACE_S
from proxy.errors import InvalidRequest, NotFound
from proxy.store.postgres import sql
from proxy.store.postgres.keys import new_id
from proxy.store.postgres.pool import PATIENT_S, Pool
from proxy.store.postgres.secrets import check_value

SessionRow = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AccountHolder:
    """The sign-in data of a person: an account's first owner, whose id is that of the account, or a member. `hash` is empty
    without a password."""

    id: str
    account: str
    email: str
    hash: str


@dataclass(frozen=True, slots=True)
class TakenEmailChange:
    person_id: str
    account_id: str
    email: str
    old_email: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A session of a person in an account, or of an operator.

    `id` and `name` are those of the account or the operator; `person`, `email` and `role` those of the person.
    """

    id: str
    name: str
    is_operator: bool
    created_at: datetime.datetime
    expires_at: datetime.datetime
    person: str = ""
    email: str = ""
    role: Role = "visitor"
    # The operator's name if the person is a visitor.
    visitor: str = ""
    account_email: str = ""
    plan: str = ""
    has_password: bool = False
    has_second_factor: bool = False
    account_created_at: datetime.datetime | None = None


# The longest time over which codes of second factors are counted.
CODES_S = 30 * 86_400.0


class SessionStore:
    def __init__(self, pool: Pool, *, pepper: str, previous_pepper: str = "") -> None:
        self._pool = pool
        self._peppers = [each.encode() for each in (pepper, previous_pepper) if each]
        self._check_value = check_value(pepper)

    def __repr__(self) -> str:
        return f"<SessionStore {self._pool!r}>"

    def digest(self, kind: str, text: str) -> bytes:
        """Return a keyed digest. The stored value alone is useless, and a digest of one kind never matches another kind."""
        return self.digests(kind, text)[0]

    def digests(self, kind: str, text: str) -> list[bytes]:
        """Return the digest under the current pepper, then the one under the previous pepper if there is one."""
        data = f"{kind}\0{text}".encode("utf-8", "replace")
        return [hmac.digest(pepper, data, "sha256") for pepper in self._peppers]

    def digest_for_every_host(self, kind: str, text: str) -> bytes:
        """The digest of something short-lived: under the previous pepper while it is rotated, which every host has."""
        return self.digests(kind, text)[-1]

    def _session_digests(self, token: str) -> list[bytes]:
        return self.digests("session", token)

    # People

    async def find_holder(self, email: str) -> AccountHolder | None:
        row = await self._row(sql.sessions.find_holder, email)
        return None if row is None else _holder(row)

    async def read_holder(self, person: str) -> AccountHolder:
        row = await self._row(sql.sessions.read_holder, person)
        if row is None:
            raise NotFound(f"there is no account or member {person}")
        return _holder(row)

    async def set_password(self, person: str, password_hash: str, *, but: str | None = None) -> None:
        """Set the password, end all sessions except `but`, and invalidate pending links and a pending change of the address."""
        kept = [] if but is None else self._session_digests(but)
        async with self._pool.connection() as connection, connection.transaction():
            await connection.execute(sql.sessions.set_password, person, password_hash)
            await connection.execute(sql.sessions.end_account_sessions, person, kept)
            await connection.execute(sql.sessions.end_account_links, person)
            await connection.execute(sql.sessions.end_email_change, person)

    # Sessions

    async def begin(
        self,
        token: str,
        *,
        person: str | None = None,
        operator: str | None = None,
        lasts_s: float,
        instead: str = "",
        address: str = "",
        agent: str = "",
    ) -> None:
        """Begin a session, and end the browser's previous one (`instead`)."""
        async with self._pool.connection() as connection, connection.transaction():
            if instead:
                await connection.execute(sql.sessions.end_session, self._session_digests(instead))
            digest = self.digest_for_every_host("session", token)
            await connection.execute(sql.sessions.begin_session, digest, person, operator, lasts_s, address, agent)

    async def end(self, token: str) -> None:
        async with self._pool.connection() as connection:
            await connection.execute(sql.sessions.end_session, self._session_digests(token))

    async def list_of(self, person: str, token: str, *, idle_s: float) -> list[SessionRow]:
        """Return the person's sessions. That of the token is marked as `is_current`."""
        async with self._pool.connection() as connection:
            digests = self._session_digests(token)
            return [dict(row) for row in await connection.fetch(sql.sessions.list_sessions, person, digests, idle_s)]

    async def end_of(self, person: str, session_id: str) -> None:
        if await self._row(sql.sessions.end_session_of_account, person, session_id) is None:
            raise NotFound(f"there is no session {session_id}")

    async def end_others(self, person: str, token: str) -> None:
        """End all other sessions, and a pending change of the address, which one of them may have begun."""
        async with self._pool.connection() as connection, connection.transaction():
            await connection.execute(sql.sessions.end_account_sessions, person, self._session_digests(token))
            await connection.execute(sql.sessions.end_email_change, person)

    async def read(self, token: str, *, idle_s: float) -> Session | None:
        """Return the session if it is valid. Its last use is recorded from time to time."""
        digests = self._session_digests(token)
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(sql.sessions.read_session, digests, idle_s)
            if row is not None and row["is_stale"]:
                await connection.execute(sql.sessions.touch_session, digests)
        return None if row is None else _session(row)

    # Links

    async def add_link(self, token: str, person: str, *, lasts_s: float) -> datetime.datetime:
        async with self._pool.connection() as connection:
            digest = self.digest_for_every_host("link", token)
            return await connection.fetchval(sql.sessions.add_link, digest, person, lasts_s)  # type: ignore[no-any-return]

    async def link_holder(self, token: str) -> tuple[str, str] | None:
        """Return the person of a valid link and the email address. The link is not used up."""
        row = await self._row(sql.sessions.read_link, self.digests("link", token))
        return None if row is None else (row["id"], row["email"])

    async def take_link(self, token: str) -> str | None:
        """Use up a link and return its person, or None if the link is not valid."""
        async with self._pool.connection() as connection:
            return await connection.fetchval(sql.sessions.take_link, self.digests("link", token))  # type: ignore[no-any-return]

    # New email addresses

    async def begin_email_change(self, person: str, email: str, token: str, *, lasts_s: float) -> None:
        digest = self.digest_for_every_host("email", token)
        async with self._pool.connection() as connection:
            await connection.execute(sql.sessions.begin_email_change, person, email, digest, lasts_s)

    async def take_email_change(self, token: str) -> TakenEmailChange | None:
        """Use up the link. Returns None if it is not valid."""
        row = await self._row(sql.sessions.take_email_change, self.digests("email", token))
        return None if row is None else TakenEmailChange(**row)

    async def end_links(self, person: str) -> None:
        async with self._pool.connection() as connection:
            await connection.execute(sql.sessions.end_account_links, person)

    # Sign-in attempts

    async def count_try(self, kind: str, subject: str, *, most: int, within_s: float) -> float:
        """Count an attempt and return zero, or return the seconds until the next attempt is allowed."""
        digest = self._try(kind, subject)
        async with self._pool.connection() as connection:
            return float(await connection.fetchval(sql.sessions.count_try, digest, within_s, within_s / most) or 0.0)

    async def clear_tries(self, kind: str, subjects: Sequence[str]) -> None:
        digests = [self._try(kind, subject) for subject in subjects]
        async with self._pool.connection() as connection:
            await connection.execute(sql.sessions.clear_tries, digests)

    async def count_code(self, kind: str, subject: str, *, most: int, within_s: float) -> float:
        """Like `count_try`, for codes of second factors: these counts last for CODES_S."""
        digest = self._try(kind, subject)
        async with self._pool.connection() as connection:
            return float(await connection.fetchval(sql.sessions.count_code, digest, within_s, within_s / most) or 0.0)

    async def clear_codes(self, counted: Sequence[tuple[str, str]]) -> None:
        """Forget the codes that were counted, each by its kind and subject."""
        async with self._pool.connection() as connection:
            await connection.execute(sql.sessions.clear_codes, [self._try(*each) for each in counted])

    def _try(self, kind: str, subject: str) -> bytes:
        return self.digest(kind, subject.lower())

    async def known_places(self, email: str, places: Sequence[str]) -> list[str]:
        """Return the places from which the holder has signed in."""
        digests = {digest: place for place in places for digest in self._place(email, place)}
        if not digests:
            return []
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.sessions.known_places, [*digests], PLACE_S)
        known = {digests[row["place"]] for row in rows}
        return [place for place in places if place in known]

    async def add_places(self, email: str, places: Sequence[str]) -> None:
        digests = [self._place(email, place)[0] for place in places]
        async with self._pool.connection() as connection:
            await connection.execute(sql.sessions.add_places, digests)

    def _place(self, email: str, place: str) -> list[bytes]:
        return self.digests("place", f"{email.lower()}\0{place}")

    # Admin tokens

    async def add_token(self, name: str, token: str) -> SessionRow:
        if not name.strip() or len(name) > 200 or not name.isprintable():
            raise InvalidRequest("name must be 1 to 200 printable characters", param="name")
        hint = f"{token[:8]}…{token[-4:]}"
        digest, *previous = self.digests("admin", token)
        row = await self._row(
            sql.sessions.add_token, new_id("admt"), name, digest, hint, next(iter(previous), None), self._check_value
        )
        assert row is not None
        return dict(row)

    async def list_tokens(self) -> list[SessionRow]:
        async with self._pool.connection() as connection:
            return [dict(row) for row in await connection.fetch(sql.sessions.list_tokens)]

    async def revoke_token(self, token_id: str) -> SessionRow:
        async with self._pool.connection() as connection, connection.transaction():
            row = await connection.fetchrow(sql.sessions.revoke_token, token_id)
            if row is None:
                raise NotFound(f"there is no admin token {token_id}")
            await connection.execute(sql.sessions.end_token_sessions, token_id)
        return dict(row)

    async def find_token(self, token: str) -> tuple[str, str] | None:
        """Return the token's id and name if it is valid."""
        row = await self._row(sql.sessions.find_token, self.digests("admin", token), self._check_value)
        return None if row is None else (row["id"], row["name"])

    async def purge(self, *, idle_s: float) -> None:
        """Delete expired sessions, links, invitations, visits and attempt counters."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await connection.execute(sql.sessions.delete_expired_sessions, idle_s)
            await connection.execute(sql.sessions.delete_expired_links)
            await connection.execute(sql.sessions.delete_expired_email_changes)
            await connection.execute(sql.members.delete_expired_invitations)
            await connection.execute(sql.members.delete_expired_visits)
            await connection.execute(sql.sessions.delete_old_tries)
            await connection.execute(sql.sessions.delete_old_codes, CODES_S)
            await connection.execute(sql.sessions.delete_old_places, PLACE_S)

    async def _row(self, query: str, *values: Any) -> asyncpg.Record | None:
        async with self._pool.connection() as connection:
            return await connection.fetchrow(query, *values)


def _holder(row: asyncpg.Record) -> AccountHolder:
    return AccountHolder(row["id"], row["account_id"], row["email"], row["hash"] or "")


def _session(row: asyncpg.Record) -> Session:
    if row["admin_token_id"] is not None:
        return Session(
            id=row["admin_token_id"],
            name=row["token_name"],
            is_operator=True,
            created_at=row["created_at"],
            expires_at=row["expires_at"],
        )
    return Session(
        id=row["account_id"],
        name=row["account_name"],
        is_operator=False,
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        person=row["person_id"],
        email=row["email"],
        role=row["role"],
        visitor=row["visitor"],
        account_email=row["account_email"],
        plan=row["plan"],
        has_password=row["has_password"],
        has_second_factor=row["has_second_factor"],
        account_created_at=row["account_created_at"],
    )
