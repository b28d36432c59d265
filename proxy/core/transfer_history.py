"""The history of transfers: its categories, the order of transfers on a chain, and pages of them.

A transfer has a *position*: its block and its place within the block. The place is one number, made of the kind of transfer
(coins of transactions, then coins moved inside them, then tokens), the index of the log or transaction, and the item in it.
Positions never change while their block stays, so a page that continues after a position is the same whatever was added or
removed elsewhere.
"""

from __future__ import annotations

import base64
import struct
from dataclasses import dataclass
from typing import NamedTuple

NATIVE, INTERNAL, ERC20, ERC721, ERC1155 = 1, 2, 20, 721, 1155
CATEGORIES = {"native": NATIVE, "internal": INTERNAL, "erc20": ERC20, "erc721": ERC721, "erc1155": ERC1155}
NAMES = {code: name for name, code in CATEGORIES.items()}
# Categories that are read from logs.
OF_LOGS = frozenset({ERC20, ERC721, ERC1155})

# The item of a native transfer whose transaction failed: the coins came back.
FAILED = 1

_KIND_BITS = 60
_INDEX_BITS = 30
_RANK = {NATIVE: 0, INTERNAL: 1}
_LOGS_RANK = 2
_CURSOR = struct.Struct(">QQ")
# Blocks and places are signed 64-bit numbers in the database.
_MOST = (1 << 63) - 1


class Position(NamedTuple):
    """The block, and the place within it."""

    block: int
    place: int


# Before and after every transfer.
FIRST, LAST = Position(0, -1), Position(_MOST, _MOST)


@dataclass(frozen=True, slots=True)
class TransferFilter:
    """Which transfers are wanted. An empty `contracts` means any. `low` and `high`: the first and the last block."""

    categories: tuple[int, ...]
    contracts: tuple[bytes, ...] = ()
    counterparty: bytes | None = None
    min_amount: int = 0
    low: int = 0
    high: int = LAST.block

    @property
    def is_selective(self) -> bool:
        return bool(self.contracts or self.counterparty or self.min_amount) or len(self.categories) < len(CATEGORIES)


@dataclass(frozen=True, slots=True)
class PageStart:
    """The position after which a page starts, its order and its size."""

    after: Position | None
    newest_first: bool
    limit: int

    def edge(self, wanted: TransferFilter) -> Position:
        """The position to start after, within the wanted blocks."""
        if self.newest_first:
            most = Position(min(wanted.high + 1, LAST.block), 0)
            return most if self.after is None else min(self.after, most)
        least = Position(wanted.low, -1)
        return least if self.after is None else max(self.after, least)


def place_of(category: int, index: int, item: int = 0) -> int:
    """The order within a block. `index`: of the log, or of the transaction for coins; for coins that move inside transactions,
    counted among the transactions that have such transfers."""
    return _RANK.get(category, _LOGS_RANK) << _KIND_BITS | index << _INDEX_BITS | item


def index_of(place: int) -> int:
    """The index of the log or the transaction."""
    return place >> _INDEX_BITS & (1 << _KIND_BITS - _INDEX_BITS) - 1


def item_of(place: int) -> int:
    return place & (1 << _INDEX_BITS) - 1


def has_failed(category: int, place: int) -> bool:
    """Whether the transfer's transaction failed. Only coins of transactions are kept in that case."""
    return category == NATIVE and item_of(place) == FAILED


def cursor_of(position: Position) -> str:
    """The position as text that clients pass back."""
    return base64.urlsafe_b64encode(_CURSOR.pack(*position)).decode().rstrip("=")


def position_of(cursor: str) -> Position | None:
    """None if the text is not a cursor."""
    try:
        block, place = _CURSOR.unpack(base64.b64decode(cursor + "==", altchars=b"-_", validate=True))
    except (ValueError, struct.error):
        return None
    position = Position(block, place)
    return position if max(position) <= _MOST and cursor_of(position) == cursor else None


def blocks_per_table(block_time_s: float) -> int:
    """The blocks of about a hundred days: few enough tables for a page to look into all of them."""
    return max(1, round(8_640_000 / max(block_time_s, 0.1)))
