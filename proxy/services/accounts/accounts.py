"""Accounts and keys, as account holders and operators manage them.

A holder sees only the keys of their own account; any other key is a 404. A key's own limits never exceed the account's.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from proxy.core import access
from proxy.core.access import Limits
from proxy.core.directives import BY_NAME, USUAL
from proxy.core.paging import Page
from proxy.errors import Forbidden, InvalidRequest, NotFound
from proxy.services.accounts.known_uses import KnownUses
from proxy.store.postgres.keys import (
    NEVER,
    NO_DETAILS,
    USUAL_DIRECTIVES,
    Grantor,
    KeyDetailChange,
    KeyRestrictionChange,
    KeyRow,
    KeyStore,
    LimitChange,
)

__all__ = ("NEVER", "AccountService", "Grantor", "KeyDetailChange")

INHERIT = -1


class AccountPlan(Protocol):
    @property
    def limits(self) -> Limits: ...


class LastUsed(Protocol):
    async def last_used(self, account: str) -> dict[str, datetime.datetime]: ...
    async def requests_of_day(self, account: str, day: datetime.date) -> int: ...


@dataclass(frozen=True, slots=True)
class DayUsage:
    """Requests used today. `left` is None if the account has no daily limit."""

    used: int
    left: int | None
    resets_at: datetime.datetime


class AccountService:
    def __init__(self, keys: KeyStore, usage: LastUsed, *, plans: Mapping[str, AccountPlan], uses: KnownUses) -> None:
        self._keys = keys
        self._usage = usage
        self._plans = plans
        self._uses = uses

    def __repr__(self) -> str:
        return f"<AccountService {self._keys!r}>"

    # For the account's holder

    async def read(self, account: str) -> KeyRow:
        return await self._keys.read_account(account)

    async def record_params(self, account: str, *, wanted: bool) -> None:
        """Record the params of the account's calls from now on, or stop recording them."""
        await self._keys.update_account(account, record_params=wanted)

    def limits_of(self, row: KeyRow) -> Limits:
        """The account's own limits where they are set, otherwise the plan's."""
        plan = self._plans[row["plan"] if row["plan"] in self._plans else "free"].limits
        day = row["requests_per_day"]
        return Limits(
            row["requests_per_second"] or plan.requests_per_second,
            row["units_per_second"] or plan.units_per_second,
            plan.requests_per_day if day is None else day,
        )

    def _used(self, row: KeyRow, counted: int, *, leased: int) -> int:
        """Usage counts refused requests too, so under a daily limit the result is at most the number that was leased."""
        return min(counted, leased) if self.limits_of(row).requests_per_day else counted

    async def today(self, row: KeyRow) -> DayUsage:
        now = datetime.datetime.now(datetime.UTC)
        limit = self.limits_of(row).requests_per_day
        counted = await self._usage.requests_of_day(row["id"], now.date())
        used = self._used(row, counted, leased=await self._keys.usage_of_today(row["id"]))
        midnight = datetime.datetime.combine(now.date(), datetime.time(), datetime.UTC) + datetime.timedelta(days=1)
        return DayUsage(used, max(0, limit - used) if limit else None, midnight)

    async def used(self, account: str) -> dict[str, Any]:
        """How much of each limit of its plan the account uses, by the limit's name."""
        return await self._keys.read_used(account)

    async def keys(self, account: str) -> list[KeyRow]:
        """Keys, newest first, each with the time of its last use."""
        used = await self._usage.last_used(account)
        rows = await self._keys.list_keys(account)
        return [{**row, "last_used_at": used.get(row["id"])} for row in reversed(rows)]

    async def key(self, account: str, key_id: str) -> KeyRow:
        await self._own(account, key_id)
        return next(row for row in await self.keys(account) if row["id"] == key_id)

    async def create_key(
        self,
        account: str,
        *,
        name: str,
        mode: access.Mode,
        scopes: Sequence[str],
        own: LimitChange,
        restrictions: KeyRestrictionChange,
        details: KeyDetailChange = NO_DETAILS,
        directives: Sequence[str] | None = None,
        by: Grantor | None = None,
    ) -> tuple[KeyRow, str]:
        """Create a key that has at most the powers of its grantor."""
        await self._check(account, own)
        self._uses.check(restrictions)
        _check_grant(directives, ())
        return await self._keys.create_key(
            account,
            name=name,
            mode=mode,
            scopes=scopes,
            own=own,
            restrictions=restrictions,
            details=details,
            allowed_directives=directives,
            by=by,
        )

    async def update_key(
        self,
        account: str,
        key_id: str,
        *,
        name: str | None,
        scopes: Sequence[str] | None,
        own: LimitChange,
        restrictions: KeyRestrictionChange,
        status: str | None,
        details: KeyDetailChange = NO_DETAILS,
        directives: Sequence[str] | None = None,
        fault: str | None = None,
        by: Grantor | None = None,
    ) -> KeyRow:
        row = await self._own(account, key_id, by)
        await self._check(account, own)
        self._uses.check(restrictions)
        _check_grant(directives, row["directives"] or ())
        await self._keys.update_key(
            key_id,
            name=name,
            scopes=scopes,
            own=own,
            restrictions=restrictions,
            details=details,
            allowed_directives=directives,
            fault=fault,
            status=status,
            by=by,
        )
        return await self.key(account, key_id)

    async def rotate_key(
        self, account: str, key_id: str, *, overlap_s: float, by: Grantor | None = None
    ) -> tuple[KeyRow, str]:
        await self._own(account, key_id, by)
        return await self._keys.rotate_key(key_id, overlap_s=overlap_s, by=by)

    async def revoke_key(self, account: str, key_id: str, *, by: Grantor | None = None) -> None:
        row = await self._own(account, key_id, by)
        if row["status"] != "revoked":
            await self._keys.set_key_status(key_id, "revoked")

    async def _own(self, account: str, key_id: str, by: Grantor | None = None) -> KeyRow:
        """A key of the account, for a grantor who may change it."""
        row = await self._keys.read_key(key_id)
        if row["account_id"] != account:
            raise NotFound(f"there is no key {key_id}")
        if by is None or not by.key_id or row["mode"] == "test":
            return row
        if (await self._keys.read_key(by.key_id))["mode"] == "test":
            raise Forbidden("test keys cannot change live keys: use a live key", reason="mode")
        return row

    async def _check(self, account: str, own: LimitChange) -> None:
        most = self.limits_of(await self._keys.read_account(account))
        for name in ("requests_per_second", "units_per_second"):
            wanted, allowed = getattr(own, name), getattr(most, name)
            if wanted is not None and wanted > allowed:
                raise InvalidRequest(f"{name}: must be at most {allowed}, the account's own limit", param=name)

    # For operators

    async def page(self, search: str, page: Page) -> tuple[list[KeyRow], int]:
        """One page of accounts, each with its use today, and the total number of accounts."""
        rows, total = await self._keys.page_accounts(search, page)
        return [
            {**row, "used_today": self._used(row, row["asked_today"], leased=row["leased_today"])} for row in rows
        ], total

    async def names(self, account_ids: Sequence[str]) -> dict[str, str]:
        """The names of accounts, by id."""
        return await self._keys.names(account_ids)

    async def create(self, *, name: str, email: str, plan: str, own: LimitChange) -> KeyRow:
        return await self._keys.create_account(name=name, email=email, plan=plan, own=own)

    async def update(
        self,
        account: str,
        *,
        name: str | None,
        email: str | None,
        plan: str | None,
        own: LimitChange,
        disabled: bool | None,
    ) -> KeyRow:
        return await self._keys.update_account(account, name=name, email=email, plan=plan, own=own, disabled=disabled)


def _check_grant(wanted: Sequence[str] | None, has: Sequence[str]) -> None:
    """Some directives are granted by operators only. A key that has one keeps it."""
    for name in wanted or ():
        if name in BY_NAME and name not in USUAL and name not in has:
            raise Forbidden(
                f"directives: {name!r} can be granted only by an operator", param="directives", reason="directive"
            )


def directives_in(body: Mapping[str, Any]) -> Sequence[str] | None:
    """Directives in a request body: an absent list is left unchanged, null restores the usual ones."""
    if "directives" not in body:
        return None
    return USUAL_DIRECTIVES if body["directives"] is None else body["directives"]


def limits_in(body: Mapping[str, Any]) -> LimitChange:
    """Limits in a request body: an absent member is left unchanged, null restores the inherited value."""

    def given(name: str) -> int | None:
        if name not in body:
            return None
        return INHERIT if body[name] is None else int(body[name])

    return LimitChange(
        requests_per_second=given("requests_per_second"),
        units_per_second=given("units_per_second"),
        requests_per_day=given("requests_per_day"),
    )


def restrictions_in(body: Mapping[str, Any]) -> KeyRestrictionChange:
    """Restrictions in a request body: an absent list is left unchanged, an empty one removes the restriction."""
    return KeyRestrictionChange(
        ips=body.get("allowed_ips"),
        origins=body.get("allowed_origins"),
        networks=body.get("allowed_networks"),
        methods=body.get("allowed_methods"),
        contracts=body.get("allowed_contracts"),
        in_url=body.get("allow_in_url"),
        private=body.get("private_transactions"),
    )
