"""Memory for replies that cannot be passed on at once.

Results are streamed where possible. A result is held while it waits for the items before it in a batch, while it becomes a
WebSocket message, while its client reads slowly and the upstream connection is needed for others, and while it is received
or sent whole because several callers wait for it. Two bounds: one for all replies of the worker, and half of it for each
account.

A result of known length takes its room before it is read: many half-read results would fill it, and none could be completed. If
there is no room, it waits unread at its upstream until others were sent, in the order of the account's calls. A result that is
alone too large, or whose request can send nothing before it is whole, is refused instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from proxy import telemetry
from proxy.core import jsonrpc

# A request or message that holds less is not counted: this is the usual case, and must cost nothing.
FREE_BYTES: Final = 1 << 20

NO_ROOM = jsonrpc.error(
    jsonrpc.LIMIT_EXCEEDED, "too many large results wait for this account: make fewer calls at a time"
)


class HeldReplies:
    def __init__(self, most: int, per_reply: int) -> None:
        """`per_reply` bounds the results of one batch together."""
        self.most = most
        self.per_reply = per_reply
        self.total = 0
        self._by_account: dict[str, int] = {}
        # How many calls send one result, by account and the result's identity.
        self._shared: dict[tuple[str, int], int] = {}
        # Results that wait for room, by account. Each is called to take its room, and returns whether it has.
        self._waiting: dict[str, deque[Callable[[], bool]]] = {}

    def __repr__(self) -> str:
        waiting = sum(map(len, self._waiting.values()))
        return (
            f"<HeldReplies {self.total} of {self.most} bytes for {len(self._by_account)} accounts, {waiting} waiting>"
        )

    def has_room(self, account: str, size: int) -> bool:
        held = self._by_account.get(account, 0)
        return self.total + size <= self.most and held + size <= self.most // 2

    def take(self, account: str, size: int) -> bool:
        """Count these bytes. False if there is no room for them."""
        if not self.has_room(account, size):
            return False
        self.take_anyway(account, size)
        return True

    def take_anyway(self, account: str, size: int) -> None:
        self._add(size)
        self._by_account[account] = self._by_account.get(account, 0) + size

    def give_back(self, account: str, size: int) -> None:
        self._add(-size)
        left = self._by_account[account] - size
        if left:
            self._by_account[account] = left
        else:
            del self._by_account[account]
        if self._waiting:
            self._wake()

    def take_shared(self, account: str, result: bytes | msgspec.Raw) -> bool:
        """Count a result that several calls of the account may have: once for all of them."""
        place = account, id(result)
        users = self._shared.get(place, 0)
        if not users and not self.take(account, len(result)):
            return False
        self._shared[place] = users + 1
        return True

    def give_shared(self, account: str, result: bytes | msgspec.Raw) -> None:
        place = account, id(result)
        users = self._shared.pop(place) - 1
        if users:
            self._shared[place] = users
        else:
            self.give_back(account, len(result))

    def may_wait(self, size: int) -> bool:
        """Whether there can ever be room for this many bytes."""
        return size <= self.most // 2

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

    def _add(self, size: int) -> None:
        self.total += size
        telemetry.held_reply_bytes.set(self.total)

    def share(self, account: str) -> ReplyShare:
        return ReplyShare(self, account)


class ReplyShare:
    """The bytes that one request or message holds."""

    __slots__ = ("_account", "_counted", "_held", "_replies")

    def __init__(self, replies: HeldReplies, account: str) -> None:
        self._replies = replies
        self._account = account
        self._held = 0
        self._counted = 0

    def __repr__(self) -> str:
        return f"<ReplyShare {self._held} bytes>"

    @property
    def is_large(self) -> bool:
        return self._held > FREE_BYTES

    @property
    def per_reply(self) -> int:
        return self._replies.per_reply

    def take(self, size: int) -> bool:
        """Whether this many more bytes may be held."""
        held = self._held + size
        if held > FREE_BYTES:
            if not self._replies.take(self._account, held - self._counted):
                return False
            self._counted = held
        self._held = held
        return True

    def take_anyway(self, size: int) -> None:
        """Count the beginning of a result that waits for room, even beyond the bounds: it has arrived already."""
        self._held += size
        if self._held > FREE_BYTES:
            self._replies.take_anyway(self._account, self._held - self._counted)
            self._counted = self._held

    def reserve(self, size: int) -> bool:
        """Like `take`, but behind the account's results that wait for room."""
        return (size <= FREE_BYTES or not self._replies.is_awaited(self._account)) and self.take(size)

    def may_wait(self, size: int) -> bool:
        return self._replies.may_wait(size)

    def wait(self, take: Callable[[], bool]) -> None:
        self._replies.wait(self._account, take)

    def forget(self, take: Callable[[], bool]) -> None:
        self._replies.forget(self._account, take)

    def give(self, size: int) -> None:
        """Release memory. `size` may be a little more than was taken, because a reply is longer than its result."""
        size = min(size, self._held)
        self._held -= size
        if counted := min(size, self._counted):
            self._counted -= counted
            self._replies.give_back(self._account, counted)

    def give_all(self) -> None:
        """May be called again."""
        self.give(self._held)
