"""The head of a network, from the reports of several upstreams, any of which may lag, lie or be on another branch.

*Agreed.* The highest block that enough upstreams have reported. With three or more upstreams this is the second highest
report, so that one false report cannot move the network; with two, the higher one if it is plausible for the time that
has passed; with one, its report. Upstreams that are far behind or silent have no vote, and those of another chain or
branch have none either. The agreed head goes back when most upstreams that have had it no longer do: a reorganisation to a
shorter branch. If all reports are far below it, the chain was reset.
*Operators.* Upstreams of one operator may lie together, so they have one vote: with three or more operators, only the highest
report of each counts. When hashes are compared, an operator votes for the one that most of its upstreams report.
*Tip.* The highest block that a caller has received. A single upstream may be slightly ahead of the others, and a caller
that has seen its block must not get an older one afterwards, unless the upstream itself goes back. It may only be slightly
ahead, because it may lie; lag is measured against the agreed head.
*Final.* The block below which results never change: the finality depth below the agreed head.
*Branch.* The hashes of the last blocks. A report with another hash at a known height is a reorganisation.
*Votes.* Upstreams are compared by the hash that each has at one height. The hash that most have is the network's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Literal

from proxy.core.upstream_health import UpstreamHealth

# How much faster than its block time a network may seem to go before a report is not believed.
LEAP = 5.0
# A report older than this has no vote: at least two polls went unanswered.
STALE_S = 20.0
# The largest number that the shared memory holds: a larger one is not a block.
HIGHEST = (1 << 63) - 1
# Hashes to remember: as many blocks as upstreams in use may be apart.
REMEMBERED_BLOCKS = 256
# Blocks of several upstreams, which may be on several branches.
REMEMBERED_HASHES = 1024
# The pause between two checks of doubts about the head: after a doubt that was right, and the longest, after many wrong ones.
SOON_S = 0.1
LATEST_CHECK_S = 30.0
# A hash is shortened to this many bytes, so that it fits into a number of the shared memory.
SHORT_HASH_BYTES = 7

# The effect of reports on the tip.
HeadChange = Literal["still", "moved", "lowered", "reset"]


class NetworkHead:
    """The head of one network. `behind_blocks` is how many blocks an upstream may be behind and still serve reads."""

    __slots__ = ("_agreed_at", "agreed", "behind_blocks", "block_time_s", "finality_blocks", "heard_at", "tip")

    def __init__(self, *, block_time_s: float, finality_blocks: int, behind_blocks: int) -> None:
        self.block_time_s = block_time_s
        self.finality_blocks = finality_blocks
        self.behind_blocks = behind_blocks
        self.agreed = 0
        self.tip = 0
        # When an upstream last reported its head.
        self.heard_at = 0.0
        self._agreed_at = 0.0

    def __repr__(self) -> str:
        return f"<NetworkHead tip {self.tip}, agreed {self.agreed}, final {self.final}>"

    @property
    def final(self) -> int:
        """The highest final block; -1 while unknown."""
        return self.agreed - self.finality_blocks if self.agreed else -1

    def observe(self, members: tuple[UpstreamHealth, ...], now: float) -> HeadChange:
        """Take the members' heads into account, and return the effect on the tip."""
        heard = heard_of(members, now)
        if not heard:
            return "still"
        believed = [each for each in heard if self.is_plausible(each.head, now)]
        self.heard_at = max([member.head_at for member in heard])
        alone = len(members) == 1
        counted = believed or heard
        voters = voting_heads([each for each in counted if each.head >= self.agreed - self.behind_blocks])
        agreed = self._agreed_by(voters, now) if voters and not alone else second_of_many(voting_heads(counted))
        if not self.is_plausible(agreed, now) and _is_of_one(agreed, heard, members):
            agreed = self.agreed
        is_lost = alone or not voters or _is_gone(self.agreed, believed)
        if agreed > self.agreed or is_lost:
            self.agreed, self._agreed_at = agreed, now
        for member in members:
            self.place(member, now)
        before = self.tip
        self.tip = self._tip_by(believed, is_lost=is_lost)
        if self.tip < before:
            for member in members:
                member.peak = member.head
        return "reset" if not voters else _change(before, self.tip)

    def place(self, member: UpstreamHealth, now: float) -> None:
        """Compare the head that an upstream has reported with the network's. This cannot wait until all have reported: an
        impossible head must not attract calls that need a new block."""
        is_known = bool(member.head) and bool(self.agreed)
        member.ahead = is_known and member.head > self._furthest(now)
        is_behind = is_known and (member.ahead or member.head < self.agreed - self.behind_blocks)
        member.lagging = is_behind or member.syncing

    def _tip_by(self, believed: list[UpstreamHealth], *, is_lost: bool) -> int:
        if is_lost:
            return self.agreed
        if _is_gone(self.tip, believed):
            return max([self.agreed, *[member.head for member in believed]])
        return max(self.tip, self.agreed)

    def is_plausible(self, number: int, now: float) -> bool:
        """Whether the network can have reached a block of this number by now."""
        return not self.agreed or number <= self._furthest(now)

    def raise_to(self, number: int) -> None:
        """A caller has received this block: no older head is returned after that."""
        self.tip = max(self.tip, number)

    def lower_to(self, number: int, members: tuple[UpstreamHealth, ...], now: float) -> None:
        """Another worker has seen a reorganisation to a shorter branch. Older reports of the members do not contradict it."""
        self.tip = number
        self.agreed = min(self.agreed, number)
        for member in members:
            member.lost_blocks(number, now)

    def is_doubtful(self, members: tuple[UpstreamHealth, ...], now: float) -> bool:
        """Whether a member that had the tip has it no longer, or is on another branch: the others may have followed it."""
        forked = [each for each in members if each.standing == "forked" and now - each.head_at <= STALE_S]
        lost = [each for each in heard_of(members, now) if each.head < self.tip <= each.peak]
        return any(not each.silent for each in [*forked, *lost])

    def _agreed_by(self, voters: list[int], now: float) -> int:
        if len(voters) > 2 or self.is_plausible(voters[0], now):
            return second_of_many(voters)
        return voters[1] if len(voters) > 1 else self.agreed

    def _furthest(self, now: float) -> float:
        return self.agreed + self.behind_blocks + LEAP * (now - self._agreed_at) / self.block_time_s


class HeadDoubts:
    """When to check a head that may have gone back, because an upstream sent an older one than it had before.

    It is checked at once, so that a shorter branch is believed as quickly as a longer one, and again soon while an upstream
    lacks the head, because the others may go back a moment later. Behind some addresses are several nodes of different
    height, which always look as if they went back: after a check that found no reason, the next one waits for twice as long.
    """

    __slots__ = ("_checked_at", "_pause_s", "_tip")

    def __init__(self) -> None:
        self._checked_at = -LATEST_CHECK_S
        self._pause_s = SOON_S
        # The head in doubt; 0 if there is none.
        self._tip = 0

    def __repr__(self) -> str:
        return f"<HeadDoubts about {self._tip}, checked every {self._pause_s:g} s>"

    @property
    def check_at(self) -> float:
        """When to check; infinite without a doubt."""
        return self._checked_at + self._pause_s if self._tip else math.inf

    def doubt(self, tip: int) -> bool:
        """Returns whether there was no doubt before."""
        is_new = not self._tip
        self._tip = self._tip or tip
        return is_new

    def checked(self, tip: int, now: float) -> None:
        self._pause_s = SOON_S if tip < self._tip else min(2 * self._pause_s, LATEST_CHECK_S)
        self._checked_at, self._tip = now, 0


class Branch:
    """The hashes of the last blocks, by number, as the upstreams in use report them."""

    __slots__ = ("_hashes",)

    def __init__(self) -> None:
        self._hashes: dict[int, str] = {}

    def __repr__(self) -> str:
        return f"<Branch of {len(self._hashes)} blocks>"

    def note(self, number: int, block_hash: str, parent_hash: str) -> bool:
        """Note a reported block. Returns whether it replaces a block that was known."""
        known = self._hashes.get(number, block_hash)
        parent = self._hashes.get(number - 1, parent_hash)
        is_replaced = known != block_hash or (bool(parent_hash) and parent != parent_hash)
        if is_replaced:
            self._hashes.clear()
        self._hashes[number] = block_hash
        if parent_hash:
            self._hashes[number - 1] = parent_hash
        while len(self._hashes) > REMEMBERED_BLOCKS:
            del self._hashes[min(self._hashes)]
        return is_replaced

    def clear(self) -> None:
        self._hashes.clear()


class RecentHashes:
    """The numbers of the last blocks, by hash, on all branches that upstreams have reported."""

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<RecentHashes of {len(self._numbers)} blocks>"

    def note(self, number: int, block_hash: str) -> None:
        self._numbers[block_hash.lower()] = number
        while len(self._numbers) > REMEMBERED_HASHES:
            del self._numbers[next(iter(self._numbers))]

    def number_of(self, block_hash: str) -> int | None:
        return self._numbers.get(block_hash)


def short_hash_of(block_hash: str) -> int:
    """A number for a hash. It is never 0, which means an unknown hash."""
    return int.from_bytes(blake2b(block_hash.encode(), digest_size=SHORT_HASH_BYTES).digest(), "big") or 1


def heard_of(members: Iterable[UpstreamHealth], now: float) -> list[UpstreamHealth]:
    """The members in good standing that have reported their heads lately."""
    return [each for each in members if each.standing == "good" and each.head and now - each.head_at <= STALE_S]


def voting_heads(members: Sequence[UpstreamHealth]) -> list[int]:
    """The heads that have a vote, in descending order: the highest of each operator. With fewer than three operators, all heads
    have a vote, so that a single upstream still decides nothing if there are three."""
    highest: dict[str, int] = {}
    for each in members:
        highest[each.operator] = max(each.head, highest.get(each.operator, 0))
    return sorted(highest.values() if len(highest) > 2 else [each.head for each in members], reverse=True)


def most_voted(votes: Sequence[tuple[UpstreamHealth, str]]) -> list[str]:
    """The hashes with the most operators: several if they are tied. An operator votes for the hash that most of its upstreams
    have, or for each of several that are tied."""
    of_operators: dict[str, list[str]] = {}
    for health, block_hash in votes:
        of_operators.setdefault(health.operator, []).append(block_hash)
    return _most_frequent([each for hashes in of_operators.values() for each in _most_frequent(hashes)])


def _most_frequent(hashes: Sequence[str]) -> list[str]:
    most = max([hashes.count(each) for each in hashes], default=0)
    return [each for each in dict.fromkeys(hashes) if hashes.count(each) == most]


def preferred(tied: Sequence[str], votes: Sequence[tuple[UpstreamHealth, str]]) -> str:
    """The branch to use among those with equal votes: the longest; among equally long ones, the one in use."""
    best = max(
        [vote for vote in votes if vote[1] in tied],
        key=lambda vote: (vote[0].head, vote[0].standing == "good", -vote[0].index),
    )
    return best[1]


def second_of_many(heads: list[int]) -> int:
    """The second highest of three or more, so that a single one decides nothing. `heads` are in descending order."""
    return heads[1] if len(heads) > 2 else heads[0]


def _is_of_one(number: int, heard: Sequence[UpstreamHealth], members: Sequence[UpstreamHealth]) -> bool:
    """Whether only one of several operators reports this block. Its other upstreams are no second witness."""
    witnesses = {each.operator for each in heard if each.head >= number}
    return len(witnesses) < 2 and len({each.operator for each in members}) > 1


def _is_gone(number: int, believed: list[UpstreamHealth]) -> bool:
    """Whether more operators have lost this block than have it. An operator has lost it if most of its upstreams have."""
    balance: dict[str, int] = {}
    for member in believed:
        if not member.silent and number <= max(member.peak, member.head):
            has_it = member.head >= number
            balance[member.operator] = balance.get(member.operator, 0) + (1 if has_it else -1)
    lost = len([each for each in balance.values() if each < 0])
    return lost > len(balance) - lost


def _change(before: int, tip: int) -> HeadChange:
    return "still" if tip == before else "moved" if tip > before else "lowered"
