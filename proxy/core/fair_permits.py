"""A limited number of permits, shared between clients.

A client may hold no more permits than are free, and no more than `per_client`: alone it gets half of them, and however many
clients take as many as they can, the next one finds some.
"""

from __future__ import annotations

from collections import Counter


class FairPermits:
    def __init__(self, most: int, per_client: int) -> None:
        self.free = most
        self._per_client = per_client
        self._held: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<FairPermits {self.free} free, {self._held.total()} held by {len(self._held)} clients>"

    def __len__(self) -> int:
        return self._held.total()

    def held_by(self, client: str) -> int:
        return self._held[client]

    def clients(self) -> list[str]:
        """Those that hold a permit."""
        return [*self._held]

    def has_one_for(self, client: str) -> bool:
        return self._held[client] < min(self.free, self._per_client)

    def take(self, client: str) -> bool:
        """Take a permit. False if the client may have no more."""
        if not self.has_one_for(client):
            return False
        self.take_anyway(client)
        return True

    def take_anyway(self, client: str) -> None:
        self.free -= 1
        self._held[client] += 1

    def give_back(self, client: str) -> None:
        self.free += 1
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
