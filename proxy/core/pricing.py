"""Prices in compute units, other than those of JSON-RPC methods. The numbers are data: `config/pricing.toml`.

Only the price of size is fixed: it stands for what a worker spends on each byte of a call, whatever the call is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from proxy.core import jsonrpc

# A call larger than this costs a unit more for each further BYTES_PER_UNIT. A megabyte takes a worker as long as a hundred
# small calls, so it costs as much. No call costs more than the smallest plan can pay at once.
FREE_BYTES: Final = 16_384
BYTES_PER_UNIT: Final = 8_192
MOST_SIZE_UNITS: Final = 128
# A reply that an operation reads for a client costs a unit for each further part of this size: it is decoded and searched
# value by value, which takes several times as long as passing it on.
BYTES_READ_PER_UNIT: Final = 2_048
# The price of a request that is answered with an error for its own mistake.
UNITS_OF_AN_ERROR: Final = 1
# The bytes of each call of a batch before the batch counts as large: many small calls are priced one by one.
FREE_BYTES_OF_A_CALL: Final = 1024


@dataclass(frozen=True, slots=True)
class UnitPrices:
    archive_minimum: int
    rest: Mapping[str, int]
    events: Mapping[str, int]
    paymaster: Mapping[str, int]


def size_units(size: int) -> int:
    """The price of a call's size, besides that of its method."""
    return min(MOST_SIZE_UNITS, body_units(size))


def body_units(size: int) -> int:
    """The price of a body's size. It is paid while the body arrives, so it has no upper bound."""
    return -((FREE_BYTES - size) // BYTES_PER_UNIT) if size > FREE_BYTES else 0


def reading_units(size: int) -> int:
    """The price of reading an upstream's reply of this size, besides that of its call."""
    return -((FREE_BYTES - size) // BYTES_READ_PER_UNIT) if size > FREE_BYTES else 0


def request_units(data: bytes, start: int = 0) -> int:
    """The price of the size of an unparsed request, which begins at `start`."""
    size = len(data) - start
    if size > FREE_BYTES and jsonrpc.is_batch(data[start : start + jsonrpc.MOST_SPACE + 1]):
        size -= FREE_BYTES_OF_A_CALL * data.count(b'"method"', start)
    return size_units(size)
