"""Accounts of the token programs against solders' own layouts, and against random bytes."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from solders.pubkey import Pubkey
from solders.token.state import Mint, TokenAccount, TokenAccountState

from proxy.chains.svm import tokens

KEYS = st.binary(min_size=32, max_size=32)
U64 = st.integers(0, 2**64 - 1)


@given(KEYS, KEYS, U64)
def test_token_account_is_read(mint: bytes, owner: bytes, amount: int) -> None:
    account = TokenAccount(
        mint=Pubkey.from_bytes(mint),
        owner=Pubkey.from_bytes(owner),
        amount=amount,
        delegate=None,
        state=TokenAccountState.Initialized,
        is_native=None,
        delegated_amount=0,
        close_authority=None,
    )
    assert tokens.held(bytes(account)) == tokens.HeldToken(mint, amount)
    assert tokens.held(bytes(account)[: tokens.ACCOUNT_BYTES]) == tokens.HeldToken(mint, amount)
    assert tokens.mint(bytes(account)) is None


@pytest.mark.parametrize("is_initialized", [True, False])
def test_mint_is_read_once_it_is_initialised(is_initialized: bool) -> None:
    data = bytes(
        Mint(mint_authority=None, supply=2**64 - 1, decimals=9, is_initialized=is_initialized, freeze_authority=None)
    )
    assert tokens.mint(data) == (tokens.Mint(2**64 - 1, 9) if is_initialized else None)


def test_metadata_address_is_the_programs() -> None:
    program = Pubkey.from_string(tokens.METADATA_PROGRAM)
    for n in range(20):
        mint = bytes([n]) * 32
        found, _ = Pubkey.find_program_address([b"metadata", bytes(program), mint], program)
        assert tokens.metadata_address(mint) == bytes(found)


@given(st.binary(max_size=400), st.binary(max_size=200))
def test_no_bytes_make_a_reader_raise(data: bytes, more: bytes) -> None:
    for each in (data, bytes(165) + b"\x01" + data, b"\x04" + bytes(64) + more):
        tokens.held(each)
        tokens.mint(each)
        tokens.own_naming(each)
        tokens.naming(each, bytes(32))


def test_extension_that_claims_more_than_there_is_is_no_name() -> None:
    head = bytes(165) + b"\x01"
    for size, length in ((65535, 5), (68, 2**32 - 1), (68, 1000)):
        extension = struct.pack("<HH", 19, size) + bytes(64) + struct.pack("<I", length)
        assert tokens.own_naming(head + extension) is None
