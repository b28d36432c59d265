"""Items of clients, in a queue for each. Clients take turns, so one with many items delays only its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class RoundRobin(Generic[T]):
    __slots__ = ("_queues",)

    def __init__(self) -> None:
        # In the order of their next turns.
        self._queues: dict[str, deque[T]] = {}

    def __repr__(self) -> str:
        return f"<RoundRobin {len(self)} of {len(self._queues)} clients>"

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __iter__(self) -> Iterator[str]:
        """The clients with items, in the order of their next turns."""
        return iter(self._queues)

    def count_of(self, client: str) -> int:
        return len(self._queues.get(client, ()))

    def first_of(self, client: str) -> T | None:
        queue = self._queues.get(client)
        return queue[0] if queue else None

    def add(self, client: str, item: T) -> None:
        queue = self._queues.get(client)
        if queue is None:
            queue = self._queues[client] = deque()
        queue.append(item)

    def pop(self, client: str) -> T:
        """Remove the client's oldest item. The client's next turn comes after those of all others."""
        queue = self._queues.pop(client)
        item = queue.popleft()
        if queue:
            self._queues[client] = queue
        return item

    def pop_next(self) -> T:
        return self.pop(next(iter(self._queues)))

    def discard(self, client: str, item: T) -> None:
        queue = self._queues.get(client)
        if queue is not None and item in queue:
            queue.remove(item)
            if not queue:
                del self._queues[client]
