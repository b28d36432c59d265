"""Errors of EVM chains as a person reads them: the reason of a revert, decoded from the data that it returned.

Solidity encodes `require(x, "text")` as a call of Error(string) and failed checks of its own as Panic(uint256). Other reverts
are custom errors, which have the selector of their signature: those of widespread contracts are known here.
"""

from __future__ import annotations

import re

from proxy.chains.evm import abi, address

_ERROR, _PANIC = abi.selector("Error(string)"), abi.selector("Panic(uint256)")
# From the documentation of Solidity, "Panic via assert and Error via require".
_PANICS = {
    0x00: "generic panic",
    0x01: "an assertion failed",
    0x11: "arithmetic overflow or underflow",
    0x12: "division or modulo by zero",
    0x21: "conversion to an enum that has no such value",
    0x22: "a storage byte array is encoded incorrectly",
    0x31: "pop of an empty array",
    0x32: "array index out of bounds",
    0x41: "too much memory was allocated",
    0x51: "call of an uninitialised function",
}
# The custom errors of ERC-6093, OpenZeppelin, ERC-4337 and Permit2.
_KNOWN = {
    abi.selector(signature): signature
    for signature in (
        "ERC20InsufficientBalance(address,uint256,uint256)",
        "ERC20InvalidSender(address)",
        "ERC20InvalidReceiver(address)",
        "ERC20InsufficientAllowance(address,uint256,uint256)",
        "ERC20InvalidApprover(address)",
        "ERC20InvalidSpender(address)",
        "ERC721InvalidOwner(address)",
        "ERC721NonexistentToken(uint256)",
        "ERC721IncorrectOwner(address,uint256,address)",
        "ERC721InvalidSender(address)",
        "ERC721InvalidReceiver(address)",
        "ERC721InsufficientApproval(address,uint256)",
        "ERC721InvalidApprover(address)",
        "ERC721InvalidOperator(address)",
        "ERC1155InsufficientBalance(address,uint256,uint256,uint256)",
        "ERC1155InvalidSender(address)",
        "ERC1155InvalidReceiver(address)",
        "ERC1155MissingApprovalForAll(address,address)",
        "OwnableUnauthorizedAccount(address)",
        "OwnableInvalidOwner(address)",
        "AccessControlUnauthorizedAccount(address,bytes32)",
        "EnforcedPause()",
        "ExpectedPause()",
        "ReentrancyGuardReentrantCall()",
        "SafeERC20FailedOperation(address)",
        "AddressEmptyCode(address)",
        "FailedInnerCall()",
        "FailedCall()",
        "InvalidInitialization()",
        "NotInitializing()",
        "ERC2612ExpiredSignature(uint256)",
        "ERC2612InvalidSigner(address,address)",
        "ECDSAInvalidSignature()",
        "FailedOp(uint256,string)",
        "SignatureExpired(uint256)",
        "InvalidSignature()",
        "InvalidNonce()",
    )
}
# Records have the beginning of an error, so its JSON may be incomplete.
_DATA = re.compile(r'"data":\s*(?:\{[^{}]*"data":\s*)?"(0x[0-9a-fA-F]{8,})')
_MESSAGE = re.compile(r'"message":\s*"((?:[^"\\]|\\.)*)')
_ESCAPE = re.compile(r"\\(.)")
# Hardhat repeats the data in its message.
_REPEATED = re.compile(r" \(return data: 0x[0-9a-fA-F]+\)")


def message_of(error: str) -> str:
    """The text of an error object, or of its beginning: its message, and the reason of a revert unless the message has it."""
    if not error.startswith("{"):
        return error
    said = _MESSAGE.search(error)
    message = _ESCAPE.sub(r"\1", said[1]) if said else "the chain returned an error"
    match = _DATA.search(error)
    reason = reason_of(bytes.fromhex(match[1][: len(match[1]) // 2 * 2][2:])) if match else ""
    return message if not reason or reason in message else f"{_REPEATED.sub('', message)}: {reason}"


def reason_of(data: bytes) -> str:
    """The reason that the data of a revert encodes; empty if it has no selector."""
    selector, arguments = data[:4], data[4:]
    if len(selector) < 4:
        return ""
    if selector == _ERROR:
        return abi.text(arguments) or "Error(string)"
    if selector == _PANIC:
        code = abi.uint(arguments)
        return "Panic" if code is None else f"Panic 0x{code:02x}: {_PANICS.get(code, 'unknown code')}"
    signature = _KNOWN.get(selector)
    return _shown(signature, arguments) if signature else f"custom error 0x{selector.hex()}"


def _shown(signature: str, data: bytes) -> str:
    """A custom error with its arguments, as far as the data goes."""
    name, _, types = signature.rstrip(")").partition("(")
    values = [_value(kind, data, at) for at, kind in enumerate(types.split(","))] if types else []
    return f"{name}({', '.join(values)})"


def _value(kind: str, data: bytes, at: int) -> str:
    word = data[abi.WORD * at : abi.WORD * (at + 1)]
    if len(word) < abi.WORD:
        return "…"
    if kind == "address":
        return address.fresh_checksum(word[12:])
    if kind == "string":
        raw = abi.dynamic(data, at)
        return "…" if raw is None else repr(raw.decode("utf-8", "replace"))
    return f"0x{word.hex()}" if kind == "bytes32" else str(int.from_bytes(word, "big"))
