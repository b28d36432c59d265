"""Places for work that takes long: each account has so many, and its further work waits for one of them, in order."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary


class AccountPlaces:
    """No account waits for a place of another: `async with places.of(account)`."""

    def __init__(self, each: int) -> None:
        self._each = each
        # Those of accounts that use or await one.
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"<AccountPlaces of {len(self._places)} accounts, {self._each} each>"

    def of(self, account: str) -> asyncio.Semaphore:
        places = self._places.get(account)
        if places is None:
            places = self._places[account] = asyncio.Semaphore(self._each)
        return places
