"""Limits on concurrent slow work, per account: each account has a fixed number of places, and its further work waits for one,
in order."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary


class AccountPlaces:
    """An account never waits for the places of another: `async with places.of(account)`."""

    def __init__(self, each: int) -> None:
        self._each = each
        # Only for accounts that use or await a place.
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"<AccountPlaces of {len(self._places)} accounts, {self._each} each>"

    def of(self, account: str) -> asyncio.Semaphore:
        places = self._places.get(account)
        if places is None:
            places = self._places[account] = asyncio.Semaphore(self._each)
        return places
