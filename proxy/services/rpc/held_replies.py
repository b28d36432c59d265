"""Memory for replies that cannot be passed on at once.

Results are streamed where possible. A result is held while it waits for the items before it in a batch, while it becomes a
WebSocket message, and while its client reads slowly and the upstream connection is needed for others. Two bounds: one for all
replies of the worker, and half of it for each account.
"""

from __future__ import annotations

from proxy import telemetry
from proxy.core import jsonrpc

# A request or message that holds less is not counted: this is the usual case, and must cost nothing.
FREE_BYTES = 1 << 20

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

    def __repr__(self) -> str:
        return f"<HeldReplies {self.total} of {self.most} bytes for {len(self._by_account)} accounts>"

    def has_room(self, account: str, size: int) -> bool:
        held = self._by_account.get(account, 0)
        return self.total + size <= self.most and held + size <= self.most // 2

    def take(self, account: str, size: int) -> bool:
        """Count so many bytes. False if there is no room for them."""
        if not self.has_room(account, size):
            return False
        self._add(size)
        self._by_account[account] = self._by_account.get(account, 0) + size
        return True

    def give_back(self, account: str, size: int) -> None:
        self._add(-size)
        left = self._by_account[account] - size
        if left:
            self._by_account[account] = left
        else:
            del self._by_account[account]

    def _add(self, size: int) -> None:
        self.total += size
        telemetry.held_reply_bytes.set(self.total)

    def share(self, account: str) -> ReplyShare:
        return ReplyShare(self, account)


class ReplyShare:
    """What one request or message holds."""

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
        """Whether so many bytes more may be held."""
        held = self._held + size
        if held > FREE_BYTES:
            if not self._replies.take(self._account, held - self._counted):
                return False
            self._counted = held
        self._held = held
        return True

    def give(self, size: int) -> None:
        """Give back what was taken. A reply is a little longer than the result in it, so `size` may be too."""
        size = min(size, self._held)
        self._held -= size
        if counted := min(size, self._counted):
            self._counted -= counted
            self._replies.give_back(self._account, counted)

    def give_all(self) -> None:
        """May be called again."""
        self.give(self._held)
