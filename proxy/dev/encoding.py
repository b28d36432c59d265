"""ABI encoding of calls, and the addresses of deployed contracts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import sha3

from proxy.chains.evm import abi, address

# The deterministic deployment proxy, which has the same address on every chain, and the transaction that deploys it. Its
# signature is made up, so no key is needed to send it (Nick's method).
CREATE2_PROXY = "0x4e59b44847b379578588920cA78FbF26c0B4956C"
CREATE2_PROXY_MAKER = "0x3fAB184622Dc19b6109349B94811493BF2a45362"
CREATE2_PROXY_COST_WEI = 10**16
CREATE2_PROXY_TRANSACTION = (
    "0xf8a58085174876e800830186a08080b853604580600e600039806000f350fe7fffffffffffffffffffffffffffffffffffffffffffffffffffffffff"
    "ffffffe03601600081602082378035828234f58015156039578182fd5b8082525050506014600cf31ba0222222222222222222222222222222222222222222"
    "2222222222222222222222a02222222222222222222222222222222222222222222222222222222222222222"
)


def keccak(data: bytes) -> bytes:
    digest: bytes = sha3.keccak_256(data).digest()
    return digest


def raw(text: str) -> bytes:
    return bytes.fromhex(text.removeprefix("0x"))


def created_address(sender: str, nonce: int) -> str:
    return address.checksum(address.created(raw(sender), nonce))


def create2_address(salt: bytes, code: bytes) -> str:
    """Return the address of a contract deployed through the proxy."""
    return address.checksum(address.create2(raw(CREATE2_PROXY), salt, keccak(code)))


def name_hash(name: str) -> bytes:
    """Return the namehash of EIP-137."""
    node = bytes(32)
    for label in reversed(name.split(".")):
        node = keccak(node + keccak(label.encode()))
    return node


# The contract ABI, as far as the development chain's contracts need it.


def call(signature: str, *values: Any) -> bytes:
    """Encode a call such as `mint(address,uint256)`: selector and arguments."""
    types = re.findall(r"[^(),]+", signature)[1:]
    return abi.selector(signature) + arguments(types, values)


def arguments(types: Sequence[str], values: Sequence[Any]) -> bytes:
    """Encode static values in the head, and dynamic ones in the tail with their offsets in the head."""
    head, tail = b"", b""
    for kind, value in zip(types, values, strict=True):
        encoded = _encoded(kind, value)
        if _is_dynamic(kind):
            head += abi.word_of(abi.WORD * len(types) + len(tail))
            tail += encoded
        else:
            head += encoded
    return head + tail


def _is_dynamic(kind: str) -> bool:
    return kind in ("string", "bytes") or kind.endswith("[]")


def _encoded(kind: str, value: Any) -> bytes:
    if kind.endswith("[]"):
        return abi.word_of(len(value)) + arguments([kind[:-2]] * len(value), value)
    if kind in ("string", "bytes"):
        data = value.encode() if isinstance(value, str) else value
        return abi.word_of(len(data)) + bytes(data) + bytes(-len(data) % abi.WORD)
    if kind == "address":
        return abi.word_of(raw(value))
    if kind == "bytes32":
        return bytes(value)
    return abi.word_of(int(value))
