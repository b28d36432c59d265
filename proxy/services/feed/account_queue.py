"""A queue that serves the accounts in turn, so that an account with much in it delays only itself."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from proxy.core.round_robin import RoundRobin

T = TypeVar("T")


class AccountQueue(Generic[T]):
    def __init__(self) -> None:
        self._waiting: RoundRobin[T] = RoundRobin()
        self._wake = asyncio.Event()

    def __repr__(self) -> str:
        return f"<AccountQueue {self._waiting!r}>"

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, account: str, item: T) -> None:
        self._waiting.add(account, item)
        self._wake.set()

    async def get(self) -> T:
        while not self._waiting:
            self._wake.clear()
            await self._wake.wait()
        return self.get_nowait()

    def get_nowait(self) -> T:
        return self._waiting.pop_next()
