"""The memory that a worker holds for its clients.

Everything that a client can make the worker keep for longer than a step of work, and whose size the client chooses, is counted
here in bytes: the kinds of `KINDS`. A client is an account, or the place of an address before its key is known. Three rules:

- Worker: all kinds together hold no more than `server.max_held_bytes`.
- Kind: a sixteenth of that is kept for each kind. The rest is for all of them, so no kind can starve another.
- Account: an account may hold no more, of all kinds together, than stays free for others. So one account alone gets less than
  half, a second one half of the rest, and so on: however many accounts take as much as they can, there is room for the next.

A client that needs room and has none is refused, or waits unread at its source (`wait`): waiting clients are called, in the
order of the account's calls, as soon as others have given back theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Literal, TypeAlias, final, get_args

from proxy import telemetry

# Bodies that are still arriving, replies that cannot be sent yet, open subscriptions with their filters, past events for
# subscribers that resume, back-tests of webhooks, records for the request log, and batches that wait for their turn. Filters of
# polls are held by their clients and upstreams.
Kind: TypeAlias = Literal["bodies", "replies", "subscriptions", "replays", "backtests", "records", "batches"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
# The part of the memory that is kept for each kind.
KIND_PART: Final = 16


@final
class MemoryBudget:
    """The memory of one worker for all kinds and accounts."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.total = 0
        # Bytes that are kept for each kind, and how many bytes beyond those are free.
        self.kept = most // KIND_PART
        self.free = most - len(KINDS) * self.kept
        self._by_account: dict[str, int] = {}
        # Clients that wait for room, by account. Each is called to take its room, and returns whether it has.
        self._waiting: dict[str, deque[Callable[[], bool]]] = {}
        self._lines = {kind: BudgetLine(self, kind) for kind in KINDS}

    def __repr__(self) -> str:
        waiting = sum(map(len, self._waiting.values()))
        accounts = len(self._by_account)
        return f"<MemoryBudget {self.total} of {self.most} bytes for {accounts} accounts, {waiting} waiting>"

    def of(self, kind: Kind) -> BudgetLine:
        return self._lines[kind]

    def held_by(self, account: str) -> int:
        return self._by_account.get(account, 0)

    def taken(self, account: str, size: int, beyond_kept: int) -> None:
        """A kind has taken this many bytes, or given them back if the number is negative."""
        self.total += size
        self.free -= beyond_kept
        held = self._by_account.get(account, 0) + size
        if held:
            self._by_account[account] = held
        else:
            del self._by_account[account]
        if size < 0 and self._waiting:
            self._wake()

    def wait(self, account: str, take: Callable[[], bool]) -> None:
        self._waiting.setdefault(account, deque()).append(take)

    def forget(self, account: str, take: Callable[[], bool]) -> None:
        queue = self._waiting.get(account)
        if queue is not None and take in queue:
            queue.remove(take)
            if not queue:
                del self._waiting[account]

    def is_awaited(self, account: str) -> bool:
        return account in self._waiting

    def _wake(self) -> None:
        for account, queue in list(self._waiting.items()):
            while queue and queue[0]():
                queue.popleft()
            if not queue:
                del self._waiting[account]


@final
class BudgetLine:
    """The memory of one kind."""

    def __init__(self, budget: MemoryBudget, kind: Kind) -> None:
        self.budget = budget
        self.kind = kind
        self.total = 0
        # How many users one object has, by account and the object's identity.
        self._shared: dict[tuple[str, int], int] = {}
        self._gauge = telemetry.held_bytes.labels(kind)

    def __repr__(self) -> str:
        return f"<BudgetLine {self.kind}: {self.total} bytes>"

    def has_room(self, account: str, size: int) -> bool:
        """Whether the account may hold this many more bytes."""
        budget = self.budget
        room = budget.free + max(0, budget.kept - self.total) - size
        return budget.held_by(account) + size <= room

    def take(self, account: str, size: int) -> bool:
        """Count these bytes. False if there is no room for them."""
        if not self.has_room(account, size):
            return False
        self._count(account, size)
        return True

    def take_anyway(self, account: str, size: int) -> None:
        """Count bytes that are in memory already, also beyond the bounds."""
        self._count(account, size)

    def give_back(self, account: str, size: int) -> None:
        self._count(account, -size)

    def holds(self, account: str) -> bool:
        """Whether anything is counted for the account, of any kind."""
        return self.budget.held_by(account) > 0

    def take_shared(self, account: str, thing: object, size: int) -> bool:
        """Count an object that several calls of the account use: once for all of them."""
        place = account, id(thing)
        users = self._shared.get(place, 0)
        if not users and not self.take(account, size):
            return False
        self._shared[place] = users + 1
        return True

    def give_shared(self, account: str, thing: object, size: int) -> None:
        place = account, id(thing)
        users = self._shared.pop(place) - 1
        if users:
            self._shared[place] = users
        else:
            self.give_back(account, size)

    def may_wait(self, size: int) -> bool:
        """Whether there can ever be room for this many bytes."""
        budget = self.budget
        return 2 * size <= budget.most - (len(KINDS) - 1) * budget.kept

    def _count(self, account: str, size: int) -> None:
        if not size:
            return
        kept = self.budget.kept
        before = self.total
        self.total = after = before + size
        self._gauge.set(after)
        self.budget.taken(account, size, max(0, after - kept) - max(0, before - kept))
