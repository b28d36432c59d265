"""User operations (ERC-4337): their two shapes, checked field by field, packed, and hashed as the EntryPoint does.

Entry point 0.6 has eleven fields. From 0.7 on a caller sends them unpacked, and the contract gets them packed: factory and its
data as `initCode`, the paymaster's four as `paymasterAndData`, two pairs of numbers in one word each. 0.8 hashes the same
packed fields by EIP-712. Callers may use either shape for every version (`in_shape_of`), and both at once if they agree. A
`UserOperation` holds the packed fields, as bytes and numbers; fields missing from a draft are zero or empty.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sha3

VERSIONS = ("0.6", "0.7", "0.8")
# The widest numbers that the contracts accept.
_UINT128, _UINT256 = 128, 256
_HEX = re.compile(r"0x[0-9a-fA-F]*", re.ASCII)
_QUANTITY = re.compile(r"0x[0-9a-fA-F]{1,64}", re.ASCII)
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{40}", re.ASCII)
# EIP-7702: the account's code is a delegation, and this marker replaces the factory.
MARKER_7702 = "0x7702"
_PADDED_MARKER = MARKER_7702.ljust(42, "0")
# The code of an account that delegates begins with this.
_DELEGATION = bytes.fromhex("ef0100")
_ZERO, _NO_BYTES = ("0x0", "0x00"), ("0x",)
_ECHO = 40

_GAS = ("callGasLimit", "verificationGasLimit", "preVerificationGas", "maxFeePerGas", "maxPriorityFeePerGas")
_FACTORY = ("factory", "factoryData")
_PAYMASTER = ("paymaster", "paymasterVerificationGasLimit", "paymasterPostOpGasLimit", "paymasterData")
_V06 = ("sender", "nonce", "initCode", "callData", *_GAS, "paymasterAndData", "signature")
_V07 = ("sender", "nonce", *_FACTORY, "callData", *_GAS, *_PAYMASTER, "signature", "eip7702Auth")
_V07_NEEDED = ("sender", "nonce", "callData", *_GAS, "signature")
_DRAFT_NEEDED = ("sender", "nonce", "callData")
_AUTH = ("chainId", "address", "nonce", "yParity", "r", "s")


class BadOperation(ValueError):
    """A field is missing, unknown or invalid; the message names it."""


@dataclass(frozen=True, slots=True)
class UserOperation:
    """The fields as the contract packs them. `delegate`: the code that an EIP-7702 authorization in it points to."""

    version: str
    sender: bytes
    nonce: int
    init_code: bytes
    call_data: bytes
    call_gas: int
    verification_gas: int
    pre_verification_gas: int
    max_fee_wei: int
    max_priority_fee_wei: int
    paymaster_and_data: bytes
    signature: bytes
    delegate: bytes | None = None

    @property
    def is_delegated(self) -> bool:
        """Whether the hash covers the account's delegate, which must be read from the chain if there is no authorization."""
        return self.version != "0.6" and self.init_code[:20] == bytes.fromhex(_PADDED_MARKER[2:])

    @property
    def factory(self) -> bytes | None:
        return self.init_code[:20] if self.init_code and not self.is_delegated else None

    @property
    def paymaster(self) -> bytes | None:
        return self.paymaster_and_data[:20] or None

    @property
    def paymaster_gas(self) -> tuple[int, int]:
        """Its gas limits for verification and for the post-op; since 0.7 they are part of its data."""
        if self.version == "0.6" or not self.paymaster_and_data:
            return 0, 0
        packed = self.paymaster_and_data
        return int.from_bytes(packed[20:36], "big"), int.from_bytes(packed[36:52], "big")

    @property
    def account_gas_limits(self) -> bytes:
        return self.verification_gas.to_bytes(16, "big") + self.call_gas.to_bytes(16, "big")

    @property
    def gas_fees(self) -> bytes:
        return self.max_priority_fee_wei.to_bytes(16, "big") + self.max_fee_wei.to_bytes(16, "big")


# Reading


def version_of(entry_point: str, entry_points: Mapping[str, str]) -> str:
    """Which of the chain's entry points this is."""
    if not _ADDRESS.fullmatch(entry_point):
        raise BadOperation(f"entryPoint: must be an address, not {_shown(entry_point)}")
    lowered = entry_point.lower()
    for version, address in entry_points.items():
        if address.lower() == lowered and version in VERSIONS:
            return version
    known = ", ".join(address for version, address in entry_points.items() if version in VERSIONS)
    raise BadOperation(f"entryPoint: {entry_point} is not supported here; supported: {known or 'none'}")


def has_delegation(given: Mapping[str, Any]) -> bool:
    """Whether the fields are those of an account that delegates by EIP-7702."""
    markers = (MARKER_7702, _PADDED_MARKER)
    return given.get("eip7702Auth") is not None or given.get("factory") in markers or given.get("initCode") in markers


def parse(given: Any, version: str, *, draft: bool = False) -> UserOperation:
    """The operation, or BadOperation. A draft needs only sender, nonce and call data."""
    fields = in_shape_of(given, version)
    return _v06(fields, draft=draft) if version == "0.6" else _v07(fields, version, draft=draft)


def in_shape_of(given: Any, version: str) -> Mapping[str, Any]:
    """The fields in the shape of the version. `initCode` and `paymasterAndData` are the packed forms of the factory's and the
    paymaster's fields. Null is the same as missing, and an empty packed form the same as none."""
    if not isinstance(given, Mapping):
        raise BadOperation("userOperation: must be an object")
    fields = {name: value for name, value in given.items() if value is not None}
    if version == "0.6":
        _pack(fields, "initCode", _FACTORY)
        # Entry point 0.6 has no limits for the paymaster alone.
        _pack(fields, "paymasterAndData", ("paymaster", "paymasterData"), dropped=_PAYMASTER[1:3])
    else:
        _unpack(fields, "initCode", _unpacked_init_code)
        _unpack(fields, "paymasterAndData", _unpacked_paymaster)
    return fields


def _pack(fields: dict[str, Any], packed: str, parts: tuple[str, str], *, dropped: tuple[str, ...] = ()) -> None:
    """Replace the parts by the packed form. `dropped`: fields without a place in it."""
    if parts[0] in fields:
        joined = _address(fields, parts[0]) + _bytes(fields, parts[1])
        if _bytes(fields, packed) not in (b"", joined):
            raise BadOperation(f"{packed}: contradicts {_listed(parts)}")
        fields[packed] = "0x" + joined.hex()
    elif _bytes(fields, parts[1]):
        raise BadOperation(f"{parts[0]}: is missing; {_listed(parts)} come together")
    for name in (*parts, *dropped):
        fields.pop(name, None)


def _unpack(fields: dict[str, Any], packed: str, read: Callable[[bytes], dict[str, str]]) -> None:
    """Replace the packed form by its parts."""
    data = _bytes(fields, packed)
    fields.pop(packed, None)
    for name, value in read(data).items() if data else ():
        if name in fields and not _is_same(fields, name, value):
            raise BadOperation(f"{packed}: contradicts {name}")
        fields.setdefault(name, value)


def _unpacked_init_code(data: bytes) -> dict[str, str]:
    if data in (bytes.fromhex(MARKER_7702[2:]), bytes.fromhex(_PADDED_MARKER[2:])):
        return {"factory": MARKER_7702}
    if len(data) < 20:
        raise BadOperation("initCode: must be 0x, or begin with an address of 20 bytes")
    marker = bytes.fromhex(_PADDED_MARKER[2:])
    factory = MARKER_7702 if data.startswith(marker) else "0x" + data[:20].hex()
    return {"factory": factory, "factoryData": "0x" + data[20:].hex()}


def _unpacked_paymaster(data: bytes) -> dict[str, str]:
    if len(data) < 52:
        raise BadOperation(
            "paymasterAndData: must be 0x, or the paymaster of 20 bytes, its two gas limits of 16 bytes each, and its data"
        )
    limits = (hex(int.from_bytes(data[at : at + 16], "big")) for at in (20, 36))
    return dict(zip(_PAYMASTER, ("0x" + data[:20].hex(), *limits, "0x" + data[52:].hex()), strict=True))


def _is_same(fields: Mapping[str, Any], name: str, value: str) -> bool:
    if name in _PAYMASTER[1:3]:
        return _number(fields, name, _UINT128) == int(value, 16)
    given = str(fields[name]).lower()
    return given == value or (given, value) == (_PADDED_MARKER, MARKER_7702)


def _v06(given: Mapping[str, Any], *, draft: bool) -> UserOperation:
    _check_names(given, _V06, _DRAFT_NEEDED if draft else _V06, "0.6")
    init_code, paid = _bytes(given, "initCode"), _bytes(given, "paymasterAndData")
    for name, data in (("initCode", init_code), ("paymasterAndData", paid)):
        if 0 < len(data) < 20:
            raise BadOperation(f"{name}: must be 0x, or begin with an address of 20 bytes")
    return _operation(given, "0.6", _UINT256, init_code=init_code, paid=paid)


def _v07(given: Mapping[str, Any], version: str, *, draft: bool) -> UserOperation:
    _check_names(given, _V07, _DRAFT_NEEDED if draft else _V07_NEEDED, version)
    is_7702 = given.get("factory") in (MARKER_7702, _PADDED_MARKER)
    if not is_7702:
        _check_together(given, _FACTORY)
    # A draft may lack the paymaster's limits, because it is sent to get them.
    _check_together(given, _PAYMASTER, needed=("paymaster",) if draft else _PAYMASTER)
    factory = bytes.fromhex(_PADDED_MARKER[2:]) if is_7702 else _address(given, "factory")
    paid = b""
    if paymaster := _address(given, "paymaster"):
        limits = (_number(given, name, _UINT128).to_bytes(16, "big") for name in _PAYMASTER[1:3])
        paid = b"".join((paymaster, *limits, _bytes(given, "paymasterData")))
    return _operation(
        given, version, _UINT128, init_code=factory + _bytes(given, "factoryData"), paid=paid, delegate=_delegate(given)
    )


def _operation(
    given: Mapping[str, Any], version: str, bits: int, *, init_code: bytes, paid: bytes, delegate: bytes | None = None
) -> UserOperation:
    return UserOperation(
        version=version,
        sender=_address(given, "sender"),
        nonce=_number(given, "nonce", _UINT256),
        init_code=init_code,
        call_data=_bytes(given, "callData"),
        call_gas=_number(given, "callGasLimit", bits),
        verification_gas=_number(given, "verificationGasLimit", bits),
        pre_verification_gas=_number(given, "preVerificationGas", _UINT256),
        max_fee_wei=_number(given, "maxFeePerGas", bits),
        max_priority_fee_wei=_number(given, "maxPriorityFeePerGas", bits),
        paymaster_and_data=paid,
        signature=_bytes(given, "signature"),
        delegate=delegate,
    )


def _check_names(given: Mapping[str, Any], known: tuple[str, ...], needed: tuple[str, ...], version: str) -> None:
    for name in given:
        if name not in known:
            raise BadOperation(
                f"{_shown(name, quoted=False)}: is not a field of an operation for entry point {version}"
            )
    for name in needed:
        if given.get(name) is None:
            raise BadOperation(f"{name}: is missing")


def _check_together(given: Mapping[str, Any], group: tuple[str, ...], needed: tuple[str, ...] | None = None) -> None:
    """All fields of a group or none. Without the group's contract, zero counts as absent: viem sends such limits."""
    there = [name for name in group if given.get(name) is not None]
    if group[0] not in there:
        there = [name for name in there if given[name] not in (_NO_BYTES if name.endswith("Data") else _ZERO)]
    lacking = [name for name in needed or group if name not in there]
    if there and lacking:
        raise BadOperation(f"{lacking[0]}: is missing; {_listed(group)} come together")


def delegate_of(code: bytes) -> bytes | None:
    """The address that an account's code delegates to; None for other code.

    EIP-7702: the code is a "delegation indicator `(0xef0100 || address)`", 23 bytes and no more.
    """
    return code[3:] if len(code) == 23 and code.startswith(_DELEGATION) else None


def _delegate(given: Mapping[str, Any]) -> bytes | None:
    auth = given.get("eip7702Auth")
    if auth is None:
        return None
    if not isinstance(auth, Mapping):
        raise BadOperation("eip7702Auth: must be an object")
    for name in auth:
        if name not in _AUTH:
            raise BadOperation(f"eip7702Auth.{_shown(name, quoted=False)}: is not a field of an authorization")
    for name in _AUTH:
        if auth.get(name) is None:
            raise BadOperation(f"eip7702Auth.{name}: is missing")
        if name != "address":
            _number(auth, name, _UINT256, within="eip7702Auth.")
    return _address(auth, "address", within="eip7702Auth.")


def _address(given: Mapping[str, Any], name: str, within: str = "") -> bytes:
    """The bytes; empty if absent."""
    value = given.get(name)
    if value is None:
        return b""
    if not isinstance(value, str) or not _ADDRESS.fullmatch(value):
        raise BadOperation(f"{within}{name}: must be an address, 0x and 40 hex digits, not {_shown(value)}")
    return bytes.fromhex(value[2:])


def _number(given: Mapping[str, Any], name: str, bits: int, within: str = "") -> int:
    value = given.get(name)
    if value is None:
        return 0
    if not isinstance(value, str) or not _QUANTITY.fullmatch(value):
        raise BadOperation(f"{within}{name}: must be a hex number such as 0x5208, not {_shown(value)}")
    number = int(value, 16)
    if number >> bits:
        raise BadOperation(f"{within}{name}: must fit into {bits} bits")
    return number


def _bytes(given: Mapping[str, Any], name: str) -> bytes:
    value = given.get(name)
    if value is None:
        return b""
    if not isinstance(value, str) or not _HEX.fullmatch(value):
        raise BadOperation(f"{name}: must be bytes in hex, 0x and two digits each, not {_shown(value)}")
    if len(value) % 2:
        raise BadOperation(f"{name}: has an odd number of hex digits")
    return bytes.fromhex(value[2:])


def _listed(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _shown(value: Any, *, quoted: bool = True) -> str:
    """A caller's own text, truncated for use in a message."""
    if not isinstance(value, str):
        return {
            dict: "an object",
            list: "an array",
            bool: "true or false",
            int: "a JSON number",
            float: "a JSON number",
        }.get(type(value), "this")
    text = value if len(value) <= _ECHO else f"{value[:_ECHO]}…"
    text = text.encode("ascii", "backslashreplace").decode()
    return repr(text) if quoted else text


# Hashing


def _keccak(data: bytes) -> bytes:
    return bytes(sha3.keccak_256(data).digest())


def _word(number: int) -> bytes:
    return number.to_bytes(32, "big")


_TYPE = _keccak(
    b"PackedUserOperation(address sender,uint256 nonce,bytes initCode,bytes callData,bytes32 accountGasLimits,"
    b"uint256 preVerificationGas,bytes32 gasFees,bytes paymasterAndData)"
)
_DOMAIN = (
    _keccak(b"EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)")
    + _keccak(b"ERC4337")
    + _keccak(b"1")
)


def hash_of(operation: UserOperation, entry_point: bytes, chain_id: int, *, delegate: bytes | None = None) -> bytes:
    """The userOpHash. `delegate`: the sender's delegate on the chain, if the operation does not name one."""
    place = bytes(12) + entry_point
    if operation.version == "0.6":
        return _keccak(_keccak(_fields_v06(operation)) + place + _word(chain_id))
    fields = _fields_v07(operation, operation.delegate or delegate)
    if operation.version == "0.7":
        return _keccak(_keccak(fields) + place + _word(chain_id))
    domain = _keccak(_DOMAIN + _word(chain_id) + place)
    return _keccak(b"\x19\x01" + domain + _keccak(_TYPE + fields))


def _fields_v06(operation: UserOperation) -> bytes:
    return b"".join(
        (
            bytes(12) + operation.sender,
            _word(operation.nonce),
            _keccak(operation.init_code),
            _keccak(operation.call_data),
            _word(operation.call_gas),
            _word(operation.verification_gas),
            _word(operation.pre_verification_gas),
            _word(operation.max_fee_wei),
            _word(operation.max_priority_fee_wei),
            _keccak(operation.paymaster_and_data),
        )
    )


def _fields_v07(operation: UserOperation, delegate: bytes | None) -> bytes:
    return b"".join(
        (
            bytes(12) + operation.sender,
            _word(operation.nonce),
            _keccak(_hashed_init_code(operation, delegate)),
            _keccak(operation.call_data),
            operation.account_gas_limits,
            _word(operation.pre_verification_gas),
            operation.gas_fees,
            _keccak(operation.paymaster_and_data),
        )
    )


def _hashed_init_code(operation: UserOperation, delegate: bytes | None) -> bytes:
    """ERC-4337: with the marker of EIP-7702 the hash covers the delegate in its place. Entry point 0.7 has no such marker."""
    if operation.version == "0.7" or delegate is None or not operation.is_delegated:
        return operation.init_code
    return delegate + operation.init_code[20:]
