"""The data that a VerifyingPaymaster signs and reads, and the calls that a sponsored account is about to make.

The hash covers every field of the operation except the two signatures, and the chain, the paymaster and the validity
period. A paymaster serves one EntryPoint, so its address identifies that as well. The 0.6 contract hashes the
operation's calldata as it is encoded, up to the paymaster's part, and a counter for each sender. From 0.7 on the fields
are hashed one by one, including the paymaster's own gas limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import sha3

from proxy.chains.evm import abi
from proxy.chains.evm.user_operation import UserOperation

SIGNATURE_BYTES = 65
# Two times, a word each, before the signature.
DATA_BYTES = 2 * abi.WORD + SIGNATURE_BYTES
_ADDRESS = 20
# EIP-191, version 0x45.
_SIGNED = b"\x19Ethereum Signed Message:\n32"
# An operation of 0.6 has eleven members: the offset of the first that lies behind them.
_HEAD = 11 * abi.WORD
# For estimates: of the right form and size. Recovering from it gives some address and does not revert.
STUB_SIGNATURE = b"\xff" * 15 + b"\xf0" + bytes(16) + b"\x7a" + b"\xaa" * 31 + b"\x1c"


@dataclass(frozen=True, slots=True)
class PaymasterTerms:
    """The paymaster, its chain and the validity period. `sender_nonce`: how often a 0.6 paymaster has paid for the sender."""

    paymaster: bytes
    chain_id: int
    valid_until: int
    valid_after: int
    sender_nonce: int = 0


def funded(
    operation: UserOperation, paymaster: bytes, *, gas: tuple[int, int] = (0, 0), data: bytes = b""
) -> UserOperation:
    """The operation with a paymaster's part. `gas`: its limits for verification and for afterwards, from 0.7 on."""
    limits = b"" if operation.version == "0.6" else b"".join(limit.to_bytes(16, "big") for limit in gas)
    return replace(operation, paymaster_and_data=paymaster + limits + data)


def data_of(terms: PaymasterTerms, signature: bytes) -> bytes:
    """paymasterData: the times as two words, and the signature."""
    return abi.word_of(terms.valid_until) + abi.word_of(terms.valid_after) + signature


def message(operation: UserOperation, terms: PaymasterTerms) -> bytes:
    """The digest to sign: the 32 bytes of EIP-191 over the contract's own hash."""
    return _keccak(_SIGNED + hash_of(operation, terms))


def hash_of(operation: UserOperation, terms: PaymasterTerms) -> bytes:
    """The contract's getHash. From 0.7 on the operation must have the paymaster's part, because its limits are hashed."""
    if operation.version == "0.6":
        return _hash_v06(operation, terms)
    fields: tuple[abi.Argument, ...] = (
        operation.sender,
        operation.nonce,
        _keccak(operation.init_code),
        _keccak(operation.call_data),
        operation.account_gas_limits,
        operation.paymaster_and_data[_ADDRESS : _ADDRESS + abi.WORD],
        operation.pre_verification_gas,
        operation.gas_fees,
        terms.chain_id,
        terms.paymaster,
        terms.valid_until,
        terms.valid_after,
    )
    return _keccak(b"".join(map(abi.word_of, fields)))


def _hash_v06(operation: UserOperation, terms: PaymasterTerms) -> bytes:
    packed = _calldata_v06(operation)
    head: tuple[abi.Argument, ...] = (
        6 * abi.WORD,
        terms.chain_id,
        terms.paymaster,
        terms.sender_nonce,
        terms.valid_until,
        terms.valid_after,
        len(packed),
    )
    return _keccak(b"".join(map(abi.word_of, head)) + packed)


def _calldata_v06(operation: UserOperation) -> bytes:
    """The operation as it is encoded in calldata, up to the paymaster's part. The size of that part still matters: the offset
    of the signature depends on it."""
    init_code, call_data = _tail(operation.init_code), _tail(operation.call_data)
    paid_at = _HEAD + len(init_code) + len(call_data)
    head: tuple[abi.Argument, ...] = (
        operation.sender,
        operation.nonce,
        _HEAD,
        _HEAD + len(init_code),
        operation.call_gas,
        operation.verification_gas,
        operation.pre_verification_gas,
        operation.max_fee_wei,
        operation.max_priority_fee_wei,
        paid_at,
        paid_at + len(_tail(bytes(_ADDRESS + DATA_BYTES))),
    )
    return b"".join(map(abi.word_of, head)) + init_code + call_data


def _tail(data: bytes) -> bytes:
    """Bytes in ABI encoding: their size, the bytes, and zeros up to the end of a word."""
    return abi.word_of(len(data)) + data + bytes(-len(data) % abi.WORD)


def _keccak(data: bytes) -> bytes:
    return bytes(sha3.keccak_256(data).digest())


def worst_gas(operation: UserOperation) -> int:
    """All the gas that the EntryPoint may charge for: it takes this from the paymaster's deposit in advance.

    In 0.6 the paymaster's two steps are each bounded by the limit for verification.
    """
    if operation.version == "0.6":
        return operation.call_gas + 3 * operation.verification_gas + operation.pre_verification_gas
    return (
        operation.call_gas + operation.verification_gas + operation.pre_verification_gas + sum(operation.paymaster_gas)
    )


# The account's calls


@dataclass(frozen=True, slots=True)
class InnerCall:
    """One call that the account makes. Its data is stored as a range of the operation's, because parts may overlap."""

    target: bytes
    value_wei: int
    selector: bytes
    start: int
    end: int


_EXECUTE = abi.selector("execute(address,uint256,bytes)")
_BATCH_06 = abi.selector("executeBatch(address[],bytes[])")
_BATCH_07 = abi.selector("executeBatch(address[],uint256[],bytes[])")
_BATCH_08 = abi.selector("executeBatch((address,uint256,bytes)[])")
# No block has room for an operation with more; it bounds the work of one request.
MOST_CALLS = 4096


class _Unreadable(Exception):
    pass


def inner_calls(call_data: bytes) -> tuple[InnerCall, ...] | None:
    """The calls inside an `execute` or an `executeBatch` of a SimpleAccount, in any of its forms; None for anything else.

    Offsets are followed as in Solidity, so that the same bytes have one meaning only.
    """
    reader = _Reader(call_data)
    try:
        match call_data[:4]:
            case selector if selector == _EXECUTE:
                return (reader.call(0, target_at=0),)
            case selector if selector == _BATCH_06:
                return tuple(reader.batch(targets_at=0, values_at=None, data_at=1))
            case selector if selector == _BATCH_07:
                return tuple(reader.batch(targets_at=0, values_at=1, data_at=2))
            case selector if selector == _BATCH_08:
                return tuple(reader.tuples())
    except _Unreadable:
        pass
    return None


class _Reader:
    """Calldata behind its selector. Places are counted in bytes from there."""

    def __init__(self, call_data: bytes) -> None:
        self._data = call_data
        self._size = len(call_data) - 4

    def number(self, at: int) -> int:
        if at + abi.WORD > self._size:
            raise _Unreadable
        return int.from_bytes(self._data[4 + at : 4 + at + abi.WORD], "big")

    def address(self, at: int) -> bytes:
        value = self.number(at)
        if value >> 160:
            raise _Unreadable
        return value.to_bytes(_ADDRESS, "big")

    def array(self, head_at: int) -> tuple[int, int]:
        """The length of the array whose offset is there, and the place of its first item."""
        at = self.number(head_at)
        count = self.number(at)
        first = at + abi.WORD
        if count > MOST_CALLS or first + count * abi.WORD > self._size:
            raise _Unreadable
        return count, first

    def call(self, start: int, *, target_at: int) -> InnerCall:
        """A call of three members in a row: address, value, bytes. The offset of the bytes counts from `start`."""
        return self.inner(self.address(target_at), self.number(target_at + abi.WORD), start, target_at + 2 * abi.WORD)

    def inner(self, target: bytes, value_wei: int, start: int, offset_at: int) -> InnerCall:
        at = start + self.number(offset_at)
        first = at + abi.WORD
        last = first + self.number(at)
        if last > self._size:
            raise _Unreadable
        selector = self._data[4 + first : 4 + first + 4] if last - first >= 4 else b""
        return InnerCall(target, value_wei, selector, 4 + first, 4 + last)

    def batch(self, *, targets_at: int, values_at: int | None, data_at: int) -> Iterator[InnerCall]:
        count, targets = self.array(targets_at * abi.WORD)
        datas, first_data = self.array(data_at * abi.WORD)
        values, first_value = (0, 0) if values_at is None else self.array(values_at * abi.WORD)
        # The account of 0.7 takes an empty list for zeros.
        if datas != count or values not in (0, count):
            raise _Unreadable
        for index in range(count):
            step = index * abi.WORD
            value = self.number(first_value + step) if values else 0
            yield self.inner(self.address(targets + step), value, first_data, first_data + step)

    def tuples(self) -> Iterator[InnerCall]:
        count, first = self.array(0)
        for index in range(count):
            at = first + self.number(first + index * abi.WORD)
            yield self.call(at, target_at=at)
