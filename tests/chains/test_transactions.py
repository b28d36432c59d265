"""The hash of a transaction, computed from the bytes that are sent."""

from __future__ import annotations

import json

import coincurve
import pytest
import sha3

from proxy.chains.evm.transactions import hash_of_sent, subjects_of_sent
from tests.flows.test_upstream_writes import DYNAMIC, LEGACY


def rlp(item: bytes | list) -> bytes:  # type: ignore[type-arg]
    """Recursive Length Prefix (yellow paper, appendix B)."""
    if isinstance(item, bytes):
        if len(item) == 1 and item[0] < 0x80:
            return item
        body, short = item, 0x80
    else:
        body, short = b"".join(map(rlp, item)), 0xC0
    if len(body) < 56:
        return bytes([short + len(body)]) + body
    size = len(body).to_bytes((len(body).bit_length() + 7) // 8, "big")
    return bytes([short + 55 + len(size)]) + size + body


def sent_hash(raw: bytes) -> str | None:
    found = hash_of_sent(json.dumps(["0x" + raw.hex()]).encode())
    return None if found is None else json.loads(found)


def keccak(raw: bytes) -> str:
    return "0x" + str(sha3.keccak_256(raw).hexdigest())


@pytest.mark.parametrize("fields", [[], [b"\x01"] * 14, [b"\x01", b"a" * 300, [b"b" * 32]]])
@pytest.mark.parametrize(
    "beside",
    [
        [[b"x" * 131_072], [b"c" * 48], [b"p" * 48]],
        # EIP-7594: the version of what is beside it comes first.
        [b"\x01", [b"x" * 131_072], [b"c" * 48], [b"p" * 48] * 128],
    ],
)
def test_blobs_beside_a_transaction_are_not_part_of_its_hash(fields: list[bytes], beside: list[bytes]) -> None:
    expected = keccak(b"\x03" + rlp(fields))
    assert sent_hash(b"\x03" + rlp([fields, *beside])) == expected


def test_blob_transaction_that_is_sent_without_blobs_is_hashed_as_it_is() -> None:
    raw = b"\x03" + rlp([b"\x01", b"\x02", b"t" * 20])
    assert sent_hash(raw) == keccak(raw)


@pytest.mark.parametrize("raw", [b"", b"\x03", b"\x03\x01", b"\x03\xff", b"\x03\xc2\xf9\xff", b"\x03\xc1\xc5"])
def test_malformed_transaction_has_no_hash(raw: bytes) -> None:
    assert sent_hash(raw) is None


# The address of the private key 0x11…11, which has signed the transactions.
SENDER = "0x19e7e376e7c213b7e7e7e46cc70a5dd086daff2a"


@pytest.mark.parametrize(("raw", "hash_"), [LEGACY, DYNAMIC])
def test_sent_transaction_has_its_hash_and_its_sender(raw: str, hash_: str) -> None:
    for params in ([raw], [raw.upper().replace("0X", "0x"), {"fast": True}], [{"tx": raw, "maxBlockNumber": "0x1"}]):
        assert subjects_of_sent(json.dumps(params).encode()) == (hash_, SENDER)


def signed(fields: list[bytes], kind: bytes) -> bytes:
    """A transaction of the type, or one from before EIP-155 without a type, signed by SENDER."""
    digest = sha3.keccak_256(kind + rlp(fields)).digest()
    made = coincurve.PrivateKey(b"\x11" * 32).sign_recoverable(digest, hasher=None)
    last = made[64] if kind else made[64] + 27
    return kind + rlp([*fields, bytes([last]).lstrip(b"\0"), made[:32].lstrip(b"\0"), made[32:64].lstrip(b"\0")])


@pytest.mark.parametrize("kind", [b"", b"\x01", b"\x02", b"\x03", b"\x04"])
def test_sender_is_recovered_for_each_type(kind: bytes) -> None:
    raw = signed([b"\x01", b"\x02", b"", b"\x05", b"c" * 20, b"d" * 70], kind)
    assert subjects_of_sent(json.dumps(["0x" + raw.hex()]).encode()) == (keccak(raw), SENDER)


@pytest.mark.parametrize("first", ["", "0x", "0x02", "0x02c0", "0xc0", "0xzz", None, 5, {}, {"tx": 1}, "0xf9ffff"])
def test_params_that_are_no_transaction_have_no_sender(first: object) -> None:
    for params in ([], [first]):
        assert all(len(name) == 66 for name in subjects_of_sent(json.dumps(params).encode()))
