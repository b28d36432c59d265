"""Logs -> transfers: each shape, and no shape that makes it fail. The ABI's own encoder says what the data is."""

from __future__ import annotations

import orjson
import pytest
from eth_abi import encode
from eth_utils import keccak
from hypothesis import given
from hypothesis import strategies as st

from proxy.chains.evm import facts
from proxy.chains.evm.facts import ChainLog, Header
from proxy.core.holdings import ZERO, Transfer

A, B, CONTRACT = b"\x0a" * 20, b"\x0b" * 20, b"\xcc" * 20
HASH = "0x" + "12" * 32
uints = st.integers(0, 2**256 - 1)


def topic(address: bytes) -> str:
    return "0x" + address.rjust(32, b"\0").hex()


def log(topics: list[str], data: bytes = b"", *, transaction: str = HASH, index: int = 3) -> ChainLog:
    """As an upstream gives it, through the decoder."""
    sent = {
        "address": "0x" + CONTRACT.hex(),
        "topics": topics,
        "data": "0x" + data.hex(),
        "blockNumber": "0x10",
        "blockHash": HASH,
        "transactionHash": transaction,
        "transactionIndex": "0x1",
        "logIndex": hex(index),
        "removed": False,
    }
    return facts.read_logs(orjson.dumps([sent]))[0]


def transfer(standard: int, sender: bytes, recipient: bytes, amount: int, token: int = 0, item: int = 0) -> Transfer:
    return Transfer(standard, CONTRACT, sender, recipient, amount, token, HASH, 3, item, block=16)


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("TRANSFER", "Transfer(address,address,uint256)"),
        ("TRANSFER_SINGLE", "TransferSingle(address,address,address,uint256,uint256)"),
        ("TRANSFER_BATCH", "TransferBatch(address,address,address,uint256[],uint256[])"),
        ("DEPOSIT", "Deposit(address,uint256)"),
        ("WITHDRAWAL", "Withdrawal(address,uint256)"),
    ],
)
def test_topic_is_the_hash_of_its_signature(name: str, signature: str) -> None:
    assert getattr(facts, name) == "0x" + keccak(text=signature).hex()


@given(uints)
def test_erc20_erc721_and_erc1155_single(number: int) -> None:
    from_to = [topic(A), topic(B)]
    found = facts.transfers_of(
        [
            log([facts.TRANSFER, *from_to], encode(["uint256"], [number])),
            log([facts.TRANSFER, *from_to, f"0x{number:064x}"]),
            log([facts.TRANSFER_SINGLE, topic(CONTRACT), *from_to], encode(["uint256", "uint256"], [number, 7])),
        ]
    )
    assert found == (
        [transfer(20, A, B, number), transfer(721, A, B, 1, number), transfer(1155, A, B, 7, number)],
        0,
    )


@given(st.lists(st.tuples(uints, uints), max_size=8))
def test_erc1155_batch(tokens: list[tuple[int, int]]) -> None:
    data = encode(["uint256[]", "uint256[]"], [[t for t, _ in tokens], [a for _, a in tokens]])
    found, odd = facts.transfers_of([log([facts.TRANSFER_BATCH, topic(A), topic(A), topic(B)], data)])
    assert odd == 0
    assert found == [transfer(1155, A, B, amount, token, item) for item, (token, amount) in enumerate(tokens)]


def test_deposits_make_and_withdrawals_destroy() -> None:
    data = encode(["uint256"], [5])
    found, odd = facts.transfers_of([log([facts.DEPOSIT, topic(A)], data), log([facts.WITHDRAWAL, topic(B)], data)])
    assert (found, odd) == ([transfer(20, ZERO, A, 5), transfer(20, B, ZERO, 5)], 0)


def test_deposit_that_repeats_a_transfer_of_its_transaction_is_left_out() -> None:
    data = encode(["uint256"], [5])
    minted = log([facts.TRANSFER, topic(ZERO), topic(A)], data)
    deposit = log([facts.DEPOSIT, topic(A)], data, index=4)
    elsewhere = log([facts.DEPOSIT, topic(A)], data, transaction="0x" + "34" * 32)
    found, _ = facts.transfers_of([deposit, minted, elsewhere])
    assert [each.transaction for each in found] == [HASH, "0x" + "34" * 32]


words = st.sampled_from([0, 1, 32, 64, 96, 2**64, 2**256 - 1]).map(lambda number: number.to_bytes(32, "big"))
topics = st.one_of(
    st.sampled_from([*sorted(facts.TOPICS), topic(A), topic(B), "0x", "", "0x" + "f" * 64]),
    st.binary(max_size=32).map(lambda data: "0x" + data.hex()),
)


@given(st.lists(topics, max_size=5), st.one_of(st.binary(max_size=200), st.lists(words, max_size=9).map(b"".join)))
def test_whatever_a_contract_says_is_a_transfer_or_odd_or_nothing(said: list[str], data: bytes) -> None:
    found, odd = facts.transfers_of([log(said, data)])
    known = bool(said) and said[0] in facts.TOPICS
    assert odd <= 1
    assert not (odd and found)
    if not known:
        assert not odd
        assert not found
    for each in found:
        assert (len(each.sender), len(each.recipient), 0 <= each.amount < 2**256) == (20, 20, True)


def header(number: int = 16, block_hash: str = HASH) -> Header:
    return Header(hex(number), block_hash, "0x" + "00" * 32, "0x5")


def test_facts_of_a_block_know_their_place() -> None:
    found = facts.facts_of(header(), header(), [log([])], alone=True)
    assert (found.first, found.last, found.time, found.blocks) == (16, 16, 5, 1)
    assert found.header is not None
    ranged = facts.facts_of(header(10), header(16), [log([])], alone=False)
    assert (ranged.blocks, ranged.header) == (7, None)


@pytest.mark.parametrize(
    ("first", "last"),
    [(header(17), header(20)), (header(3), header(15)), (header(16), header(16, "0x" + "99" * 32))],
)
def test_logs_of_another_block_are_refused(first: Header, last: Header) -> None:
    with pytest.raises(ValueError, match="logs of"):
        facts.facts_of(first, last, [log([])], alone=False)


def test_removed_logs_are_refused() -> None:
    gone = log([])
    gone.removed = True
    with pytest.raises(ValueError, match="replaced"):
        facts.facts_of(header(), header(), [gone], alone=True)


def test_bloom_has_three_bits_for_a_topic() -> None:
    """The first example of the yellow paper's function: bits by pairs of the hash's first six bytes."""
    digest = keccak(bytes.fromhex(facts.TRANSFER[2:]))
    bits = {int.from_bytes(digest[at : at + 2], "big") % 2048 for at in (0, 2, 4)}
    assert facts.bloom_mask(facts.TRANSFER) == sum(1 << bit for bit in bits)


def test_absent_block_is_none() -> None:
    assert facts.read_header(b"null") is None
