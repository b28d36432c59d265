"""The results of repeated writes, which follow from their params: see `Family.sent_id`. A family's file names one of these."""

from __future__ import annotations

import base64
from collections.abc import Callable
from hashlib import sha256

from proxy.chains.lookups import text_of, value_at

# `b64decode` and `fromhex` raise ValueError, and a transaction that ends too early IndexError.
_NO_TRANSACTION = (ValueError, IndexError)
# BIP 144: the marker and the flag of a transaction with witnesses follow its version.
_MARKER, _WITNESSES = 0, 1
# ZIP 225: the header of Zcash's version 5, whose ids are computed in another way (ZIP 244).
_ZCASH_V5 = bytes.fromhex("05000080")
# BIP 141: a compact size below this is one byte; 0xfd, 0xfe and 0xff announce 2, 4 and 8 bytes.
_SIZES = {0xFD: 2, 0xFE: 4, 0xFF: 8}


def bitcoin_id(params: bytes) -> bytes | None:
    """The id of a transaction in hex: SHA-256 twice over its serialization without witnesses, in reverse byte order."""
    try:
        raw = bytes.fromhex(_text(params))
        return b'"%b"' % sha256(sha256(without_witnesses(raw)).digest()).digest()[::-1].hex().encode()
    except _NO_TRANSACTION:
        return None


def without_witnesses(raw: bytes) -> bytes:
    """A transaction in the form that its id is computed from. Raises ValueError or IndexError if it is not one."""
    if raw[:4] == _ZCASH_V5 or (raw[4] == _MARKER and raw[5] != _WITNESSES):
        raise ValueError("the id of such a transaction is computed in another way")
    if raw[4] != _MARKER:
        return raw
    reader = _TransactionReader(raw, 6)
    for _ in range(reader.size()):  # inputs: outpoint, script, sequence
        reader.skip(36)
        reader.skip(reader.size())
        reader.skip(4)
    for _ in range(reader.size()):  # outputs: amount, script
        reader.skip(8)
        reader.skip(reader.size())
    return raw[:4] + raw[6 : reader.at] + raw[-4:]


class _TransactionReader:
    def __init__(self, raw: bytes, at: int) -> None:
        self._raw = raw
        self.at = at

    def __repr__(self) -> str:
        return f"<_TransactionReader at {self.at} of {len(self._raw)}>"

    def skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self._raw):
            raise ValueError("the transaction ends too early")

    def size(self) -> int:
        first = self._raw[self.at]
        self.skip(1)
        if (width := _SIZES.get(first)) is None:
            return first
        start = self.at
        self.skip(width)
        return int.from_bytes(self._raw[start : self.at], "little")


def _text(params: bytes) -> str:
    """The transaction: the first of the params, or the member that has it."""
    if params[:1] == b"[":
        return text_of(value_at(params, "0"))
    return text_of(value_at(params, "hexstring") or value_at(params, "tx"))


def sha256_id(params: bytes) -> bytes | None:
    """CometBFT's reply to a transaction that was accepted: its SHA-256 hash in upper-case hex."""
    try:
        digest = sha256(base64.b64decode(_text(params), validate=True)).hexdigest().upper()
    except _NO_TRANSACTION:
        return None
    return b'{"code":0,"data":"","log":"","codespace":"","hash":"%b"}' % digest.encode()


WRITE_IDS: dict[str, Callable[[bytes], bytes | None]] = {"bitcoin": bitcoin_id, "sha256": sha256_id}
