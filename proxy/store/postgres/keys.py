"""Accounts and keys in Postgres: management for the command line and the dashboard, and the bulk reads of workers."""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import asyncpg

from proxy.core import access, directives, key_powers
from proxy.core.fault_plans import plan_of
from proxy.core.key_powers import KeyPowers
from proxy.core.paging import Page
from proxy.core.roles import Role
from proxy.errors import Forbidden, InvalidRequest, NotFound
from proxy.store.postgres import sql
from proxy.store.postgres.pool import PATIENT_S, DatabaseConnection, Pool
from proxy.store.postgres.secrets import check_value

KeyRow = dict[str, Any]
# The largest integer and bigint of Postgres. Checked here, so that the error names the field.
_INT32, _INT64 = 2**31 - 1, 2**63 - 1


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def is_key_id(text: str) -> bool:
    """Whether the id is that of a key, where it may also be a person's."""
    return text.startswith("key_")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitChange:
    """A change to the limits of an account or key. None leaves a limit unchanged; -1 removes it, so that the plan's or the
    account's limit applies."""

    requests_per_second: int | None = None
    units_per_second: int | None = None
    requests_per_day: int | None = None

    def check(self) -> None:
        bounds = {"requests_per_second": (1, _INT32), "units_per_second": (1, _INT32), "requests_per_day": (0, _INT64)}
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if value is not None and value != -1 and not least <= value <= most:
                raise InvalidRequest(
                    f"{name} must be between {least} and {most}, or -1 to inherit the default", param=name
                )


NO_LIMITS = LimitChange()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRestrictionChange:
    """A change to where a key may be used from, and for what. None leaves it unchanged; empty allows everything."""

    ips: Sequence[str] | None = None
    origins: Sequence[str] | None = None
    networks: Sequence[str] | None = None
    methods: Sequence[str] | None = None
    contracts: Sequence[str] | None = None
    # Whether the key may be in the URL of a request.
    in_url: bool | None = None
    # Whether its transactions go to relays only.
    private: bool | None = None

    def places(self) -> tuple[list[str] | None, list[str] | None]:
        return _each(self.ips, "allowed_ips", access.block_of), _each(self.origins, "allowed_origins", access.origin_of)

    def uses(self) -> tuple[list[str] | None, list[str] | None, list[str] | None]:
        return (
            _each(self.networks, "allowed_networks", access.network_name),
            _each(self.methods, "allowed_methods", access.method_name),
            _each(self.contracts, "allowed_contracts", access.contract_address),
        )


# Removes the expiry of a key.
NEVER = datetime.datetime(9999, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDetailChange:
    """A change to who answers for a key, what it is for, and when it ends. None leaves it unchanged; `NEVER` removes the
    end."""

    owner: str | None = None
    note: str | None = None
    expires_at: datetime.datetime | None = None

    def columns(self) -> tuple[str | None, str | None, datetime.datetime | None]:
        if self.expires_at is not None and self.expires_at <= datetime.datetime.now(datetime.UTC):
            raise InvalidRequest("expires_at: must be in the future", param="expires_at")
        return self.owner, self.note, self.expires_at


NO_DETAILS = KeyDetailChange()


@dataclass(frozen=True, slots=True)
class Grantor:
    """The person, by the role in the account, or the key, by its id, that gives powers to keys. Operators need none."""

    role: Role = "visitor"
    key_id: str = ""


NO_RESTRICTIONS = KeyRestrictionChange()
# Restores the usual directives of a key.
USUAL_DIRECTIVES = ("default",)


class KeyStore:
    def __init__(self, pool: Pool, *, pepper: str, plans: Mapping[str, int], previous_pepper: str = "") -> None:
        """`plans`: the maximum number of keys of an account, by plan."""
        self._pool = pool
        self._pepper = pepper.encode()
        self._previous_pepper = previous_pepper.encode()
        self._check_value = check_value(pepper)
        self._plans = plans

    # Accounts

    async def create_account(self, *, name: str, email: str, plan: str, own: LimitChange = NO_LIMITS) -> KeyRow:
        self._check_plan(plan)
        own.check()
        limits = (own.requests_per_second, own.units_per_second, own.requests_per_day)
        values = (new_id("acct"), _text(name, "name"), email_address(email), plan, *limits)
        async with self._pool.connection() as connection, connection.transaction():
            await _claim_for_account(connection, values[2])
            row = await connection.fetchrow(sql.accounts.create_account, *values)
        assert row is not None
        return dict(row)

    async def list_accounts(self) -> list[KeyRow]:
        return await self._rows(sql.accounts.list_accounts)

    async def read_account(self, account_id: str) -> KeyRow:
        return await self._row(sql.accounts.read_account, account_id, absent=f"there is no account {account_id}")

    async def find_account(self, email: str) -> KeyRow | None:
        rows = await self._rows(sql.accounts.find_account_by_email, email)
        return rows[0] if rows else None

    async def update_account(
        self,
        account_id: str,
        *,
        name: str | None = None,
        email: str | None = None,
        plan: str | None = None,
        own: LimitChange = NO_LIMITS,
        disabled: bool | None = None,
        record_params: bool | None = None,
    ) -> KeyRow:
        if plan is not None:
            self._check_plan(plan)
        own.check()
        limits = (own.requests_per_second, own.units_per_second, own.requests_per_day)
        new_name = None if name is None else _text(name, "name")
        new_email = None if email is None else email_address(email)
        async with self._pool.connection() as connection, connection.transaction():
            if new_email is not None:
                await _claim_for_account(connection, new_email, account_id)
            row = await connection.fetchrow(
                sql.accounts.update_account, account_id, new_name, new_email, plan, *limits, disabled, record_params
            )
        if row is None:
            raise NotFound(f"there is no account {account_id}")
        return dict(row)

    async def change_email(self, person: str, email: str) -> None:
        """Change the address of a person: an account's first owner or a member."""
        address = email_address(email)
        async with self._pool.connection() as connection, connection.transaction():
            await claim_email(connection, address, person)
            await connection.execute(sql.accounts.change_email, person, address)

    async def erase_account(self, account_id: str) -> KeyRow:
        async with self._pool.connection() as connection, connection.transaction():
            await connection.execute(sql.accounts.lock_account, account_id)
            row = await connection.fetchrow(sql.accounts.erase_account, account_id)
        if row is None:
            raise NotFound(f"there is no account {account_id}")
        return dict(row)

    async def page_accounts(self, search: str, page: Page) -> tuple[list[KeyRow], int]:
        day = datetime.datetime.now(datetime.UTC).date()
        async with self._pool.connection() as connection:
            total = await connection.fetchval(sql.accounts.count_accounts, search)
            rows = await connection.fetch(sql.accounts.page_accounts, search, day, page.limit, page.offset)
        return [dict(row) for row in rows], total

    async def names(self, account_ids: Sequence[str]) -> dict[str, str]:
        async with self._pool.connection() as connection:
            return {row["id"]: row["name"] for row in await connection.fetch(sql.accounts.list_names, account_ids)}

    async def usage_of_today(self, account_id: str) -> int:
        day = datetime.datetime.now(datetime.UTC).date()
        async with self._pool.connection() as connection:
            return int(await connection.fetchval(sql.accounts.read_usage_of_day, account_id, day))

    async def read_used(self, account_id: str) -> KeyRow:
        day = datetime.datetime.now(datetime.UTC).date()
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(sql.accounts.read_used, account_id, day)
        assert row is not None
        return dict(row)

    # Keys

    async def create_key(
        self,
        account_id: str,
        *,
        name: str,
        mode: access.Mode,
        scopes: Sequence[str] = (),
        own: LimitChange = NO_LIMITS,
        restrictions: KeyRestrictionChange = NO_RESTRICTIONS,
        details: KeyDetailChange = NO_DETAILS,
        allowed_directives: Sequence[str] | None = None,
        by: Grantor | None = None,
    ) -> tuple[KeyRow, str]:
        """Create a key. Returns its row and the key itself, which cannot be read again.

        Raises Forbidden if the account already has as many keys as its plan allows, or if the grantor does not have these
        powers.
        """
        _check_scopes(scopes)
        chosen = _directives(allowed_directives)
        own.check()
        key = access.mint(mode, secrets.token_bytes(32))
        values = (
            new_id("key"),
            account_id,
            _text(name, "name"),
            mode,
            access.digest(self._pepper, key),
            access.hint_of(key),
            list(scopes),
            own.requests_per_second,
            own.units_per_second,
            *(listed or [] for listed in (*restrictions.places(), *restrictions.uses())),
            self._previous_digest(key),
            self._check_value,
            None if chosen == [*USUAL_DIRECTIVES] else chosen,
            *details.columns(),
            restrictions.in_url,
            restrictions.private,
        )
        async with self._pool.connection() as connection, connection.transaction():
            most, lasting, _ = await self._count_keys(connection, account_id)
            if lasting >= most:
                raise Forbidden(f"the account's plan allows {most} API keys: revoke one first", reason="plan")
            row = await connection.fetchrow(sql.keys.create_key, *values)
            assert row is not None
            await _check_powers(connection, by, dict(row))
        return dict(row), key

    async def _count_keys(self, connection: DatabaseConnection, account_id: str) -> tuple[int, int, int]:
        """The number of keys that the account may have, the number it has, and the number of further keys that will expire
        because they were rotated.

        The counts stay valid until the end of the transaction.
        """
        plan = await connection.fetchval(sql.keys.lock_keys, account_id)
        if plan is None:
            raise NotFound(f"there is no account {account_id}")
        counts = await connection.fetchrow(sql.keys.count_keys, account_id)
        assert counts is not None
        return self._plans[plan if plan in self._plans else "free"], counts["lasting"], counts["ending"]

    async def rotate_key(self, key_id: str, *, overlap_s: float, by: Grantor | None = None) -> tuple[KeyRow, str]:
        """Create a successor with the same lineage, scopes and rate limits; the old key works until the overlap ends.

        The rotated keys of an account that have not expired yet may be as many as its plan allows keys, or as many as it has
        other keys if that is more.
        """
        if not 0 <= overlap_s <= 366 * 86400:
            raise InvalidRequest("overlap_s must be between 0 and 31622400 seconds", param="overlap_s")
        old = await self.read_key(key_id)
        key = access.mint(old["mode"], secrets.token_bytes(32))
        async with self._pool.connection() as connection, connection.transaction():
            most, lasting, ending = await self._count_keys(connection, old["account_id"])
            if ending >= max(most, lasting):
                raise Forbidden(
                    f"{ending} rotated keys of this account have not expired: revoke one first", reason="plan"
                )
            row = await connection.fetchrow(
                sql.keys.rotate_key,
                key_id,
                new_id("key"),
                access.digest(self._pepper, key),
                access.hint_of(key),
                self._previous_digest(key),
                self._check_value,
            )
            if row is None:
                state = "expired" if old["status"] == "active" else old["status"]
                raise InvalidRequest(f"key {key_id} is {state}: only an active key can be rotated", reason="state")
            # Before the old key expires, which may be the grantor.
            await _check_powers(connection, by, dict(row))
            await connection.execute(sql.keys.expire_key, key_id, float(overlap_s))
        return dict(row), key

    async def set_key_status(self, key_id: str, status: str) -> KeyRow:
        await self.read_key(key_id)
        return await self._row(
            sql.keys.set_key_status, key_id, status, absent=f"key {key_id} is revoked and cannot be changed"
        )

    async def update_key(
        self,
        key_id: str,
        *,
        name: str | None = None,
        scopes: Sequence[str] | None = None,
        own: LimitChange = NO_LIMITS,
        restrictions: KeyRestrictionChange = NO_RESTRICTIONS,
        details: KeyDetailChange = NO_DETAILS,
        allowed_directives: Sequence[str] | None = None,
        fault: str | None = None,
        status: str | None = None,
        by: Grantor | None = None,
    ) -> KeyRow:
        """None leaves a setting unchanged; `USUAL_DIRECTIVES` restores the usual directives, and an empty fault ends it."""
        _check_scopes(scopes or ())
        own.check()
        row = await self.read_key(key_id)
        _check_fault(fault, row["mode"])
        chosen = None if scopes is None else list(scopes)
        values = (
            None if name is None else _text(name, "name"),
            chosen,
            own.requests_per_second,
            own.units_per_second,
            *restrictions.places(),
            _directives(allowed_directives),
            fault,
            *restrictions.uses(),
            *details.columns(),
            restrictions.in_url,
            restrictions.private,
        )
        async with self._pool.connection() as connection, connection.transaction():
            before = await connection.fetchrow(sql.keys.lock_key, key_id)
            after = await connection.fetchrow(sql.keys.update_key, key_id, *values)
            if after is not None and status is not None:
                after = await connection.fetchrow(sql.keys.set_key_status, key_id, status)
            if before is None or after is None:
                raise NotFound(f"key {key_id} is revoked and cannot be changed")
            await _check_powers(connection, by, dict(after), dict(before))
        return dict(after)

    async def read_key(self, key_id: str) -> KeyRow:
        return await self._row(sql.keys.read_key, key_id, absent=f"there is no key {key_id}")

    async def list_keys(self, account_id: str | None = None) -> list[KeyRow]:
        return await self._rows(sql.keys.list_keys, account_id)

    async def name_keys(self, ids: Sequence[str]) -> dict[str, KeyRow]:
        """The names of keys and of their accounts, by the ids of the keys."""
        return {str(row["id"]): row for row in await self._rows(sql.keys.name_keys, list(ids))}

    # Bulk reads for workers

    async def load(self, day: datetime.date) -> list[asyncpg.Record]:
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            return await connection.fetch(sql.keys.load_keys, day, timeout=60.0)

    async def load_changed(
        self, day: datetime.date, *, keys: Sequence[str], accounts: Sequence[str], since: datetime.datetime
    ) -> list[asyncpg.Record]:
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            return await connection.fetch(sql.keys.load_changed_keys, day, list(keys), list(accounts), since)

    async def clock(self) -> datetime.datetime:
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            return await connection.fetchval(sql.keys.read_clock)  # type: ignore[no-any-return]

    async def move_keys(self, digests: Mapping[str, bytes]) -> None:
        """Store digests under the current pepper, by key id."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await connection.execute(sql.peppers.move_keys, [*digests], [*digests.values()], self._check_value)

    # Internals

    def _previous_digest(self, key: str) -> bytes | None:
        """The digest by which hosts that still have the previous pepper find a new key."""
        return access.digest(self._previous_pepper, key) if self._previous_pepper else None

    def _check_plan(self, plan: str) -> None:
        if plan not in self._plans:
            raise InvalidRequest(f"plan must be one of {', '.join(self._plans)}, not {plan!r}", param="plan")

    async def _rows(self, query: str, *values: Any) -> list[KeyRow]:
        async with self._pool.connection() as connection:
            return [dict(row) for row in await connection.fetch(query, *values)]

    async def _row(self, query: str, *values: Any, absent: str = "no such row") -> KeyRow:
        rows = await self._rows(query, *values)
        if not rows:
            raise NotFound(absent)
        return rows[0]


async def _check_powers(
    connection: DatabaseConnection, by: Grantor | None, after: KeyRow, before: KeyRow | None = None
) -> None:
    """Raise, so that the transaction is rolled back, if the key has more powers than its grantor, unless it had them before.
    A key that was disabled had none."""
    if by is None:
        return
    powers, had = key_powers.of_key(after), None if before is None else key_powers.of_key(before)
    was_in_force = before is not None and (before["status"] == "active" or after["status"] != "active")
    if had is not None and was_in_force and not key_powers.excess(had, powers):
        return
    # A key that changes itself gives what it had before: the transaction sees its new powers.
    holder = had if had is not None and after["id"] == by.key_id else await _powers_of(connection, by)
    if field := key_powers.excess(holder, powers):
        owner = "this API key" if by.key_id else "your role in the account"
        raise Forbidden(f"{field}: {owner} cannot give more than it has", param=field, reason="scope")


async def _powers_of(connection: DatabaseConnection, by: Grantor) -> KeyPowers:
    if not by.key_id:
        # Operators grant the other directives (`AccountService`); a person keeps those that a key has.
        return replace(key_powers.of_role(by.role), directives=frozenset(directives.BY_NAME))
    # Without a lock: two keys that change each other would wait for each other.
    row = await connection.fetchrow(sql.keys.read_key, by.key_id)
    if row is None or row["status"] != "active":
        raise Forbidden("this API key is disabled", reason="disabled")
    return key_powers.of_key(dict(row))


async def claim_email(connection: DatabaseConnection, email: str, person: str | None = None) -> None:
    """Reserve an email address until the end of the transaction. It signs in to one account, so it must be unique."""
    await connection.execute(sql.accounts.lock_emails)
    if await connection.fetchval(sql.accounts.is_email_taken, email, person):
        raise InvalidRequest(
            f"email: {email} already signs in to another account: use a different address", param="email"
        )


async def _claim_for_account(connection: DatabaseConnection, email: str, account_id: str | None = None) -> None:
    """Reserve an address that an operator gives to an account. If a member has it, the error says how to release it: if no mail
    is sent, an account can add members whose addresses were never confirmed."""
    await connection.execute(sql.accounts.lock_emails)
    if member := await connection.fetchrow(sql.accounts.find_member_by_email, email):
        raise InvalidRequest(
            f"email: {email} already signs in to account {member['account_id']} as its member {member['id']}: "
            f"to release it, run `penstock accounts remove-member {member['account_id']} {member['id']}`",
            param="email",
        )
    await claim_email(connection, email, account_id)


def _text(value: str, name: str) -> str:
    value = value.strip()
    if not value or len(value) > 200 or not value.isprintable():
        raise InvalidRequest(f"{name} must be 1 to 200 printable characters", param=name)
    return value


def email_address(value: str) -> str:
    value = _text(value, "email")
    local, _, host = value.partition("@")
    if not local or not host or " " in value:
        raise InvalidRequest(f"email {value!r} is not an email address", param="email")
    return value


def _each(values: Sequence[str] | None, name: str, canonical: Callable[[str], str]) -> list[str] | None:
    """Normalise the values and remove duplicates."""
    if values is None:
        return None
    try:
        return list(dict.fromkeys(canonical(value) for value in values))
    except ValueError as exc:
        raise InvalidRequest(f"{name}: {exc}", param=name) from None


def _check_fault(fault: str | None, mode: str) -> None:
    if not fault:
        return
    if mode != "test":
        raise InvalidRequest("fault: only test keys can have one", param="fault")
    try:
        plan_of(fault)
    except ValueError as exc:
        raise InvalidRequest(
            f"fault: {str(exc)[:60]!r} is not valid; write parts such as latency=800ms, p=0.2", param="fault"
        ) from None


def _directives(names: Sequence[str] | None) -> list[str] | None:
    if names is None or tuple(names) == USUAL_DIRECTIVES:
        return None if names is None else [*names]
    for name in names:
        if name not in directives.BY_NAME:
            raise InvalidRequest(
                f"directive {name!r} is unknown; the directives are {', '.join(directives.BY_NAME)}", param="directives"
            )
    return list(dict.fromkeys(names))


def _check_scopes(scopes: Sequence[str]) -> None:
    for scope in scopes:
        if scope not in access.SCOPE_BIT:
            raise InvalidRequest(
                f"scope {scope!r} is unknown; the scopes are {', '.join(access.SCOPES)}", param="scopes"
            )
