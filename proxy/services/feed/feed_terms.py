"""The limits on the work that the feeds of a worker do for one account."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from proxy.memory_budget import BudgetLine

# Replays of one account under way at a time in a worker; further ones wait. Each holds about a megabyte.
REPLAYS_PER_ACCOUNT = 8
# Blocks that are fetched ahead at a time for all replays of an account in a worker: their replies may arrive together.
FETCHES_PER_ACCOUNT = 8
# Polls of one account's topics under way at a time in a worker.
POLLS_PER_ACCOUNT = 16


class AccountSemaphores:
    """Limit concurrent work per account: `async with semaphores.of(account)`. No account waits for another."""

    def __init__(self, each: int) -> None:
        self._each = each
        # Only of accounts that hold or await theirs.
        self._semaphores: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"<AccountSemaphores of {len(self._semaphores)} accounts, {self._each} each>"

    def of(self, account: str) -> asyncio.Semaphore:
        semaphore = self._semaphores.get(account)
        if semaphore is None:
            semaphore = self._semaphores[account] = asyncio.Semaphore(self._each)
        return semaphore


@dataclass(frozen=True, slots=True)
class FeedTerms:
    """`replay_memory`: the memory that replays hold. `topic_memory`: the memory for the last state of polled topics. `replays`,
    `fetches`, `polls`: the limits on replays, on the blocks that they fetch ahead, and on polls."""

    replay_memory: BudgetLine
    topic_memory: BudgetLine
    replays: AccountSemaphores = field(default_factory=lambda: AccountSemaphores(REPLAYS_PER_ACCOUNT))
    fetches: AccountSemaphores = field(default_factory=lambda: AccountSemaphores(FETCHES_PER_ACCOUNT))
    polls: AccountSemaphores = field(default_factory=lambda: AccountSemaphores(POLLS_PER_ACCOUNT))
