"""Who is signed in: passwords, one-time links, operators' tokens, and the sessions that come of them.

Nobody learns here whether an e-mail has an account: a wrong password and an unknown e-mail take the same work and get the same
words, and a link is promised to everybody. Tries are counted before anything is looked at, by address and by e-mail, in the
database, so that all workers count together. Hashing takes its time and memory by design: threads do it, a few at a time.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from proxy.core import sessions
from proxy.errors import Fault, InvalidRequest, RateLimited, Unauthorized, Unavailable
from proxy.settings import DashboardSettings
from proxy.store.sessions import Session, SessionStore
from proxy.tasks import Tasks
from proxy.wire.mailer import Mailer, OutgoingMail, Undelivered

__all__ = ("Session", "SignIn", "SignedIn")

log = logging.getLogger("penstock.sessions")

_T = TypeVar("_T")

# RFC 9106 says how to choose: 19 MiB twice is what OWASP names as the least; 30 ms of a thread.
_hasher = PasswordHasher(time_cost=2, memory_cost=19_456, parallelism=1)
# Hashes at once in one worker: each takes its memory.
AT_ONCE = 2
# And those that wait for their turn: two seconds of it, or so.
MOST_WAITING = 100
# Tries of one e-mail are counted over this time, and those of one address over a minute.
EMAIL_WINDOW_S = 600.0
KEEP_EVERY_S = 300.0

_WRONG = "the e-mail or the password is wrong"
_WRONG_LINK = "this link was used already, or is too old: ask for a new one"
_NO_OPERATOR = "this admin token is not valid"
_SIGNED_OUT = "you are not signed in, or were signed out after a while: sign in again"


def hash_password(password: str, *, email: str = "") -> str:
    if fault := sessions.password_fault(password, email=email):
        raise InvalidRequest(f"password: {fault}")
    return _hasher.hash(password)


def verify_password(password_hash: str, password: str) -> bool:
    try:
        return _hasher.verify(password_hash, password)
    except (VerificationError, InvalidHashError):
        return False


def new_admin_token() -> str:
    return sessions.ADMIN_PREFIX + new_token()


def new_token() -> str:
    return sessions.token_of(secrets.token_bytes(sessions.TOKEN_BYTES))


def link_of(where: str, token: str) -> str:
    """What is behind the # no server sees, and no log."""
    return f"{where.rstrip('/')}/#token={token}"


@dataclass(frozen=True, slots=True)
class SignedIn:
    """A session, and the token that is its cookie."""

    token: str
    session: Session


class SignIn:
    def __init__(self, store: SessionStore, settings: DashboardSettings, mailer: Mailer, tasks: Tasks) -> None:
        self._store = store
        self._settings = settings
        # Where people reach the dashboard: for links.
        self.url = settings.url
        self._mailer = mailer
        self._tasks = tasks
        self._hashing = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0
        # Verified where there is nothing to verify, so that it takes as long.
        self._nobodys = ""

    def __repr__(self) -> str:
        return f"<SignIn {self._store!r}>"

    # Signing in

    async def by_password(self, email: str, password: str, *, address: str, before: str) -> SignedIn:
        """`before`: the cookie that the browser had; whatever it was, it is over."""
        await self._count(address, email)
        holder = await self._store.find_holder(email)
        wanted = holder.hash if holder is not None and holder.hash else await self._nobody()
        is_right = await self._in_thread(lambda: verify_password(wanted, password))
        if holder is None or not holder.hash or not is_right:
            raise Unauthorized(_WRONG)
        return await self._begin(account=holder.id, before=before)

    async def ask_link(self, email: str, *, address: str) -> None:
        """Returns at once, whoever asked: whether there is an account shows in nothing."""
        await self._count(address, email, kind="link")
        self._tasks.start(f"link {secrets.token_hex(4)}", lambda: self._send_link(email))

    async def _send_link(self, email: str) -> None:
        try:
            holder = await self._store.find_holder(email)
            if holder is None:
                return
            url, _ = await self.link(holder.id)
            # To the address that the account has: what was typed may only look like it to the database.
            await self._mailer.send(self._letter(holder.email, url), at=time.time())
        except (Unavailable, Undelivered) as exc:
            log.warning("sign-in link not sent", extra={"reason": str(exc)})
        except Exception:
            # Whatever it was, it is over: what is supervised and raises is begun again, and this was asked for once.
            log.exception("sign-in link not sent")

    async def link(self, account_id: str) -> tuple[str, str]:
        """A link that signs in once, and until when."""
        await self._store.read_holder(account_id)
        token = new_token()
        until = await self._store.add_link(token, account_id, lasts_s=self._settings.link_s)
        return link_of(self.url, token), until.strftime("%Y-%m-%dT%H:%M:%SZ")

    def _letter(self, email: str, url: str) -> OutgoingMail:
        minutes = round(self._settings.link_s / 60)
        text = f"Sign in with this link. It works once, for {minutes} minutes:\n\n{url}\n\nYou did not ask for it? Ignore it.\n"
        html = (
            f'<!doctype html><html><body style="font-family: sans-serif"><p><a href="{url}">Sign in</a></p>'
            f"<p>The link works once, for {minutes} minutes. You did not ask for it? Ignore it.</p></body></html>"
        )
        return OutgoingMail(
            id=f"link-{secrets.token_hex(8)}", to=email, subject="Your sign-in link", text=text, html=html
        )

    async def by_link(self, token: str, *, password: str | None, address: str, before: str) -> SignedIn:
        """With a password, that is the new one."""
        await self._count(address)
        hashed = None if password is None else await self._hash(password)
        account = await self._store.take_link(token) if sessions.is_token(token) else None
        if account is None:
            raise Unauthorized(_WRONG_LINK)
        if hashed is not None:
            await self._store.set_password(account, hashed)
        return await self._begin(account=account, before=before)

    async def by_admin_token(self, token: str, *, address: str, before: str) -> SignedIn:
        await self._count(address)
        operator = await self._store.find_token(token) if sessions.is_token(token) else None
        if operator is None:
            raise Unauthorized(_NO_OPERATOR)
        return await self._begin(operator=operator[0], before=before)

    async def _begin(self, *, account: str | None = None, operator: str | None = None, before: str) -> SignedIn:
        """Always a new token: one that somebody planted in the browser signs nobody in."""
        token = new_token()
        instead = before if sessions.is_token(before) else ""
        await self._store.begin(
            token, account=account, operator=operator, lasts_s=self._settings.session_s, instead=instead
        )
        session = await self._store.read(token, idle_s=self._settings.idle_s)
        if session is None:
            raise Unauthorized(_SIGNED_OUT)
        return SignedIn(token, session)

    # Being signed in

    async def who(self, token: str, *, is_operator: bool, refuse: Callable[[str], Fault]) -> Session:
        """`refuse` counts the failure, and says what is answered."""
        session = await self._store.read(token, idle_s=self._settings.idle_s) if sessions.is_token(token) else None
        if session is not None and session.is_operator == is_operator:
            return session
        # A browser without a cookie has failed at nothing.
        raise refuse(_SIGNED_OUT) if token else Unauthorized(_SIGNED_OUT)

    async def operator(self, token: str, *, refuse: Callable[[str], Fault]) -> Session:
        """An operator by the token itself: for programs."""
        found = await self._store.find_token(token) if sessions.is_token(token) else None
        if found is None:
            raise refuse(_NO_OPERATOR)
        now = datetime.datetime.now(datetime.UTC)
        ends = now + datetime.timedelta(seconds=self._settings.session_s)
        return Session(id=found[0], name=found[1], is_operator=True, created_at=now, expires_at=ends)

    async def sign_out(self, token: str) -> None:
        await self._store.end(token)

    async def change_password(self, by: SignedIn, *, current: str | None, new: str) -> Session:
        """All other sessions of the account end."""
        holder = await self._store.read_holder(by.session.id)
        if holder.hash:
            await self._count(email=by.session.email)
            is_right = await self._in_thread(lambda: verify_password(holder.hash, current or ""))
            if not is_right:
                raise InvalidRequest("current_password: is wrong")
        hashed = await self._hash(new, email=by.session.email)
        await self._store.set_password(holder.id, hashed, but=by.token)
        session = await self._store.read(by.token, idle_s=self._settings.idle_s)
        if session is None:
            raise Unauthorized(_SIGNED_OUT)
        return session

    async def keep(self) -> None:
        """A supervised loop: what is over is removed."""
        while True:
            try:
                await self._store.keep(idle_s=self._settings.idle_s)
            except Unavailable:
                pass
            await asyncio.sleep(KEEP_EVERY_S)

    # Shared steps

    async def _count(self, address: str = "", email: str = "", *, kind: str = "try") -> None:
        """A try, of an address and of an e-mail; links have tries of their own: nobody is locked out by others' guesses."""
        most = self._settings.tries
        if address and (wait := await self._store.count_try("address", address, most=2 * most, within_s=60.0)):
            _too_many(wait)
        if email and (wait := await self._store.count_try(kind, email, most=most, within_s=EMAIL_WINDOW_S)):
            _too_many(wait)

    async def _hash(self, password: str, *, email: str = "") -> str:
        return await self._in_thread(lambda: hash_password(password, email=email))

    async def _nobody(self) -> str:
        if not self._nobodys:
            self._nobodys = await self._hash(secrets.token_hex(16))
        return self._nobodys

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        if self._waiting >= MOST_WAITING:
            raise Unavailable("too many people sign in at the moment; try again shortly")
        self._waiting += 1
        try:
            async with self._hashing:
                return await asyncio.get_running_loop().run_in_executor(None, work)
        finally:
            self._waiting -= 1


def _too_many(wait_s: float) -> NoReturn:
    raise RateLimited("too many tries to sign in: wait a while", retry_after_s=math.ceil(wait_s))
