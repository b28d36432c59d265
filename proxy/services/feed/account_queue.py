"""A queue that serves the accounts in turn, so that an account with much in it delays only itself."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class AccountQueue(Generic[T]):
    def __init__(self) -> None:
        # In the order of their next turns.
        self._waiting: dict[str, deque[T]] = {}
        self._wake = asyncio.Event()

    def __repr__(self) -> str:
        return f"<AccountQueue {sum(map(len, self._waiting.values()))} of {len(self._waiting)} accounts>"

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, account: str, item: T) -> None:
        self._waiting.setdefault(account, deque()).append(item)
        self._wake.set()

    async def get(self) -> T:
        while not self._waiting:
            self._wake.clear()
            await self._wake.wait()
        return self.get_nowait()

    def get_nowait(self) -> T:
        account = next(iter(self._waiting))
        queue = self._waiting.pop(account)
        item = queue.popleft()
        if queue:
            self._waiting[account] = queue
        return item
