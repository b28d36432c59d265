"""Memory for replies to clients that read slowly, if the upstream connection of such a reply is needed for others.

Two bounds: one for all replies of the worker, and half of it for each account.
"""

from __future__ import annotations


class HeldReplies:
    def __init__(self, most: int) -> None:
        self.most = most
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
        self.total += size
        self._by_account[account] = self._by_account.get(account, 0) + size
        return True

    def give_back(self, account: str, size: int) -> None:
        self.total -= size
        left = self._by_account[account] - size
        if left:
            self._by_account[account] = left
        else:
            del self._by_account[account]
