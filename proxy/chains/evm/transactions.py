"""Signed transactions: only what can be told from their bytes."""

from __future__ import annotations

import msgspec
import sha3

_params = msgspec.json.Decoder(list[str]).decode
# EIP-4844: a blob transaction is sent with its blobs around it, which its hash does not cover.
_BLOB = 0x03


def hash_of_sent(params: bytes) -> bytes | None:
    """The hash, as JSON, of the transaction in the params of eth_sendRawTransaction; None where it cannot be told."""
    try:
        raw = bytes.fromhex(_params(params)[0].removeprefix("0x"))
    except (msgspec.DecodeError, ValueError, IndexError):
        return None
    if not raw or raw[0] == _BLOB:
        return None
    return b'"0x%b"' % sha3.keccak_256(raw).hexdigest().encode()
