"""The limits on the work that the feeds of a worker do for one account."""

from __future__ import annotations

from dataclasses import dataclass, field

from proxy.memory_budget import BudgetLine
from proxy.services.feed.account_places import AccountPlaces

# Replays of one account under way at a time in a worker; further ones wait. Each holds about a megabyte.
REPLAYS_PER_ACCOUNT = 8
# Blocks that are fetched ahead at a time for all replays of an account in a worker: their replies may arrive together.
FETCHES_PER_ACCOUNT = 8
# Polls of one account's topics under way at a time in a worker.
POLLS_PER_ACCOUNT = 16


@dataclass(frozen=True, slots=True)
class FeedTerms:
    """`replay_memory`: the memory that replays hold. `topic_memory`: the memory for the last state of polled topics. `replays`,
    `fetches`, `polls`: the places for replays, for the blocks that they fetch ahead, and for polls."""

    replay_memory: BudgetLine
    topic_memory: BudgetLine
    replays: AccountPlaces = field(default_factory=lambda: AccountPlaces(REPLAYS_PER_ACCOUNT))
    fetches: AccountPlaces = field(default_factory=lambda: AccountPlaces(FETCHES_PER_ACCOUNT))
    polls: AccountPlaces = field(default_factory=lambda: AccountPlaces(POLLS_PER_ACCOUNT))
