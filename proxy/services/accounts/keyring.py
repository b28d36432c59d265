"""All keys, in the memory of one worker.

Keys are loaded once and then kept current in two ways: Postgres sends a notification for every change (LISTEN), and every few
seconds all changes since the last read are read again, which covers missed notifications. While Postgres is down, known keys
keep working, also in a worker that starts meanwhile: it loads the copy that its predecessor left (`key_copy`). A lookup costs
one dictionary access for a key seen before and one digest for a new one, never a query.

While the pepper is rotated, a key may be found by its digest under the previous pepper. The digest under the current one is
then stored, so that the previous pepper is no longer needed for this key. Both digests find the key until the rotation ends.
"""

from __future__ import annotations

import asyncio
import datetime
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from proxy.core import directives
from proxy.core.access import (
    ALL_SCOPES,
    Account,
    AllowedUses,
    Key,
    Limits,
    digest,
    is_well_formed,
    restrictions_of,
    scope_bits,
)
from proxy.core.bounded import make_room
from proxy.core.fault_plans import FaultPlan, plan_of
from proxy.core.limits import BucketRates
from proxy.core.usage import KeyTallies, TouchedTallies
from proxy.errors import Unavailable
from proxy.services.accounts.key_copy import KeyCopy, KeyRecord
from proxy.store.postgres.bad_rows import BadRows
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.notices import Notices
from proxy.tasks import until_set

# Raw keys cached with their records. Saves computing the digest, 4 µs.
MEMO = 131_072
# A change is timestamped slightly before it becomes visible. Reading this far back avoids missing one between two reads.
OVERLAP = datetime.timedelta(seconds=10)
# Pause before retrying Postgres.
RETRY_S = 0.5


class KeyPlan(Protocol):
    @property
    def limits(self) -> Limits: ...
    @property
    def sample_every(self) -> int: ...


class BucketReserver(Protocol):
    def reserve_rates(self, rate: BucketRates, own: BucketRates | None) -> None: ...


def utc_day() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()


# The key of the usage of people who are signed in.
SESSION_KEY = "dashboard"


class Keyring:
    def __init__(
        self,
        store: KeyStore,
        buckets: BucketReserver,
        *,
        plans: Mapping[str, KeyPlan],
        pepper: str,
        previous_pepper: str = "",
        reload_s: float,
        copy: KeyCopy | None = None,
    ) -> None:
        self._store = store
        self.copy = copy or KeyCopy()
        self._buckets = buckets
        self._plans = plans
        self._pepper = pepper.encode()
        self._previous_pepper = previous_pepper.encode()
        self._reload_s = reload_s
        self._by_digest: dict[bytes, Key] = {}
        # By key id: the digests that find the key.
        self._digests: dict[str, tuple[bytes, ...]] = {}
        # By key id: digests under the current pepper that are not stored yet.
        self._unmoved: dict[str, bytes] = {}
        self._by_id: dict[str, Key] = {}
        self._memo: dict[str, Key] = {}
        self._since = datetime.datetime.min.replace(tzinfo=datetime.UTC)
        self._noted_keys: set[str] = set()
        self._noted_accounts: set[str] = set()
        self._wake = asyncio.Event()
        self._bad = BadRows("key")
        self.accounts: dict[str, Account] = {}
        # Tallies changed since services/usage last gathered them.
        self.touched: TouchedTallies = []
        # Called with each key that is no longer valid: revoked, disabled, expired or replaced by a changed record.
        self.on_removed: list[Callable[[Key], None]] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def __repr__(self) -> str:
        return f"<Keyring {len(self._by_id)} keys of {len(self.accounts)} accounts>"

    def find(self, text: str, now: float) -> Key | None:
        """The key's record if it is known and valid now."""
        key = self._memo.get(text)
        if key is None or not key.alive:
            key = self._look_up(text)
        return None if key is None or not key.alive or key.expires_at <= now else key

    def _look_up(self, text: str) -> Key | None:
        """Find a key by digest and cache it. Drops a stale cache entry, which is cheaper than scanning for them."""
        self._memo.pop(text, None)
        key = self._by_digests(text) if is_well_formed(text) else None
        if key is not None:
            make_room(self._memo, MEMO)
            self._memo[text] = key
        return key

    def _by_digests(self, text: str) -> Key | None:
        current = digest(self._pepper, text)
        key = self._by_digest.get(current)
        if not self._previous_pepper:
            return key
        if key is None:
            key = self._by_digest.get(digest(self._previous_pepper, text))
        if key is not None and key.digest != current:
            self._unmoved[key.id] = current
            self._wake.set()
        return key

    async def load(self) -> None:
        """Read all keys. A worker starts serving after this has succeeded once."""
        day, since = utc_day(), await self._store.clock() - OVERLAP
        rows = await self._store.load(day)
        self._apply(rows)
        self._since = since
        await self.copy.replace(rows, since, day)

    async def load_copy(self) -> bool:
        """Load the predecessor's keys instead; return False if there are none. `follow` then reads what changed since."""
        day = utc_day()
        if (copied := await self.copy.read(day)) is None:
            return False
        rows, self._since = copied
        self._apply(rows)
        await self.copy.replace(rows, self._since, day)
        return True

    def listen(self, notices: Notices) -> None:
        """Have changes of keys and accounts notified to this keyring."""
        notices.listen("penstock_keys", self._note_key)
        notices.listen("penstock_accounts", self._note_account)

    async def follow(self) -> None:
        """Supervised loop: apply changes as they are notified, and read all changes every `reload_s`."""
        while True:
            await until_set(self._wake, within_s=self._reload_s)
            self._wake.clear()
            try:
                await self._move_keys()
                await self._catch_up()
            except Unavailable:
                await asyncio.sleep(RETRY_S)
                self._wake.set()

    async def _move_keys(self) -> None:
        if not self._unmoved:
            return
        moving = dict(self._unmoved)
        await self._store.move_keys(moving)
        self._unmoved = {key: current for key, current in self._unmoved.items() if key not in moving}

    def _note_key(self, key: str | None) -> None:
        if key is not None:
            self._noted_keys.add(key)
        self._wake.set()

    def _note_account(self, account: str | None) -> None:
        if account is not None:
            self._noted_accounts.add(account)
        self._wake.set()

    async def _catch_up(self) -> None:
        keys, accounts = self._noted_keys, self._noted_accounts
        self._noted_keys, self._noted_accounts = set(), set()
        day = utc_day()
        try:
            now = await self._store.clock()
            rows = await self._store.load_changed(day, keys=[*keys], accounts=[*accounts], since=self._since)
        except Unavailable:
            self._noted_keys |= keys
            self._noted_accounts |= accounts
            raise
        self._since = now - OVERLAP
        self._apply(rows)
        await self.copy.append(rows, self._since, day)

    def _apply(self, rows: Iterable[KeyRecord]) -> None:
        now = time.monotonic()
        for row in rows:
            with self._bad.skipped(key=row["id"]):
                self._apply_row(row, now)
                continue
            # A record that cannot be read is not a valid key: its restrictions are not known.
            if (old := self._by_id.get(row["id"])) is not None:
                self.remove(old)

    def _apply_row(self, row: KeyRecord, now: float) -> None:
        old = self._by_id.get(row["id"])
        new = self._key(row, now)
        if old is not None and new is not None and _same(old, new):
            old.digest = new.digest
            self._index(old, row["previous_digest"])
            return
        if old is not None:
            self.remove(old)
        if new is not None:
            self.add(new)
            self._index(new, row["previous_digest"])

    def add(self, key: Key) -> None:
        """Make the key known."""
        self._buckets.reserve_rates(key.rate, key.own_rate)
        key.tallies = KeyTallies(key.account.id, key.id, self.touched)
        self._by_id[key.id] = key
        self._index(key)

    def _index(self, key: Key, previous: bytes | None = None) -> None:
        """Let exactly these digests find the key."""
        by_digest = dict.fromkeys((key.digest,) if previous is None else (key.digest, previous), key)
        digests = tuple(by_digest)
        if self._digests.get(key.id) == digests:
            return
        for each in self._digests.get(key.id, ()):
            self._by_digest.pop(each, None)
        self._digests[key.id] = digests
        self._by_digest.update(by_digest)

    def by_id(self, key_id: str, now: float) -> Key | None:
        """The valid key with this id."""
        key = self._by_id.get(key_id)
        return None if key is None or key.expires_at <= now else key

    async def session_key(self, account_id: str) -> Key:
        """A key with all scopes for a person who is signed in to the account. It is not in the keyring and counts no requests,
        but upstream calls that it makes are paid from the account's units, and are in its usage."""
        row = await self._store.read_account(account_id)
        plan = self._plans[row["plan"] if row["plan"] in self._plans else "free"].limits
        rate = BucketRates(
            row["slot"],
            row["requests_per_second"] or plan.requests_per_second,
            row["units_per_second"] or plan.units_per_second,
        )
        self._buckets.reserve_rates(rate, None)
        account = Account(id=account_id, plan=row["plan"], day_limit=0)
        key = Key(
            id="",
            lineage="",
            digest=b"",
            live=True,
            scopes=ALL_SCOPES,
            account=account,
            rate=rate,
            disabled=False,
            expires_at=math.inf,
        )
        key.tallies = KeyTallies(account_id, SESSION_KEY, self.touched)
        return key

    def successor(self, key: Key) -> Key | None:
        """The current record of a changed key, or None if it is no longer valid."""
        current = self._by_id.get(key.id)
        return current if current is not None and current.expires_at > time.monotonic() else None

    def remove(self, key: Key) -> None:
        """Invalidate a key. Holders of the old record see `alive` turn false."""
        key.invalidate()
        del self._by_id[key.id]
        for each in self._digests.pop(key.id, ()):
            self._by_digest.pop(each, None)
        for notify in self.on_removed:
            notify(key)

    def _key(self, row: KeyRecord, now: float) -> Key | None:
        expires_in_s = row["expires_in_s"]
        if row["status"] == "revoked" or (expires_in_s is not None and expires_in_s <= 0):
            return None
        plan = self._plans[row["plan"] if row["plan"] in self._plans else "free"].limits
        rate = _rate(row, plan)
        return Key(
            id=row["id"],
            lineage=row["lineage_id"],
            digest=row["digest"],
            live=row["mode"] == "live",
            scopes=scope_bits(row["scopes"]),
            account=self._account(row, plan),
            rate=rate,
            own_rate=_own_rate(row, rate),
            disabled=row["status"] == "disabled",
            expires_at=math.inf if expires_in_s is None else now + expires_in_s,
            restrictions=restrictions_of(row["allowed_ips"], row["allowed_origins"], _uses(row)),
            directives=directives.allowed_to(row["directives"]),
            fault=_fault(row),
            allow_in_url=row["allow_in_url"],
            private_transactions=row["private_transactions"],
        )

    def _account(self, row: KeyRecord, plan: Limits) -> Account:
        """The record that all keys of an account share. It holds the daily quota."""
        own = row["requests_per_day"]
        day_limit = plan.requests_per_day if own is None else own
        account = self.accounts.get(row["account_id"])
        if account is None:
            account = self.accounts[row["account_id"]] = Account(
                id=row["account_id"], plan=row["plan"], day_limit=day_limit
            )
            account.remaining = day_limit - row["used_today"]
            account.exhausted = 0 < day_limit <= row["used_today"]
        elif account.day_limit != day_limit or account.plan != row["plan"]:
            account.plan, account.day_limit = row["plan"], day_limit
            account.remaining = day_limit - row["used_today"]
            account.exhausted = 0 < day_limit <= row["used_today"]
        account.records_params = row["record_params"]
        every = self._plans[row["plan"] if row["plan"] in self._plans else "free"].sample_every
        # A local copy of a previous version does not have this column.
        left_s = row.get("captured_for_s") or 0.0
        account.sample(every, time.time() + left_s if left_s > 0.0 else 0.0)
        return account


_COMPARED = (
    "counts_day",
    "scopes",
    "rate",
    "own_rate",
    "disabled",
    "restrictions",
    "directives",
    "fault",
    "records_params",
    "allow_in_url",
    "private_transactions",
)


def _uses(row: KeyRecord) -> AllowedUses:
    """A local copy of a previous version does not have these columns."""
    return AllowedUses(
        networks=frozenset(row.get("allowed_networks") or ()),
        methods=frozenset(row.get("allowed_methods") or ()),
        contracts=frozenset(each.lower() for each in row.get("allowed_contracts") or ()),
    )


def _fault(row: KeyRecord) -> FaultPlan | None:
    """The saved plan of a test key. One that this version cannot read is ignored."""
    try:
        return plan_of(row["fault"]) if row["fault"] and row["mode"] == "test" else None
    except ValueError:
        return None


def _rate(row: KeyRecord, plan: Limits) -> BucketRates:
    """The account's limits: its own, or the plan's."""
    return BucketRates(
        row["account_slot"],
        row["account_requests_per_second"] or plan.requests_per_second,
        row["account_units_per_second"] or plan.units_per_second,
    )


def _own_rate(row: KeyRecord, account: BucketRates) -> BucketRates | None:
    """The key's own limits; None if they are no lower than the account's, which may have been lowered since."""
    requests = min(row["requests_per_second"] or account.requests_per_second, account.requests_per_second)
    units = min(row["units_per_second"] or account.units_per_second, account.units_per_second)
    if (requests, units) == (account.requests_per_second, account.units_per_second):
        return None
    return BucketRates(row["slot"], requests, units)


def _same(old: Key, new: Key) -> bool:
    """Whether the relevant fields are equal. Expiry times may differ slightly because two clocks are involved."""
    if math.isinf(old.expires_at) != math.isinf(new.expires_at) or abs(old.expires_at - new.expires_at) > 0.5:
        return False
    return all(getattr(old, name) == getattr(new, name) for name in _COMPARED)
