"""A paymaster's hashes, and the calls inside an operation. The contracts themselves are in tests/flows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from coincurve import PublicKey
from eth_abi import encode
from hypothesis import given
from hypothesis import strategies as st
from sha3 import keccak_256

from proxy.chains.evm import abi, paymaster
from proxy.chains.evm.paymaster import PaymasterTerms
from proxy.chains.evm.signer import Signer
from proxy.chains.evm.user_operation import UserOperation

A, B, C = (bytes([n]) * 20 for n in (0xA, 0xB, 0xC))
TRANSFER = bytes.fromhex("a9059cbb") + bytes(64)
TERMS = PaymasterTerms(b"\x99" * 20, 31337, 1_800_000_000, 1_799_999_970, 5)


def operation(version: str) -> UserOperation:
    plain = UserOperation(version, A, 3, b"", b"\x01" * 40, 80_000, 100_000, 50_000, 16 * 10**9, 10**9, b"", b"")
    return paymaster.funded(plain, TERMS.paymaster, gas=(60_000, 7))


def execute(target: bytes, value: int, data: bytes) -> bytes:
    return abi.selector("execute(address,uint256,bytes)") + encode(
        ["address", "uint256", "bytes"], [target, value, data]
    )


def batch_06(*calls: tuple[bytes, bytes]) -> bytes:
    return abi.selector("executeBatch(address[],bytes[])") + encode(
        ["address[]", "bytes[]"], [[c[0] for c in calls], [c[1] for c in calls]]
    )


def batch_07(values: list[int], *calls: tuple[bytes, bytes]) -> bytes:
    return abi.selector("executeBatch(address[],uint256[],bytes[])") + encode(
        ["address[]", "uint256[]", "bytes[]"], [[c[0] for c in calls], values, [c[1] for c in calls]]
    )


def batch_08(*calls: tuple[bytes, int, bytes]) -> bytes:
    return abi.selector("executeBatch((address,uint256,bytes)[])") + encode(["(address,uint256,bytes)[]"], [calls])


def read(data: bytes) -> list[tuple[bytes, int, bytes]] | None:
    """Target, value and data of each call."""
    found = paymaster.inner_calls(data)
    return None if found is None else [(call.target, call.value_wei, data[call.start : call.end]) for call in found]


def test_every_form_of_execution_is_read() -> None:
    assert read(execute(A, 7, TRANSFER)) == [(A, 7, TRANSFER)]
    assert read(batch_06((A, TRANSFER), (B, b"\x01"))) == [(A, 0, TRANSFER), (B, 0, b"\x01")]
    assert read(batch_07([1, 2], (A, TRANSFER), (B, b""))) == [(A, 1, TRANSFER), (B, 2, b"")]
    assert read(batch_07([], (A, TRANSFER), (B, b""))) == [(A, 0, TRANSFER), (B, 0, b"")]
    assert read(batch_08((A, 1, TRANSFER), (B, 2, b""))) == [(A, 1, TRANSFER), (B, 2, b"")]
    assert read(batch_06()) == read(batch_08()) == []


def test_selector_is_the_first_four_bytes_and_less_is_none() -> None:
    found = paymaster.inner_calls(batch_06((A, TRANSFER), (B, b"\x01\x02\x03"), (C, b"")))
    assert found is not None
    assert [call.selector for call in found] == [TRANSFER[:4], b"", b""]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xb6\x1d\x27",
        abi.selector("execute(address,uint256,bytes)"),
        abi.selector("executeUserOp((address,uint256,bytes),bytes32)") + bytes(96),
        execute(A, 0, TRANSFER)[:-33],
        batch_06((A, TRANSFER))[:-64],
        # As many targets as data, and as many values or none.
        abi.selector("executeBatch(address[],bytes[])") + encode(["address[]", "bytes[]"], [[A, B], [b""]]),
        batch_07([1], (A, b""), (B, b"")),
        # An address with something in its upper bytes: the account's own code reverts.
        abi.selector("execute(address,uint256,bytes)") + b"\x01" + encode(["address", "uint256", "bytes"], [A, 0, b""])[1:],
        # An offset beyond the end, a length that lies, an array of 2**64 items.
        abi.selector("execute(address,uint256,bytes)") + encode(["address", "uint256", "uint256"], [A, 0, 2**255]),
        abi.selector("execute(address,uint256,bytes)") + encode(["address", *["uint256"] * 3], [A, 0, 96, 2**64]),
        abi.selector("executeBatch((address,uint256,bytes)[])") + encode(["uint256", "uint256"], [32, 2**64]),
    ],
)  # fmt: skip
def test_call_data_that_an_account_would_not_execute_is_not_read(data: bytes) -> None:
    assert paymaster.inner_calls(data) is None


def test_offsets_are_followed_wherever_they_lead() -> None:
    """A second reading of the same bytes would see the decoy that stands where data usually is."""
    decoy, real = TRANSFER, bytes.fromhex("095ea7b3") + bytes(64)
    tail = abi.word_of(len(decoy)) + decoy.ljust(96, b"\0") + abi.word_of(len(real)) + real.ljust(96, b"\0")
    data = (
        abi.selector("execute(address,uint256,bytes)")
        + encode(["address", "uint256", "uint256"], [A, 0, 96 + 128])
        + tail
    )
    assert read(data) == [(A, 0, real)]


@given(st.sampled_from([execute(A, 1, TRANSFER), batch_07([1], (A, TRANSFER)), batch_08((A, 1, TRANSFER))]), st.data())
def test_any_bytes_are_read_or_not_and_nothing_else(whole: bytes, chance: st.DataObject) -> None:
    at = chance.draw(st.integers(4, len(whole) - 1))
    bent = whole[:at] + chance.draw(st.binary(max_size=40)) + whole[at + chance.draw(st.integers(0, 40)) :]
    for call in paymaster.inner_calls(bent) or ():
        assert 4 <= call.start <= call.end <= len(bent)


@pytest.mark.parametrize("version", ["0.6", "0.7", "0.8"])
def test_signature_covers_every_field_and_every_term(version: str) -> None:
    plain = operation(version)
    names = ("sender", "init_code", "call_data")
    numbers = ("nonce", "call_gas", "verification_gas", "pre_verification_gas", "max_fee_wei", "max_priority_fee_wei")
    fields: list[dict[str, Any]] = [{name: b"\x05" * 20} for name in names]
    fields += [{name: getattr(plain, name) + 1} for name in numbers]
    changed = [replace(plain, **field) for field in fields]
    if version != "0.6":
        changed += [paymaster.funded(plain, TERMS.paymaster, gas=gas) for gas in ((60_001, 7), (60_000, 8))]
    terms = [
        replace(TERMS, paymaster=A),
        replace(TERMS, chain_id=1),
        replace(TERMS, valid_until=TERMS.valid_until + 1),
        replace(TERMS, valid_after=TERMS.valid_after - 1),
    ]
    hashes = {paymaster.hash_of(each, TERMS) for each in (plain, *changed)}
    hashes |= {paymaster.hash_of(plain, each) for each in terms}
    assert len(hashes) == 1 + len(changed) + len(terms)
    signed = paymaster.funded(plain, TERMS.paymaster, gas=(60_000, 7), data=b"\x01" * paymaster.DATA_BYTES)
    assert paymaster.hash_of(signed, TERMS) == paymaster.hash_of(plain, TERMS)


def test_worst_case_is_what_the_entry_point_takes_beforehand() -> None:
    assert paymaster.worst_gas(operation("0.6")) == 80_000 + 3 * 100_000 + 50_000
    assert paymaster.worst_gas(operation("0.7")) == 80_000 + 100_000 + 50_000 + 60_000 + 7


def test_signer_signs_and_never_shows_its_key() -> None:
    secret = bytes(31) + b"\x2a"
    signer = Signer(secret)
    message = b"m" * 32
    signature = signer.sign(message)
    found = PublicKey.from_signature_and_message(signature[:64] + bytes([signature[64] - 27]), message, hasher=None)
    assert keccak_256(found.format(compressed=False)[1:]).digest()[12:] == signer.address
    assert signature == signer.sign(message)
    assert len(signature) == paymaster.SIGNATURE_BYTES
    assert secret.hex() not in repr(signer)
    with pytest.raises(TypeError):
        signer.__reduce__()


def test_stub_is_as_large_as_the_real_one_and_could_be_a_signature() -> None:
    data = paymaster.data_of(TERMS, paymaster.STUB_SIGNATURE)
    assert len(data) == paymaster.DATA_BYTES == len(paymaster.data_of(TERMS, Signer(b"\x01" * 32).sign(b"m" * 32)))
    stub = paymaster.STUB_SIGNATURE
    # Raises for bytes that are no signature.
    PublicKey.from_signature_and_message(stub[:64] + bytes([stub[64] - 27]), b"m" * 32, hasher=None)
    # EIP-2: contracts refuse the upper half.
    assert int.from_bytes(stub[32:64], "big") <= 0x7FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF5D576E7357A4501DDFE92F46681B20A0
