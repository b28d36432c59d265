"""The ABI against eth-abi, an independent implementation, and against random bytes."""

from __future__ import annotations

import eth_abi
import pytest
from eth_utils import function_signature_to_4byte_selector
from hypothesis import given
from hypothesis import strategies as st

from proxy.chains.evm import abi

ADDRESSES = st.binary(min_size=20, max_size=20)
CALLS = st.lists(st.tuples(ADDRESSES, st.binary(max_size=100)), max_size=20)
RESULTS = st.lists(st.tuples(st.booleans(), st.binary(max_size=100)), max_size=20)


def encoded(types: list[str], *values: object) -> bytes:
    return bytes(eth_abi.encode(types, values))


@pytest.mark.parametrize("signature", ["balanceOf(address)", "name()", "aggregate3((address,bool,bytes)[])"])
def test_selector_is_the_first_four_bytes_of_the_hash(signature: str) -> None:
    assert abi.selector(signature) == function_signature_to_4byte_selector(signature)


@given(ADDRESSES, st.integers(0, 2**256 - 1), st.booleans(), st.binary(min_size=4, max_size=4))
def test_call_is_encoded_as_by_eth_abi(target: bytes, number: int, truth: bool, four: bytes) -> None:
    data = abi.call("f(address,uint256,bool,bytes4)", target, number, truth, four)
    assert data[4:] == encoded(["address", "uint256", "bool", "bytes4"], target, number, truth, four)


def test_negative_number_is_written_in_twos_complement_and_read_back() -> None:
    assert abi.word_of(-5) == encoded(["int256"], -5)
    assert abi.signed(abi.word_of(-5)) == -5
    assert abi.signed(abi.word_of(5)) == 5


@given(st.text(max_size=200))
def test_string_is_read(text: str) -> None:
    assert abi.text(encoded(["string"], text)) == text


@pytest.mark.parametrize(
    ("word", "text"),
    [(b"OLD".ljust(32, b"\0"), "OLD"), (b"x" * 32, "x" * 32), (bytes(32), ""), (b"\xff".ljust(32, b"\0"), "\ufffd")],
)
def test_word_of_text_is_read(word: bytes, text: str) -> None:
    assert abi.text(word) == text


def test_place_of_a_value_among_others_is_found() -> None:
    data = encoded(["uint256", "address", "string", "bytes"], 7, b"\x01" * 20, "hello", b"\x02\x03")
    assert abi.uint(data) == 7
    assert abi.address(data, 1) == b"\x01" * 20
    assert abi.dynamic(data, 2) == b"hello"
    assert abi.dynamic(data, 3) == b"\x02\x03"


@pytest.mark.parametrize(
    "data",
    [
        None,
        b"",
        b"\x01" * 31,
        encoded(["uint256"], 2**256 - 1) * 2,  # an offset beyond everything
        encoded(["uint256", "uint256"], 32, 2**256 - 1),  # a length beyond everything
        encoded(["uint256", "uint256"], 32, 1),  # one byte that is not there
        encoded(["uint256", "uint256"], 33, 0),
    ],
)
def test_malformed_data_is_none(data: bytes | None) -> None:
    assert abi.text(data) is None
    assert abi.dynamic(data) is None


def test_address_and_truth_are_read_strictly() -> None:
    assert abi.address(abi.word_of(1 << 160)) is None
    assert [abi.truth(abi.word_of(n)) for n in (0, 1, 2)] == [False, True, None]
    assert abi.truth(b"\x01") is None


@given(st.binary(max_size=300))
def test_no_bytes_make_a_reader_raise(data: bytes) -> None:
    for read in (abi.uint, abi.signed, abi.truth, abi.address, abi.dynamic, abi.text):
        read(data)
    for count in (0, 1, 3):
        abi.aggregated(data, count)


@pytest.mark.parametrize("text", [None, 5, "", "0", "abcd", "0xabc", "0xzz", "0x\ud800"])
def test_result_that_is_no_hex_is_none(text: object) -> None:
    assert abi.unhex(text) is None


@given(CALLS)
def test_many_calls_are_encoded_as_by_eth_abi(calls: list[tuple[bytes, bytes]]) -> None:
    triples = [(target, True, data) for target, data in calls]
    assert abi.aggregate(calls)[4:] == encoded(["(address,bool,bytes)[]"], triples)


@given(RESULTS)
def test_results_of_many_calls_are_read(results: list[tuple[bool, bytes]]) -> None:
    found = abi.aggregated(encoded(["(bool,bytes)[]"], results), len(results))
    assert found == [data if ok else (abi.REVERTED if data else abi.SILENT) for ok, data in results]


@given(RESULTS, st.data())
def test_results_that_are_cut_or_changed_never_raise(results: list[tuple[bool, bytes]], draw: st.DataObject) -> None:
    data = bytearray(encoded(["(bool,bytes)[]"], results))
    index = draw.draw(st.integers(0, len(data) - 1))
    data[index] ^= draw.draw(st.integers(1, 255))
    abi.aggregated(bytes(data), len(results))
    abi.aggregated(bytes(data[:index]), len(results))


def test_results_that_all_claim_the_same_bytes_are_refused() -> None:
    """So that a reply of one megabyte does not become a thousand of them."""
    one = encoded(["bool", "uint256", "uint256"], True, 64, 100) + bytes(100)
    many = encoded(["uint256", "uint256"], 32, 50) + encoded(["uint256"], 50 * 32) * 50 + one
    assert abi.aggregated(many, 50) is None


def test_answer_of_another_count_is_no_answer() -> None:
    data = encoded(["(bool,bytes)[]"], [(True, b"x")])
    assert abi.aggregated(data, 1) == [b"x"]
    assert abi.aggregated(data, 2) is None
    assert abi.aggregated(b"", 1) is None
