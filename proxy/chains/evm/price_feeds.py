"""Price feeds with the interface of Chainlink's aggregators: the calls, and when a reply is a valid price."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Context, Decimal

from proxy.chains.evm import abi

LATEST_ROUND = abi.call("latestRoundData()")
DECIMALS = abi.call("decimals()")
# A feed that reports more is not a price feed.
MOST_DECIMALS = 77
_EXACT = Context(prec=2 * MOST_DECIMALS)


@dataclass(frozen=True, slots=True)
class PriceRound:
    """latestRoundData(): roundId, answer, startedAt, updatedAt, answeredInRound."""

    id: int
    answer: int
    updated_at: int
    answered_in: int


def round_of(data: bytes | None) -> PriceRound | None:
    number, answer, updated_at = abi.uint(data), abi.signed(data, 1), abi.uint(data, 3)
    answered_in = abi.uint(data, 4)
    if number is None or answer is None or updated_at is None or answered_in is None:
        return None
    return PriceRound(number, answer, updated_at, answered_in)


def price_of(price_round: PriceRound, decimals: int, *, now: float, max_age_s: float) -> Decimal | None:
    """The price; None if it is not positive, from an earlier round, incomplete, or too old."""
    if price_round.answer <= 0 or not 0 <= decimals <= MOST_DECIMALS:
        return None
    if (
        price_round.answered_in < price_round.id
        or price_round.updated_at == 0
        or now - price_round.updated_at > max_age_s
    ):
        return None
    return _EXACT.scaleb(Decimal(price_round.answer), -decimals)
