"""The oldest block for which an upstream has each kind of data, and how that block is found.

A node that prunes has blocks and receipts that are older than the states it keeps. So there is a bound for each kind of data.
The settings declare it, or it is found by a binary search (`BoundSearch`) once a call asks for old data of that kind.

A bound is *fixed*, a block number, or *sliding*: the last so many blocks. A search finds a number. The bound counts as sliding
if it is where ordinary nodes of the family prune, or if it has moved with the head since the search before.

Later a search is repeated with what is known. One call is enough if nothing has changed: it asks for the oldest block, which
must still be there, and now and then for the one before it, which must not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

DataKind = Literal["blocks", "state", "receipts", "logs", "traces", "proofs"]
DATA_KINDS: Final[tuple[DataKind, ...]] = get_args(DataKind)
DATA_INDEX: Final[dict[DataKind, int]] = {kind: index for index, kind in enumerate(DATA_KINDS)}
# The kinds that a node without an archive prunes with the state: all three are computed from it.
FROM_STATE: Final[tuple[DataKind, ...]] = ("state", "traces", "proofs")
# A bound this close to the usual one is taken for it: nodes differ in whether they count the head.
NEAR_BLOCKS: Final = 2


@dataclass(frozen=True, slots=True)
class Bound:
    """`first`: the oldest block; 0 for all blocks. `kept`: if it slides, the number of blocks up to the head. `was_kept`: that
    number when a fixed bound was found."""

    first: int = 0
    kept: int = 0
    was_kept: int = 0

    @classmethod
    def declared(cls, number: int) -> Bound:
        """A bound as settings write it: a block, or as a negative number how many of the last blocks."""
        return cls(kept=-number) if number < 0 else cls(first=number)

    @property
    def as_number(self) -> int:
        """The reverse."""
        return -self.kept if self.kept else self.first

    def oldest(self, head: int) -> int:
        return max(0, head - self.kept + 1) if self.kept else self.first


ALL_BLOCKS: Final = Bound()


class DataBounds:
    """The bounds of one upstream. A kind without one is not known: calls are sent there, and the upstream's reply decides."""

    __slots__ = ("_bounds", "_floor", "declared")

    def __init__(self, declared: Mapping[DataKind, int] | None = None) -> None:
        bounds = {kind: Bound.declared(number) for kind, number in (declared or {}).items()}
        self.declared = frozenset(bounds)
        self._bounds: list[Bound | None] = [bounds.get(kind) for kind in DATA_KINDS]
        # The lowest block that the upstream itself reports, for data of any kind.
        self._floor = 0

    def __repr__(self) -> str:
        return f"<DataBounds {self.text or 'unknown'}>"

    def holds(self, data: int, block: int, head: int) -> bool:
        """Whether it may have this block. `data`: the index of the kind."""
        return block >= self.oldest(data, head)

    def oldest(self, data: int, head: int) -> int:
        bound = self._bounds[data]
        return self._floor if bound is None else max(self._floor, bound.oldest(head))

    def highest(self, head: int) -> int:
        """A block from which on it has all kinds of data, as far as is known."""
        return max([self._floor, *[bound.oldest(head) for bound in self._bounds if bound is not None]])

    def of(self, kind: DataKind) -> Bound | None:
        return self._bounds[DATA_INDEX[kind]]

    @property
    def text(self) -> str:
        """The known bounds, such as `blocks=0 state=-128`."""
        known = [(kind, self.of(kind)) for kind in DATA_KINDS]
        return " ".join(f"{kind}={bound.as_number}" for kind, bound in known if bound is not None)

    # Events

    def floor_reported(self, block: int) -> None:
        """The upstream has reported its lowest block."""
        self._floor = block

    def bound_found(self, kind: DataKind, bound: Bound) -> None:
        if kind not in self.declared:
            self._bounds[DATA_INDEX[kind]] = bound

    def adopt(self, text: str) -> None:
        """Another process has found bounds, and written them as `text` does."""
        for part in text.split():
            kind, _, number = part.partition("=")
            if kind in DATA_INDEX:
                self.bound_found(kind, Bound.declared(int(number)))


class BoundSearch:
    """A search for one bound of one upstream: call for `next_block` and report the outcome, until it is None."""

    __slots__ = ("_guesses", "_head", "_held", "_known", "_lacked", "_usual_kept", "calls")

    def __init__(
        self,
        head: int,
        *,
        usual_kept: int,
        known: Bound | None = None,
        looks_below: bool = False,
        others: Sequence[Bound] = (),
    ) -> None:
        """`usual_kept`: the blocks that ordinary upstreams keep. `known`: the bound that was found before. `looks_below`: check
        the block before it, and not the block itself. `others`: the upstream's bounds for other kinds of data, which are often
        the same."""
        self._head = head
        self._usual_kept = usual_kept
        self._known = known
        # The newest block that is certainly not there, and the oldest one that certainly is. The first block is of no use:
        # nodes that prune keep its state for ever.
        self._lacked = 0
        self._held = head + 1
        self.calls = 0
        if known is None:
            likely = [each.oldest(head) for each in others if each.oldest(head) > 1]
            if usual_kept:
                # A node has the states of its newest blocks, and perhaps the one that those are the changes to.
                likely += [head - usual_kept, head - usual_kept + 1]
            self._guesses = [1, *[guess for first in likely for guess in (first, first - 1)]]
        else:
            first = max(1, known.oldest(head))
            kept = known.kept or known.was_kept
            edge = [first - 1, first] if looks_below else [first, first - 1]
            self._guesses = [*edge, head - kept + 1, head - kept] if first > 1 else [1]

    def __repr__(self) -> str:
        return f"<BoundSearch between {self._lacked} and {self._held}, {self.calls} calls>"

    @property
    def is_confirmed(self) -> bool:
        """Whether the first call has found nothing new about the bound that was known."""
        if self._known is None or self.calls != 1:
            return False
        first = max(1, self._known.oldest(self._head))
        return self._held == first or (self._lacked == first - 1 and first > 1)

    @property
    def next_block(self) -> int | None:
        """The block to ask for; None once the bound is known."""
        if self.is_confirmed or self._held - self._lacked <= 1:
            return None
        guesses = [guess for guess in self._guesses if self._lacked < guess < self._held]
        if guesses:
            return guesses[0]
        # Nodes keep a few blocks or nearly all. So while the number of blocks up to the head is known only by its order of
        # magnitude, the order is searched for first.
        fewest, most = self._head - self._held + 1, self._head - self._lacked
        if fewest > 0 and most > 4 * fewest:
            return self._head - math.isqrt(fewest * most) + 1
        return (self._lacked + self._held) // 2

    def answered(self, block: int, *, is_held: bool) -> None:
        self.calls += 1
        if is_held:
            self._held = min(self._held, block)
        else:
            self._lacked = max(self._lacked, block)

    @property
    def bound(self) -> Bound | None:
        """The outcome; None if not even the newest block is there, which says nothing about old ones."""
        if self.is_confirmed and self._known is not None:
            return self._known
        if self._held <= 1:
            return ALL_BLOCKS
        if self._held > self._head:
            return None
        kept = self._head - self._held + 1
        was = 0 if self._known is None else self._known.kept or self._known.was_kept
        if abs(kept - self._usual_kept) <= NEAR_BLOCKS or kept == was:
            return Bound(kept=kept)
        return Bound(first=self._held, was_kept=kept)


def of_archive(*, archive: bool, usual_kept: int) -> dict[DataKind, int]:
    """The bounds that `archive = true` or `false` stands for."""
    if archive:
        return dict.fromkeys(DATA_KINDS, 0)
    return dict.fromkeys(FROM_STATE, -usual_kept) if usual_kept else {}
