"""Price feeds: when an answer is a price."""

from __future__ import annotations

from decimal import Decimal

import pytest
import sha3

from proxy.chains.evm.price_feeds import DECIMALS, LATEST_ROUND, PriceRound, price_of, round_of

NOW = 1_700_000_000
GOOD = PriceRound(7, 3_000_12345678, NOW - 60, 7)


def words(*numbers: int) -> bytes:
    return b"".join([(number % 2**256).to_bytes(32, "big") for number in numbers])


def test_calls_are_the_selectors_of_chainlinks_interface() -> None:
    assert LATEST_ROUND == sha3.keccak_256(b"latestRoundData()").digest()[:4] == bytes.fromhex("feaf968c")
    assert DECIMALS == sha3.keccak_256(b"decimals()").digest()[:4] == bytes.fromhex("313ce567")


def test_round_is_read_from_its_five_words() -> None:
    assert round_of(words(7, 3_000_12345678, NOW - 70, NOW - 60, 7)) == GOOD
    assert round_of(words(1, -5, 2, 3, 1)) == PriceRound(1, -5, 3, 1)


@pytest.mark.parametrize("data", [None, b"", b"\0" * 31, words(1, 2, 3, 4), words(1, 2, 3, 4, 5)[:-1]])
def test_anything_else_is_no_round(data: bytes | None) -> None:
    assert round_of(data) is None


def priced(found: PriceRound, decimals: int = 8) -> Decimal | None:
    return price_of(found, decimals, now=NOW, max_age_s=3600)


@pytest.mark.parametrize(
    ("answer", "decimals", "usd"),
    [
        (3_000_12345678, 8, "3000.12345678"),
        (1, 0, "1"),
        (1, 77, "1E-77"),
        (2**255 - 1, 18, "57896044618658097711785492504343953926634992332820282019728.792003956564819967"),
    ],
)
def test_price_is_exact(answer: int, decimals: int, usd: str) -> None:
    assert priced(PriceRound(7, answer, NOW, 7), decimals) == Decimal(usd)


@pytest.mark.parametrize("age_s", [-5, 0, 3600])
def test_answer_of_its_time_is_a_price(age_s: int) -> None:
    assert priced(PriceRound(7, 1, NOW - age_s, 7)) is not None


@pytest.mark.parametrize(
    "found",
    [
        PriceRound(7, 0, NOW, 7),
        PriceRound(7, -1, NOW, 7),
        PriceRound(7, 1, NOW - 3601, 7),
        PriceRound(7, 1, 0, 7),
        PriceRound(7, 1, NOW, 6),
    ],
    ids=["zero", "negative", "old", "incomplete", "carried over"],
)
def test_answer_that_is_stale_or_not_positive_is_no_price(found: PriceRound) -> None:
    assert priced(found) is None


@pytest.mark.parametrize("decimals", [-1, 78, 2**256 - 1])
def test_decimals_that_no_feed_has_are_no_price(decimals: int) -> None:
    assert priced(GOOD, decimals) is None
