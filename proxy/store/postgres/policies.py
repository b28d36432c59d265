"""Gas policies in Postgres. A policy belongs to an account; for other accounts it does not exist."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg
import orjson

from proxy.chains.evm.policy import Rules
from proxy.core.paging import Page
from proxy.errors import Forbidden, NotFound, Unavailable
from proxy.store.postgres import sql
from proxy.store.postgres.json_text import json_text
from proxy.store.postgres.keys import new_id
from proxy.store.postgres.pool import Pool


@dataclass(frozen=True, slots=True)
class Policy:
    """`rules`: the JSON as the owner wrote it."""

    id: str
    account: str
    network: str
    name: str
    rules: Mapping[str, Any]
    status: str
    revision: int
    created_at: datetime.datetime
    updated_at: datetime.datetime


# Entries of each list in the rules that a page of policies shows.
LISTED_ENTRIES = 100


class PolicyStore:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __repr__(self) -> str:
        return f"<PolicyStore {self._pool!r}>"

    async def create(
        self, *, account: str, network: str, live: bool, name: str, given: Mapping[str, Any], rules: Rules, most: int
    ) -> Policy:
        """Create a policy; raise Forbidden if the account already has `most`."""
        async with self._pool.connection() as connection, connection.transaction():
            await connection.execute(sql.policies.lock_policies, account)
            row = await connection.fetchrow(
                sql.policies.create_policy,
                new_id("gp"),
                account,
                network,
                live,
                name,
                json_text(given),
                *_limits(rules),
                most,
            )
        if row is None:
            raise Forbidden(f"the account's plan allows {most} gas policies: delete one first", reason="plan")
        return _policy(row)

    async def read(self, policy_id: str, *, account: str | None) -> Policy:
        """Return a policy of this account, or of any account if None."""
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(sql.policies.read_policy, policy_id, account)
        if row is None:
            raise absent(policy_id)
        return _policy(row)

    async def list_of(
        self, account: str, *, live: bool, status: str | None, page: Page, networks: Sequence[str] | None = None
    ) -> tuple[list[Policy], int]:
        """Return a page of policies, newest first, and their total number. Without `live`, only those on test networks.
        `networks`: only those on one of these. Long lists in the rules are cut."""
        async with self._pool.connection() as connection:
            wanted = (account, live, status, networks)
            rows = await connection.fetch(sql.policies.list_policies, *wanted, page.limit, page.offset, LISTED_ENTRIES)
            total = await connection.fetchval(sql.policies.count_policies, *wanted)
        return [_policy(row) for row in rows], total

    async def update(
        self,
        before: Policy,
        *,
        name: str | None,
        status: str | None,
        given: Mapping[str, Any] | None,
        rules: Rules | None,
    ) -> Policy:
        """Change a policy; None keeps a value. Raise Unavailable if it has changed since `before` was read."""
        limits = (None,) * 7 if rules is None else _limits(rules)
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(
                sql.policies.update_policy,
                before.id,
                before.account,
                name,
                status,
                None if given is None else json_text(given),
                *limits,
                before.revision,
            )
        if row is None:
            await self.read(before.id, account=before.account)  # raises NotFound if it was deleted
            raise Unavailable("the policy was changed by another request at the same time; try again")
        return _policy(row)

    async def delete(self, policy_id: str, *, account: str) -> None:
        async with self._pool.connection() as connection:
            if await connection.fetchval(sql.policies.delete_policy, policy_id, account) is None:
                raise absent(policy_id)


def absent(policy_id: str) -> NotFound:
    named = f" {policy_id}" if policy_id.startswith("gp_") and policy_id[3:].isalnum() else " with this id"
    return NotFound(f"there is no gas policy{named}")


def _limits(rules: Rules) -> tuple[Any, ...]:
    """Return the limits that the ledger enforces, in the order of their columns."""
    rate = rules.rate_limit
    rated = (None, None, False) if rate is None else (rate.requests, rate.per_seconds, rate.scope == "user")
    return rules.max_total, rules.max_per_user, rules.max_per_user_per_day, rules.reset, *rated


def _policy(row: asyncpg.Record) -> Policy:
    return Policy(
        id=row["id"],
        account=row["account_id"],
        network=row["network"],
        name=row["name"],
        rules=orjson.loads(row["rules"]),
        status=row["status"],
        revision=row["revision"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )
