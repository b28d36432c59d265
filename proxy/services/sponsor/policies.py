"""What owners do with their policies, and policies ready to decide by.

A policy is kept in memory with its rules read; the ledger refuses who decides by an old one, and a refusal is only told after
the newest was looked at. So nothing is ever decided by what is not true any more, and most requests need no look.
"""

from __future__ import annotations

import datetime
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proxy.chains.evm import abi, address
from proxy.chains.registry import Network
from proxy.core import policy
from proxy.core.access import Key
from proxy.core.paging import Page
from proxy.core.policy import BadRule, FamilyFormats, Rules
from proxy.errors import InvalidRequest
from proxy.store.ledger import LedgerStore, LimitMeter, UserMeter
from proxy.store.policies import Policy, PolicyStore, absent

__all__ = ("EffectivePolicy", "LimitMeter", "Policy", "PolicyService", "PolicySpend", "UserMeter", "read_rules")

# Policies in memory, and members of their lists in all: four lists of ten thousand are some megabytes.
REMEMBERED = 256
REMEMBERED_MEMBERS = 100_000
# A selector is of a signature without short names.
_ALIAS = re.compile(r"\b(u?int)\b", re.ASCII)
DAYS_SHOWN = 31


@dataclass(frozen=True, slots=True)
class EffectivePolicy:
    policy: Policy
    rules: Rules

    @property
    def members(self) -> int:
        """Of all its lists."""
        return sum(len(value) for value in self.policy.rules.values() if isinstance(value, list))


@dataclass(frozen=True, slots=True)
class PolicySpend:
    """`day`: the UTC day that all of it is of."""

    rules: Rules
    day: datetime.date
    total: LimitMeter
    days: list[tuple[datetime.date, LimitMeter]]
    users: list[UserMeter]
    user_count: int


class PolicyService:
    def __init__(self, store: PolicyStore, ledger: LedgerStore, *, most: Mapping[str, int]) -> None:
        """`most`: policies of an account, by plan."""
        self._store = store
        self._ledger = ledger
        self._most = most
        self._ready: OrderedDict[str, EffectivePolicy] = OrderedDict()
        self._members = 0

    def __repr__(self) -> str:
        return f"<PolicyService {len(self._ready)} in memory, {self._members} members of lists>"

    async def create(self, key: Key, network: Network, *, name: str, given: Mapping[str, Any]) -> Policy:
        return await self._store.create(
            account=key.account.id,
            network=network.id,
            live=network.is_live,
            name=name,
            given=given,
            rules=read_rules(given),
            most=self._most[key.account.plan],
        )

    async def read(self, key: Key, policy_id: str) -> Policy:
        return await self._store.read(policy_id, account=key.account.id)

    async def page(self, key: Key, page: Page, *, status: str | None) -> tuple[list[Policy], int]:
        return await self._store.list_of(key.account.id, live=key.live, status=status, page=page)

    async def update(
        self, before: Policy, *, name: str | None, status: str | None, changes: Mapping[str, Any] | None
    ) -> Policy:
        """Rules that are named change, to null: they go; the others stay."""
        given = rules = None
        if changes is not None:
            given = {rule: value for rule, value in {**before.rules, **changes}.items() if value is not None}
            rules = read_rules(given)
        return await self._store.update(before, name=name, status=status, given=given, rules=rules)

    async def delete(self, policy_id: str, *, account: str) -> None:
        await self._store.delete(policy_id, account=account)
        self._forget(policy_id)

    async def spend(self, found: Policy, page: Page) -> PolicySpend:
        day = datetime.datetime.now(datetime.UTC).date()
        users, count = await self._ledger.users(found.id, day, page)
        return PolicySpend(
            rules=read_rules(found.rules),
            day=day,
            total=await self._ledger.total(found.id, day),
            days=await self._ledger.days(found.id, limit=DAYS_SHOWN),
            users=users,
            user_count=count,
        )

    # To decide by

    async def ready(self, policy_id: str, *, account: str, fresh: bool = False) -> EffectivePolicy:
        """The account's policy, from memory unless it must be the newest."""
        found = None if fresh else self._ready.get(policy_id)
        if found is None:
            read = await self._store.read(policy_id, account=account)
            found = EffectivePolicy(read, read_rules(read.rules))
            self._remember(policy_id, found)
        if found.policy.account != account:
            raise absent(policy_id)
        self._ready.move_to_end(policy_id)
        return found

    def _remember(self, policy_id: str, found: EffectivePolicy) -> None:
        """Whoever was not asked for longest goes; the newest stays, however large it is."""
        self._forget(policy_id)
        self._ready[policy_id] = found
        self._members += found.members
        while len(self._ready) > REMEMBERED or (self._members > REMEMBERED_MEMBERS and len(self._ready) > 1):
            self._forget(next(iter(self._ready)))

    def _forget(self, policy_id: str) -> None:
        found = self._ready.pop(policy_id, None)
        self._members -= found.members if found is not None else 0


def read_rules(given: Mapping[str, Any]) -> Rules:
    try:
        return policy.parse(given, FORMS)
    except BadRule as exc:
        raise InvalidRequest(str(exc)) from None


def _address(text: str) -> bytes:
    found = address.parse(text)
    if found is None or address.is_mistyped(text):
        raise ValueError("is no address, or its checksum (EIP-55) is wrong")
    return found


def _selector(text: str) -> bytes:
    if text.startswith("0x"):
        return bytes.fromhex(text[2:])
    name, _, types = text.partition("(")
    return abi.selector(f"{name}({_ALIAS.sub(lambda found: found[0] + '256', types)}")


def _moment(text: str) -> float:
    # More digits than microseconds are cut off: the standard library reads no more.
    whole, _, part = text.removesuffix("Z").partition(".")
    return datetime.datetime.fromisoformat(f"{whole}.{part[:6].ljust(6, '0')}+00:00").timestamp()


FORMS = FamilyFormats(_address, _selector, _moment)
