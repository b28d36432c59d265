"""Memory for replies that cannot be passed on at once.

Results are streamed where possible. A result is held while it waits for the items before it in a batch, while it becomes a
WebSocket message, while its client reads slowly and the upstream connection is needed for others, and while it is received
or sent whole because several callers wait for it. Its bytes count in the worker's memory budget.

A result of known length takes its room before it is read. Otherwise many half-read results could fill the budget, and none
could be completed. If there is no room, it waits unread at its upstream until others were sent, in the order of the account's
calls. A result that is too large by itself, or whose request can send nothing before it is whole, is refused instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from proxy.core import jsonrpc
from proxy.memory_budget import BudgetLine

# A request or message that holds less is not counted: this is the usual case, and must cost nothing.
FREE_BYTES: Final = 1 << 20

NO_ROOM = jsonrpc.error(
    jsonrpc.LIMIT_EXCEEDED, "too many large results wait for this account: make fewer calls at a time"
)


class ReplyShare:
    """The bytes that one request or message holds."""

    __slots__ = ("_account", "_counted", "_held", "_replies", "per_reply")

    def __init__(self, replies: BudgetLine, account: str, per_reply: int) -> None:
        """`per_reply` bounds the results of one batch together."""
        self._replies = replies
        self._account = account
        self.per_reply = per_reply
        self._held = 0
        self._counted = 0

    def __repr__(self) -> str:
        return f"<ReplyShare {self._held} bytes>"

    @property
    def is_large(self) -> bool:
        return self._held > FREE_BYTES

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
        return (size <= FREE_BYTES or not self._replies.budget.is_awaited(self._account)) and self.take(size)

    def may_wait(self, size: int) -> bool:
        return self._replies.may_wait(size)

    def wait(self, take: Callable[[], bool]) -> None:
        self._replies.budget.wait(self._account, take)

    def forget(self, take: Callable[[], bool]) -> None:
        self._replies.budget.forget(self._account, take)

    def give(self, size: int) -> None:
        """Release memory. `size` may be a little more than was taken, because a reply is longer than its result."""
        size = min(size, self._held)
        self._held -= size
        if counted := min(size, self._counted):
            self._counted -= counted
            self._replies.give_back(self._account, counted)

    def give_all(self) -> None:
        """Release everything. Calling it again does nothing."""
        self.give(self._held)
