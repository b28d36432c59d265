"""A mapping of bounded size, for every cache outside the path of a call.

Caches on that path are plain dicts, bounded by `core/bounded.py`: a read of an `LruCache` costs more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


def _one(key: object, value: object) -> int:
    return 1


class LruCache(MutableMapping[K, V], Generic[K, V]):
    """Evicts the least recently used entries while all together weigh more than `limit`. By default each weighs one.

    An entry that alone weighs more than `limit` is not stored.
    """

    def __init__(self, limit: int, weigh: Callable[[K, V], int] = _one) -> None:
        self._limit = limit
        self._weigh = weigh
        # The least recently used entry is the first.
        self._entries: dict[K, V] = {}
        self.weight = 0

    def __repr__(self) -> str:
        return f"<LruCache {len(self._entries)} entries, {self.weight} of {self._limit}>"

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        return iter(tuple(self._entries))  # Reading an entry while iterating moves it.

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __getitem__(self, key: K) -> V:
        value = self._entries[key] = self._entries.pop(key)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)
        weight = self._weigh(key, value)
        if weight > self._limit:
            return
        self._entries[key] = value
        self.weight += weight
        while self.weight > self._limit:
            self.evict()

    def evict(self) -> K:
        """Remove the least recently used entry. Returns its key."""
        key = next(iter(self._entries))
        del self[key]
        return key

    def __delitem__(self, key: K) -> None:
        self.weight -= self._weigh(key, self._entries.pop(key))
