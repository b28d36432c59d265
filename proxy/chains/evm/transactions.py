"""Signed transactions: facts that follow from their bytes alone."""

from __future__ import annotations

import msgspec
import sha3

_params = msgspec.json.Decoder(list[str]).decode
# EIP-4844: a blob transaction is sent with its blobs beside it, in one list, and its hash does not cover them.
_BLOB = 0x03
_SHORT_LIST, _LONG_LIST = 0xC0, 0xF7
# Nodes accept no larger transaction, apart from its blobs (geth: 128 KiB). Hashing a megabyte takes milliseconds.
_MOST_DIGITS = 2 * 131_072


def hash_of_sent(params: bytes) -> bytes | None:
    """The hash, as JSON, of the transaction in the params of eth_sendRawTransaction; None if it cannot be determined."""
    try:
        text = _params(params)[0].removeprefix("0x")
        raw = bytes.fromhex(text) if len(text) <= _MOST_DIGITS or text.startswith(f"{_BLOB:02x}") else b""
    except (msgspec.DecodeError, ValueError, IndexError):
        return None
    if raw and raw[0] == _BLOB:
        raw = raw[:1] + _without_blobs(raw[1:])
    return b'"0x%b"' % sha3.keccak_256(raw).hexdigest().encode() if len(raw) > 1 else None


def _without_blobs(rlp: bytes) -> bytes:
    """The transaction itself: the first item of the list, if that is a list too; empty if it cannot be determined."""
    head, length = _list_sizes(rlp)
    inner = rlp[head:]
    if not 0 < head <= len(rlp) or len(inner) != length:
        return b""
    if inner[:1] < bytes([_SHORT_LIST]):
        return rlp
    inner_head, inner_length = _list_sizes(inner)
    size = inner_head + inner_length
    return inner[:size] if inner_head and size <= len(inner) else b""


def _list_sizes(rlp: bytes) -> tuple[int, int]:
    """The length of an RLP list's head and of its content; zeros if the bytes are not a list."""
    if not rlp or rlp[0] < _SHORT_LIST:
        return 0, 0
    if rlp[0] <= _LONG_LIST:
        return 1, rlp[0] - _SHORT_LIST
    size = rlp[0] - _LONG_LIST
    return 1 + size, int.from_bytes(rlp[1 : 1 + size], "big")
