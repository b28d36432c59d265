"""Sign-in: passwords, one-time links, operators' tokens, and sessions.

Sign-in never reveals whether an email address has an account: a wrong password and an unknown address cost the same work and
return the same error, and every request for a link gets the same reply. Attempts are counted before anything is checked, by
client address and by email, in the database that all workers share. Each place from which the holder has signed in before, a
browser with its device cookie or an address, has its own count, which a sign-in clears: strangers cannot keep a holder out by
wrong passwords, not even from the holder's own address. Password hashing is slow and memory-hungry by design, so it runs on
threads, a few at a time. Known places and strangers wait in separate queues, which are served in turn: a flood of strangers,
from however many addresses, locks no holder out.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from proxy.connection_queue import ConnectionQueue, TooManyWaiting
from proxy.core import access, sessions
from proxy.core.dashboard_links import token_link
from proxy.core.iso_time import iso_seconds
from proxy.errors import Fault, InvalidRequest, RateLimited, Unauthorized, Unavailable
from proxy.services.accounts.account_mails import AccountMails
from proxy.services.accounts.code_limits import CodeLimits
from proxy.services.accounts.second_factor import AppSecret, SecondFactor
from proxy.settings import DashboardSettings
from proxy.store.postgres.sessions import AccountHolder, Session, SessionStore
from proxy.tasks import repeat
from proxy.wire.mailer import OutgoingMail

__all__ = ("Session", "SignIn", "SignInPlace", "SignedIn")

_T = TypeVar("_T")

# Argon2id parameters (RFC 9106): two passes over 19 MiB are OWASP's minimum. About 30 ms of a thread.
_hasher = PasswordHasher(time_cost=2, memory_cost=19_456, parallelism=1)
# Concurrent hashes per worker: bounds their memory.
AT_ONCE = 2
# Queued hashes per worker, of strangers and of known places: about two seconds of work each.
MOST_WAITING = 100
_STRANGERS, _KNOWN = "strangers", "known places"
HASH_WAIT_S = 30.0
# Window for attempts per email address. Attempts per client address are counted over a minute.
EMAIL_WINDOW_S = 600.0
KEEP_EVERY_S = 300.0
# Mails with links to one address, from all senders together. More than the invitations that one account may send to it.
MOST_MAILS, MAIL_WINDOW_S = 20, 3600.0
# The count of wrong passwords at a known place.
_KNOWN_TRY = "known try"

_WRONG = "the email address or the password is wrong"
_WRONG_LINK = "this link has been used or has expired: request a new one"
_NO_OPERATOR = "this admin token is not valid"
_CODES_REFUSED = (
    "Too many wrong codes were entered for your two-factor sign-in, by someone who has your password or a sign-in link.\n\n"
    "Codes are now refused for a while in browsers and at addresses where you have not signed in before. Browsers that you "
    "have used, and your recovery codes, still work. If it was not you, change your password.\n"
)
_SIGNED_OUT = "you are not signed in, or your session has expired: sign in again"


def hash_password(password: str, *, email: str = "") -> str:
    if fault := sessions.password_fault(password, email=email):
        raise InvalidRequest(f"password: {fault}", param="password")
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


@dataclass(frozen=True, slots=True)
class SignInPlace:
    """The origin of a sign-in: a client address, and the cookies of a browser. Each may be empty or made up."""

    address: str
    device: str = ""
    # The token of the browser's session, which a new one replaces.
    before: str = ""
    # The User-Agent header.
    agent: str = ""

    @property
    def places(self) -> list[str]:
        """The names under which a holder's places are remembered, the surest first."""
        device = [f"device {self.device}"] if sessions.is_token(self.device) else []
        return [*device, access.client_prefix_of(self.address)] if self.address else device


@dataclass(frozen=True, slots=True)
class SignedIn:
    """A session, its cookie token, and for a holder the token of the browser, which identifies the browser next time."""

    token: str
    session: Session
    device: str = ""


class SignIn:
    def __init__(
        self, store: SessionStore, factor: SecondFactor, settings: DashboardSettings, mails: AccountMails
    ) -> None:
        self._store = store
        self._factor = factor
        self._settings = settings
        # The dashboard's public URL, for links.
        self.url = settings.url
        self._mails = mails
        self._codes = CodeLimits(store, self._inform_of_codes)
        self._hashing = ConnectionQueue(AT_ONCE, per_client=MOST_WAITING)
        # A hash to verify against when there is no account, so that both cases take equally long.
        self._dummy_hash = ""

    def __repr__(self) -> str:
        return f"<SignIn {self._store!r}>"

    # Signing in

    async def by_password(self, email: str, password: str, *, code: str | None, at: SignInPlace) -> SignedIn:
        """Sign in by password, and a code if the account has a second factor. Ends the browser's previous session."""
        is_known = await self._count(at, email)
        holder = await self._store.find_holder(email)
        wanted = holder.hash if holder is not None and holder.hash else await self._dummy()
        is_right = await self._in_thread(lambda: verify_password(wanted, password), is_known=is_known)
        if holder is None or not holder.hash or not is_right:
            raise Unauthorized(_WRONG, reason="session")
        await self._check_code(holder.id, holder.email, code, at)
        return await self._begin_holder(holder, at)

    async def ask_link(self, email: str, *, at: SignInPlace) -> None:
        """Mail a sign-in link, if there is an account."""
        if not await self._count(at, email, kind="link"):
            await self.count_mail(email)
        self._mails.write_and_send(lambda: self._link_mail(email), what="sign-in link")

    async def link(self, account_id: str) -> tuple[str, str]:
        """A single-use sign-in link and its expiry time."""
        await self._store.read_holder(account_id)
        token = new_token()
        until = await self._store.add_link(token, account_id, lasts_s=self._settings.link_s)
        return token_link(self.url, "token", token), iso_seconds(until)

    async def _link_mail(self, email: str) -> OutgoingMail | None:
        holder = await self._store.find_holder(email)
        if holder is None:
            return None
        url, _ = await self.link(holder.id)
        minutes = round(self._settings.link_s / 60)
        validity = f"The link works once and expires in {minutes} minutes. If you did not request it, ignore this mail."
        text = f"Sign in to your dashboard:\n\n{url}\n\n{validity}\n"
        html = (
            f'<!doctype html><html><body style="font-family: sans-serif"><p><a href="{url}">Sign in</a></p>'
            f"<p>{validity}</p></body></html>"
        )
        # To the account's stored address: the typed one may match it only under the database's collation.
        return OutgoingMail(
            id=f"link-{secrets.token_hex(8)}", to=holder.email, subject="Your sign-in link", text=text, html=html
        )

    async def by_link(self, token: str, *, password: str | None, code: str | None, at: SignInPlace) -> SignedIn:
        """Sign in by link, and a code if the account has a second factor: without it the link is not used up. If a password is
        given, it becomes the account's new password."""
        await self._count(at)
        holder = await self._store.link_holder(token) if sessions.is_token(token) else None
        if holder is None:
            raise Unauthorized(_WRONG_LINK, reason="session")
        account, email = holder
        await self._count(SignInPlace(""), email, kind="code")
        await self._check_code(account, email, code, at)
        hashed = None if password is None else await self.hash(password, email=email)
        if await self._store.take_link(token) is None:
            raise Unauthorized(_WRONG_LINK, reason="session")
        if hashed is not None:
            await self._store.set_password(account, hashed)
        return await self._begin_holder(await self._store.read_holder(account), at)

    async def by_admin_token(self, token: str, *, at: SignInPlace) -> SignedIn:
        await self._count(at)
        operator = await self._store.find_token(token) if sessions.is_token(token) else None
        if operator is None:
            raise Unauthorized(_NO_OPERATOR, reason="session")
        return await self._begin(at, operator=operator[0])

    async def _begin_holder(self, holder: AccountHolder, at: SignInPlace) -> SignedIn:
        """Begin a holder's session. Its address and its browser are known places from now on, without failed attempts.

        A browser keeps its device token only if it is known: one that was planted there must not become known.
        """
        known = await self._store.known_places(holder.email, at.places)
        device = at.device if f"device {at.device}" in known else new_token()
        places = dataclasses.replace(at, device=device).places
        await self._store.add_places(holder.email, places)
        await self._store.clear_tries(_KNOWN_TRY, [_subject(holder.email, place) for place in places])
        return dataclasses.replace(await self._begin(at, person=holder.id), device=device)

    async def begin(self, person: str, at: SignInPlace) -> SignedIn:
        """Begin the session of a person who has just joined an account."""
        return await self._begin_holder(await self._store.read_holder(person), at)

    async def begin_visit(self, visit: str, at: SignInPlace, *, lasts_s: float) -> SignedIn:
        return await self._begin(at, person=visit, lasts_s=min(lasts_s, self._settings.session_s))

    async def _begin(
        self, at: SignInPlace, *, person: str | None = None, operator: str | None = None, lasts_s: float | None = None
    ) -> SignedIn:
        """Start a session under a fresh token, so that a token planted in the browser is worthless (session fixation)."""
        token = new_token()
        instead = at.before if sessions.is_token(at.before) else ""
        await self._store.begin(
            token,
            person=person,
            operator=operator,
            lasts_s=self._settings.session_s if lasts_s is None else lasts_s,
            instead=instead,
            address=at.address,
            agent=at.agent,
        )
        session = await self._store.read(token, idle_s=self._settings.idle_s)
        if session is None:
            raise Unauthorized(_SIGNED_OUT, reason="session")
        return SignedIn(token, session)

    # Being signed in

    async def who(self, token: str, *, is_operator: bool, refuse: Callable[[str], Fault]) -> Session:
        """The session of a cookie. `refuse` counts the failure and returns the error."""
        session = await self.session_of(token)
        if session is not None and session.is_operator == is_operator:
            return session
        # A browser without a cookie has not failed to authenticate.
        raise refuse(_SIGNED_OUT) if token else Unauthorized(_SIGNED_OUT, reason="session")

    async def session_of(self, token: str) -> Session | None:
        return await self._store.read(token, idle_s=self._settings.idle_s) if sessions.is_token(token) else None

    async def operator(self, token: str, *, refuse: Callable[[str], Fault]) -> Session:
        """Authenticate an operator by an admin token, for programs."""
        operator = await self._store.find_token(token) if sessions.is_token(token) else None
        if operator is None:
            raise refuse(_NO_OPERATOR)
        now = datetime.datetime.now(datetime.UTC)
        ends = now + datetime.timedelta(seconds=self._settings.session_s)
        return Session(id=operator[0], name=operator[1], is_operator=True, created_at=now, expires_at=ends)

    async def sign_out(self, token: str) -> None:
        await self._store.end(token)

    # The second factor. Codes are counted like passwords: a stolen session must not be able to guess one.

    async def begin_factor(self, by: SignedIn, current: str | None) -> AppSecret:
        await self.prove(by, current)
        return await self._factor.begin(by.session.person, by.session.email)

    async def confirm_factor(self, by: SignedIn, code: str) -> list[str]:
        """Turn two-factor sign-in on and end all other sessions, which began without it."""
        await self._count(SignInPlace(""), by.session.email, kind="code")
        recovery = await self._factor.confirm(by.session.person, code)
        await self._store.end_others(by.session.person, by.token)
        return recovery

    async def turn_factor_off(self, by: SignedIn, code: str) -> None:
        await self._count(SignInPlace(""), by.session.email, kind="code")
        person, email = by.session.person, by.session.email
        await self._codes.checked(lambda: self._factor.turn_off(person, code), person, email, "a session")

    async def _check_code(self, person: str, email: str, code: str | None, at: SignInPlace) -> None:
        """Raise unless the code is right, or the person has no second factor."""
        if not code:
            await self._factor.require(person, code)
            return
        known = await self._store.known_places(email, at.places)
        place = known[0] if known else access.client_prefix_of(at.address) if self._factor.is_recovery(code) else ""
        await self._codes.checked(lambda: self._factor.require(person, code), person, email, place)

    def _inform_of_codes(self, email: str) -> None:
        if self._mails.is_configured:
            self._mails.send(email, "Wrong codes at your sign-in", _CODES_REFUSED)

    # Sessions of the account

    async def sessions_of(self, by: SignedIn) -> list[dict[str, Any]]:
        return await self._store.list_of(by.session.person, by.token, idle_s=self._settings.idle_s)

    async def end_session(self, by: SignedIn, session_id: str) -> None:
        await self._store.end_of(by.session.person, session_id)

    async def end_other_sessions(self, by: SignedIn) -> None:
        await self._store.end_others(by.session.person, by.token)

    async def change_password(self, by: SignedIn, *, current: str | None, new: str) -> Session:
        """Change the password and end all other sessions of the account."""
        await self.prove(by, current)
        hashed = await self.hash(new, email=by.session.email)
        await self._store.set_password(by.session.person, hashed, but=by.token)
        await self._codes.clear(by.session.person)
        session = await self._store.read(by.token, idle_s=self._settings.idle_s)
        if session is None:
            raise Unauthorized(_SIGNED_OUT, reason="session")
        return session

    async def prove(self, by: SignedIn, current: str | None) -> None:
        """Raise InvalidRequest unless this is the password of the session's account, or it has none."""
        # Only the holder's own sessions get here: strangers cannot use up this count. It also bounds mails to new addresses.
        await self._count(SignInPlace(""), by.session.email, kind="change")
        holder = await self._store.read_holder(by.session.person)
        if not holder.hash:
            return
        if not await self._in_thread(lambda: verify_password(holder.hash, current or ""), is_known=True):
            raise InvalidRequest("current_password: is wrong", param="current_password")

    async def prove_wholly(self, by: SignedIn, current: str | None, code: str | None) -> None:
        """Raise InvalidRequest unless this is the person's password, if there is one, and a code of the second factor, if it is
        on: for changes that cannot be undone."""
        await self.prove(by, current)
        await self._count(SignInPlace(""), by.session.email, kind="code")
        try:
            await self._factor.require(by.session.person, code)
        except Unauthorized as exc:
            raise InvalidRequest(f"code: {exc.message}", param="code", details=exc.details) from None

    async def keep(self) -> None:
        """Supervised loop: delete expired sessions, links and attempts."""
        await repeat(lambda: self._store.purge(idle_s=self._settings.idle_s), every_s=KEEP_EVERY_S)

    # Shared steps

    async def count_link(self, at: SignInPlace) -> None:
        """Count the use of a mailed link by its client's address."""
        await self._count(at)

    async def _count(self, at: SignInPlace, email: str = "", *, kind: str = "try") -> bool:
        """Count an attempt, by client address and by email. Links are counted separately, so wrong passwords cannot block them,
        and so are attempts from each known place of the holder. A known browser may share its address with strangers. Returns
        whether it comes from a known place."""
        most = self._settings.tries
        known = await self._store.known_places(email, at.places) if email else []
        is_known_device = bool(known) and known[0].startswith("device ")
        if at.address and not is_known_device:
            await self.count("address", access.client_prefix_of(at.address), most=2 * most, within_s=60.0)
        if known:
            await self.count(f"known {kind}", _subject(email, known[0]), most=most, within_s=EMAIL_WINDOW_S)
        elif email:
            await self.count(kind, email, most=most, within_s=EMAIL_WINDOW_S)
        return bool(known)

    async def count_mail(self, to: str) -> None:
        """Count a mail that its recipient may not have asked for, or raise RateLimited. All senders share the count, so many
        accounts cannot flood one address."""
        await self.count("mail to", to.strip(), most=MOST_MAILS, within_s=MAIL_WINDOW_S)

    async def count(self, kind: str, subject: str, *, most: int, within_s: float) -> None:
        """Count an attempt of one kind, or raise RateLimited if there were `most` of them within the time."""
        if wait := await self._store.count_try(kind, subject, most=most, within_s=within_s):
            raise RateLimited("too many attempts: wait a while", retry_after_s=math.ceil(wait))

    async def hash(self, password: str, *, email: str = "") -> str:
        """The hash of a new password. Raises InvalidRequest if it is too weak."""
        return await self._in_thread(lambda: hash_password(password, email=email), is_known=True)

    async def _dummy(self) -> str:
        if not self._dummy_hash:
            self._dummy_hash = await self.hash(secrets.token_hex(16))
        return self._dummy_hash

    async def _in_thread(self, work: Callable[[], _T], *, is_known: bool) -> _T:
        client = _KNOWN if is_known else _STRANGERS
        try:
            await self._hashing.enter(client, within_s=HASH_WAIT_S)
        except (TooManyWaiting, TimeoutError):
            raise Unavailable("too many sign-ins at the moment: try again shortly") from None
        try:
            return await asyncio.get_running_loop().run_in_executor(None, work)
        finally:
            self._hashing.leave(client)


def _subject(email: str, place: str) -> str:
    return f"{email}\0{place}"
