"""The head of a network, from the reports of several upstreams, any of which may lag or lie.

*Agreed.* The highest block that enough upstreams have reported. With three or more upstreams this is the second highest
report, so that one false report cannot move the network; with two, the higher one if it is plausible for the time that
has passed; with one, its report. Upstreams that are far behind or silent have no vote. The agreed head of several
upstreams never goes back, except if all reports are far below it: then the chain was reset.
*Tip.* The highest block that a caller has received. A single upstream may be slightly ahead of the others, and a caller
that has seen its block must not get an older one afterwards. It may only be slightly ahead, because it may lie; lag is
measured against the agreed head.
*Final.* The block below which results never change: the finality depth below the agreed head.
"""

from __future__ import annotations

from typing import Literal

from proxy.core.routing import UpstreamHealth

# How much faster than its block time a network may seem to go before a report is not believed.
LEAP = 5.0
# A report older than this has no vote: at the least two questions went unanswered.
STALE_S = 20.0
# The largest number that the shared memory holds: a larger one is not a block.
HIGHEST = (1 << 63) - 1


class NetworkHead:
    """The head of one network. `behind_blocks` is how many blocks an upstream may be behind and still serve reads."""

    __slots__ = ("_agreed_at", "agreed", "behind_blocks", "block_time_s", "finality_blocks", "heard_at", "tip")

    def __init__(self, *, block_time_s: float, finality_blocks: int, behind_blocks: int) -> None:
        self.block_time_s = block_time_s
        self.finality_blocks = finality_blocks
        self.behind_blocks = behind_blocks
        self.agreed = 0
        self.tip = 0
        # When an upstream last said where it is.
        self.heard_at = 0.0
        self._agreed_at = 0.0

    def __repr__(self) -> str:
        return f"<NetworkHead tip {self.tip}, agreed {self.agreed}, final {self.final}>"

    @property
    def final(self) -> int:
        """The highest final block; -1 while unknown."""
        return self.agreed - self.finality_blocks if self.agreed else -1

    def observe(self, members: tuple[UpstreamHealth, ...], now: float) -> Literal["still", "moved", "reset"]:
        """Take the members' heads into account: what became of the tip."""
        heard = sorted((m.head for m in members if m.head and now - m.head_at <= STALE_S), reverse=True)
        if not heard:
            return "still"
        self.heard_at = max(member.head_at for member in members)
        alone = len(members) == 1
        voters = [head for head in heard if head >= self.agreed - self.behind_blocks]
        agreed = self._agreed_by(voters, now) if voters and not alone else _second_of_many(heard)
        if agreed > self.agreed or not voters or alone:
            self.agreed, self._agreed_at = agreed, now
        for member in members:
            member.lagging = bool(member.head) and self._is_off(member.head, now)
        before = self.tip
        self.tip = self.agreed if not voters or alone else max(self.tip, self.agreed)
        return "reset" if not voters else "still" if self.tip == before else "moved"

    def is_plausible(self, number: int, now: float) -> bool:
        """Whether a block of this number can be there by now."""
        return not self.agreed or number <= self._furthest(now)

    def raise_to(self, number: int) -> None:
        """A caller has received this block: no older head is returned after that."""
        self.tip = max(self.tip, number)

    def _agreed_by(self, voters: list[int], now: float) -> int:
        if len(voters) > 2 or self.is_plausible(voters[0], now):
            return _second_of_many(voters)
        return voters[1] if len(voters) > 1 else self.agreed

    def _furthest(self, now: float) -> float:
        return self.agreed + self.behind_blocks + LEAP * (now - self._agreed_at) / self.block_time_s

    def _is_off(self, head: int, now: float) -> bool:
        """Too far behind; or so far ahead that it cannot be true."""
        return head < self.agreed - self.behind_blocks or head > self._furthest(now)


def _second_of_many(heads: list[int]) -> int:
    return heads[1] if len(heads) > 2 else heads[0]
