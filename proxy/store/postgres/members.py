"""Members of accounts, invitations and visits of operators in Postgres.

Changes of one account's members run one after the other, and each checks that its author is still an owner: one who is being
removed cannot invite a successor at the same moment. The author may also be a key with the scope `members:manage`: it gives
only roles that may do no more than the key, and leaves owners alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from proxy.core.key_powers import excess, of_key, of_role
from proxy.core.roles import Role
from proxy.errors import Forbidden, InvalidRequest, NotFound
from proxy.store.postgres import sql
from proxy.store.postgres.keys import claim_email, email_address, is_key_id, new_id
from proxy.store.postgres.pool import PATIENT_S, DatabaseConnection, Pool

MemberRow = dict[str, Any]


@dataclass(frozen=True, slots=True)
class NewMember:
    """A person who has accepted an invitation, and the address of the account's first owner."""

    id: str
    account_id: str
    email: str
    role: str
    first_owner: str


class MemberStore:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __repr__(self) -> str:
        return f"<MemberStore {self._pool!r}>"

    async def members(self, account: str) -> list[MemberRow]:
        return await self._rows(sql.members.list_members, account)

    async def invitations(self, account: str) -> list[MemberRow]:
        return await self._rows(sql.members.list_invitations, account)

    async def invite(
        self, account: str, by: str, *, email: str, role: Role, digest: bytes, lasts_s: float, most: int
    ) -> MemberRow:
        """Add an invitation, instead of an earlier one to the address. `most`: the limit of members and invitations."""
        address = email_address(email)
        async with self._team(account, by) as connection:
            await _check_role(connection, by, role)
            if await connection.fetchval(sql.members.is_in_account, account, address):
                raise InvalidRequest(f"email: {address} is already a member of this account", param="email")
            if await connection.fetchval(sql.members.count_team, account, address) >= most:
                raise Forbidden(f"an account can have {most} members and invitations: remove one first", reason="plan")
            row = await connection.fetchrow(
                sql.members.invite, new_id("inv"), account, by, address, role, digest, lasts_s
            )
        assert row is not None
        return dict(row)

    async def revoke_invitation(self, account: str, by: str, invitation: str) -> str:
        """Return the address to which it was sent."""
        async with self._team(account, by) as connection:
            email = await connection.fetchval(sql.members.revoke_invitation, account, invitation)
        if email is None:
            raise NotFound(f"there is no invitation {invitation}")
        return str(email)

    async def read_invitation(self, digests: Sequence[bytes]) -> MemberRow | None:
        """The address, role and account of a valid invitation. It is not used up."""
        rows = await self._rows(sql.members.read_invitation, digests)
        return rows[0] if rows else None

    async def accept(self, digests: Sequence[bytes], password_hash: str) -> NewMember | None:
        """Use up an invitation. Returns None if it is not valid. If the address is taken, the invitation stays."""
        async with self._pool.connection() as connection, connection.transaction():
            row = await connection.fetchrow(sql.members.take_invitation, digests)
            if row is None:
                return None
            joined = NewMember(id=new_id("mem"), **row)
            await claim_email(connection, joined.email)
            await connection.execute(sql.members.add_member, joined.id, joined.account_id, joined.email, joined.role)
            await connection.execute(sql.sessions.set_password, joined.id, password_hash)
        return joined

    async def change_role(self, account: str, by: str, member: str, role: Role) -> tuple[str, str]:
        """Return the member's address and former role. Invitations by the member end: the new role may not allow them."""
        async with self._team(account, by) as connection:
            row = await self._member(connection, account, by, member)
            await _check_role(connection, by, role)
            await connection.execute(sql.members.change_role, account, member, role)
            await connection.execute(sql.members.end_invitations_by, member)
        return row["email"], row["role"]

    async def remove(self, account: str, by: str, member: str) -> str:
        """Remove a member and end their sessions. Returns the address."""
        async with self._team(account, by) as connection:
            row = await self._member(connection, account, by, member)
            await connection.execute(sql.members.remove_members, [member])
        return str(row["email"])

    async def begin_visit(self, account: str, operator: str, *, lasts_s: float) -> str:
        """Return the id of the visit, which is that of a person in the account."""
        visit = new_id("visit")
        async with self._pool.connection() as connection:
            await connection.execute(sql.members.begin_visit, visit, account, operator, lasts_s)
        return visit

    async def purge(self) -> None:
        """Delete members who are left in deleted accounts."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            if orphans := [row["id"] for row in await connection.fetch(sql.members.list_orphans)]:
                await connection.execute(sql.members.remove_members, orphans)

    @asynccontextmanager
    async def _team(self, account: str, by: str) -> AsyncIterator[DatabaseConnection]:
        """A transaction in which only this owner or key changes the account's members."""
        async with self._pool.connection() as connection, connection.transaction():
            await connection.execute(sql.members.lock_team, account)
            # A second statement, because it sees what was committed while the first one waited.
            if not await connection.fetchval(sql.members.may_manage_members, by, account):
                raise Forbidden("only an owner of the account can change its members")
            yield connection

    async def _member(self, connection: DatabaseConnection, account: str, by: str, member: str) -> MemberRow:
        if member == account:
            raise InvalidRequest(
                "the first owner cannot be changed or removed: change the account's email address, or delete the account"
            )
        row = await connection.fetchrow(sql.members.read_member, account, member)
        if row is None:
            raise NotFound(f"there is no member {member}")
        if is_key_id(by) and row["role"] == "owner":
            raise Forbidden("API keys cannot change owners: an owner can in the dashboard", reason="role")
        return dict(row)

    async def _rows(self, query: str, *values: Any) -> list[MemberRow]:
        async with self._pool.connection() as connection:
            return [dict(row) for row in await connection.fetch(query, *values)]


async def _check_role(connection: DatabaseConnection, by: str, role: Role) -> None:
    """Raise if a key would give a role that may do more than the key."""
    if not is_key_id(by):
        return
    row = await connection.fetchrow(sql.keys.read_key, by)
    field = "scopes" if row is None or role == "owner" else excess(of_key(dict(row)), of_role(role))
    if field:
        raise Forbidden(f"role: {role} may do more than this API key, by its {field}", param="role", reason="role")
