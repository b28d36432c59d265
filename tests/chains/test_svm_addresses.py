"""Solana's addresses against solders, which is the chain's own library."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from solders.pubkey import Pubkey

from proxy.chains.families import READERS
from proxy.chains.svm import address

BYTES = st.binary(min_size=32, max_size=32)
P = 2**255 - 19


@given(BYTES)
@example(bytes(32))
@example(bytes(31) + b"\x01")
@example(b"\xff" * 32)
def test_text_is_the_librarys_and_reads_back(raw: bytes) -> None:
    text = str(Pubkey.from_bytes(raw))
    assert address.show(raw) == text
    assert address.parse(text) == raw


@given(BYTES)
@example(bytes(32))
@example((1).to_bytes(32, "little"))
@example(P.to_bytes(32, "little"))
@example((P + 1).to_bytes(32, "little"))
@example((P - 1).to_bytes(32, "little"))
def test_points_on_the_curve_are_recognised(raw: bytes) -> None:
    assert address.is_on_curve(raw) is Pubkey.from_bytes(raw).is_on_curve()


@given(st.lists(st.binary(max_size=32), max_size=4), BYTES)
def test_derived_address_is_the_librarys(seeds: list[bytes], program: bytes) -> None:
    found, _ = Pubkey.find_program_address(seeds, Pubkey.from_bytes(program))
    assert address.derived(seeds, program) == bytes(found)


@pytest.mark.parametrize("text", ["", "1" * 31, "1" * 33, "z" * 44, "0" * 32, "I" * 40, "1" * 45, "2" * 32])
def test_malformed_address_is_none(text: str) -> None:
    assert address.parse(text) is None


@given(st.text(max_size=50))
def test_no_text_makes_a_parser_raise(text: str) -> None:
    for family in READERS.values():
        found = family.addresses.parse(text)
        assert found is None or family.addresses.parse(family.addresses.show(found)) == found
