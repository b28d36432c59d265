"""Gas policies: create, read, update and delete, and a cache of parsed policies for decisions.

Decisions use the cached policy, so most requests need no query. They are still never made by an outdated policy: the ledger
rejects a reservation made under an old revision, and before a request is refused the newest revision is read.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.chains.evm import abi, address, policy
from proxy.chains.evm.policy import BadRule, FamilyFormats, Rules
from proxy.chains.registry import Network
from proxy.core.access import Key
from proxy.core.lru_cache import LruCache
from proxy.core.paging import Page
from proxy.errors import InvalidRequest
from proxy.store.postgres.ledger import LedgerStore, LimitMeter, UserMeter
from proxy.store.postgres.policies import Policy, PolicyStore, absent
from proxy.tasks import client_of_task
from proxy.turn_queue import TurnQueue

__all__ = (
    "EffectivePolicy",
    "LimitMeter",
    "Policy",
    "PolicyService",
    "PolicySpend",
    "UserMeter",
    "read_limits",
    "read_rules",
)

# Bounds the memory of cached policies by the entries of their lists: some megabytes for four lists of ten thousand entries.
# The rest of a policy counts as this many entries.
MAX_CACHED_ENTRIES = 100_000
OTHER_ENTRIES = 50
# A selector is the hash of a signature with the full type names: uint256, not uint.
_ALIAS = re.compile(r"\b(u?int)\b", re.ASCII)
DAYS_SHOWN = 31
# Entries of all lists of a policy together: reading a stored policy with as many takes 4 ms.
MOST_ENTRIES = 20_000
# Entries that are read in one step, about 1 ms.
ENTRIES_PER_TURN = 200


@dataclass(frozen=True, slots=True)
class EffectivePolicy:
    """A policy with its rules parsed."""

    policy: Policy
    rules: Rules

    @property
    def entries(self) -> int:
        """Its weight in the cache."""
        return OTHER_ENTRIES + sum(len(value) for value in self.policy.rules.values() if isinstance(value, list))


@dataclass(frozen=True, slots=True)
class PolicySpend:
    """A policy's spend as of `day`, a UTC day."""

    rules: Rules
    day: datetime.date
    total: LimitMeter
    days: list[tuple[datetime.date, LimitMeter]]
    users: list[UserMeter]
    user_count: int


class PolicyService:
    def __init__(self, store: PolicyStore, ledger: LedgerStore, turns: TurnQueue, *, most: Mapping[str, int]) -> None:
        """`most`: the maximum number of policies of an account, by plan."""
        self._store = store
        self._ledger = ledger
        self._turns = turns
        self._most = most
        self._cached: LruCache[str, EffectivePolicy] = LruCache(
            MAX_CACHED_ENTRIES, lambda _, effective: effective.entries
        )

    def __repr__(self) -> str:
        return f"<PolicyService {self._cached!r}>"

    async def create(self, key: Key, network: Network, *, name: str, given: Mapping[str, Any]) -> Policy:
        return await self._store.create(
            account=key.account.id,
            network=network.id,
            live=network.is_live,
            name=name,
            given=given,
            rules=await self._check_rules(given),
            most=self._most[key.account.plan],
        )

    async def read(self, key: Key, policy_id: str) -> Policy:
        return await self._store.read(policy_id, account=key.account.id)

    async def page(self, key: Key, page: Page, *, status: str | None) -> tuple[list[Policy], int]:
        return await self._store.list_of(
            key.account.id, live=key.live, status=status, page=page, networks=key.only_networks
        )

    async def update(
        self, before: Policy, *, name: str | None, status: str | None, changes: Mapping[str, Any] | None
    ) -> Policy:
        """Merge `changes` into the rules: a rule set to null is removed, a rule that is not named stays as it is."""
        given = rules = None
        if changes is not None:
            given = {rule: value for rule, value in {**before.rules, **changes}.items() if value is not None}
            rules = await self._check_rules(given)
        return await self._store.update(before, name=name, status=status, given=given, rules=rules)

    async def delete(self, policy_id: str, *, account: str) -> None:
        await self._store.delete(policy_id, account=account)
        self._cached.pop(policy_id, None)

    async def spend(self, stored: Policy, page: Page) -> PolicySpend:
        day = datetime.datetime.now(datetime.UTC).date()
        users, count = await self._ledger.users(stored.id, day, page)
        return PolicySpend(
            rules=read_limits(stored.rules),
            day=day,
            total=await self._ledger.total(stored.id, day),
            days=await self._ledger.days(stored.id, limit=DAYS_SHOWN),
            users=users,
            user_count=count,
        )

    async def totals(self, policies: Sequence[Policy]) -> dict[str, LimitMeter]:
        """The totals of each policy, by its id."""
        return await self._ledger.totals([each.id for each in policies], datetime.datetime.now(datetime.UTC).date())

    # For decisions

    async def effective(self, policy_id: str, *, account: str, fresh: bool = False) -> EffectivePolicy:
        """The account's policy; from the cache unless `fresh`."""
        effective = None if fresh else self._cached.get(policy_id)
        if effective is None:
            read = await self._store.read(policy_id, account=account)
            effective = EffectivePolicy(read, await self._read_rules(read.rules, _STORED_FORMATS))
            self._cached[policy_id] = effective
        if effective.policy.account != account:
            raise absent(policy_id)
        return effective

    async def _check_rules(self, given: Mapping[str, Any]) -> Rules:
        if sum(len(given.get(name) or ()) for name in policy.LISTS) > MOST_ENTRIES:
            raise InvalidRequest(f"rules: the lists may have {MOST_ENTRIES} entries together", param="rules")
        return await self._read_rules(given, EVM_FORMATS)

    async def _read_rules(self, given: Mapping[str, Any], forms: FamilyFormats) -> Rules:
        """Read the rules. Long lists are read a part in each turn of the account. Raises InvalidRequest."""
        lists = {name: given[name] for name in policy.LISTS if given.get(name) is not None}
        client, entries = client_of_task.get(), {name: set[bytes]() for name in lists}
        try:
            for name, texts in lists.items():
                for first in range(0, len(texts), ENTRIES_PER_TURN):
                    if first:
                        await self._turns.wait(client)
                    entries[name].update(policy.entries(name, texts[first : first + ENTRIES_PER_TURN], forms, first))
        except BadRule as exc:
            raise InvalidRequest.naming(str(exc)) from None
        return policy.with_lists(read_limits(given), entries)


def read_limits(given: Mapping[str, Any]) -> Rules:
    """The rules without the lists."""
    return read_rules(policy.without_lists(given))


def read_rules(given: Mapping[str, Any]) -> Rules:
    try:
        return policy.parse(given, EVM_FORMATS)
    except BadRule as exc:
        raise InvalidRequest.naming(str(exc)) from None


def _address(text: str) -> bytes:
    parsed = address.parse(text)
    if parsed is None or address.is_mistyped(text):
        raise ValueError("is not an address, or its EIP-55 checksum is wrong")
    return parsed


def _selector(text: str) -> bytes:
    if text.startswith("0x"):
        return bytes.fromhex(text[2:])
    name, _, types = text.partition("(")
    return abi.selector(f"{name}({_ALIAS.sub(lambda match: match[0] + '256', types)}")


def _timestamp(text: str) -> float:
    # datetime parses at most microseconds: further digits are cut off.
    whole, _, part = text.removesuffix("Z").partition(".")
    return datetime.datetime.fromisoformat(f"{whole}.{part[:6].ljust(6, '0')}+00:00").timestamp()


EVM_FORMATS = FamilyFormats(_address, _selector, _timestamp)
# For rules that are stored: their addresses were checked, which takes most of the time.
_STORED_FORMATS = FamilyFormats(lambda text: bytes.fromhex(text[2:]), _selector, _timestamp)
