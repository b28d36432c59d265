"""Signed transactions: facts that follow from their bytes alone."""

from __future__ import annotations

from typing import Any

import coincurve
import msgspec
import sha3

_params = msgspec.json.Decoder(list[str]).decode
_any_params = msgspec.json.Decoder(list[Any]).decode
# EIP-4844: a blob transaction is sent in one list with its blobs, which its hash does not cover.
_BLOB = 0x03
_SHORT_TEXT, _LONG_TEXT = 0x80, 0xB7
_SHORT_LIST, _LONG_LIST = 0xC0, 0xF7
# The longest head of an RLP item: its first byte, and a length of eight.
_MOST_HEAD = 9
# No transaction type has as many fields. Bounds the time: reading 100,000 items would be slow.
_MOST_FIELDS = 32
# Types whose last three fields are the signature's parity, r and s (EIP-2930, EIP-1559, EIP-4844, EIP-7702).
_SIGNED_LAST = (0x01, 0x02, _BLOB, 0x04)
# The index of the field `to` in a transaction without a type, and by type.
_LEGACY_TO, _TO = 3, {0x01: 4, 0x02: 5, _BLOB: 5, 0x04: 5}
# EIP-7702: the type with authorizations, and the indexes of their list and of the address in each.
_DELEGATING, _AUTHORIZATIONS, _DELEGATE = 0x04, 9, 1
_ADDRESS = 20
# EIP-155: a signature that covers the chain id has v = 35 + 2 * chain id + parity; any other has v = 27 + parity.
_EIP_155, _BEFORE_155 = 35, 27
# Nodes accept no larger transaction, apart from its blobs (geth: 128 KiB). Hashing a megabyte takes milliseconds.
_MOST_DIGITS = 2 * 131_072


def hash_of_sent(params: bytes) -> bytes | None:
    """The hash, as JSON, of the transaction in the params of eth_sendRawTransaction; None if it cannot be determined."""
    try:
        raw = _raw(_params(params)[0])
    except (msgspec.DecodeError, ValueError, IndexError):
        return None
    return b'"%b"' % _hash(raw).encode() if len(raw) > 1 else None


def subjects_of_sent(params: bytes) -> tuple[str, ...]:
    """The hash and the sender of the transaction in the params of any method that sends one, as far as they can be determined.
    It is the first param, or the member `tx` of that (`eth_sendPrivateTransaction`)."""
    try:
        given = _any_params(params)[0]
        raw = _raw(given["tx"] if isinstance(given, dict) else given)
    except (msgspec.DecodeError, ValueError, LookupError, TypeError, AttributeError):
        return ()
    if len(raw) < 2:
        return ()
    sender = _sender(raw)
    return (_hash(raw), sender) if sender else (_hash(raw),)


def targets_of_sent(params: bytes) -> tuple[str, ...] | None:
    """The contracts that the transaction in the params names, in lower case: the one that it calls, and the delegates of its
    authorizations. None if it creates a contract, or if they cannot be determined."""
    try:
        given = _any_params(params)[0]
        raw = _raw(given["tx"] if isinstance(given, dict) else given)
        is_typed = raw[0] < _SHORT_LIST
        at = _TO[raw[0]] if is_typed else _LEGACY_TO
        fields = _items(raw[1:] if is_typed else raw)
        targets = [_text(fields[at])]
        if raw[0] == _DELEGATING:
            targets += [_text(_items(each)[_DELEGATE]) for each in _items(fields[_AUTHORIZATIONS])]
    except (msgspec.DecodeError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return tuple(f"0x{each.hex()}" for each in targets) if all(len(each) == _ADDRESS for each in targets) else None


def _raw(given: str) -> bytes:
    """The transaction without its blobs; empty if it is too large. Raises ValueError if it is not hex."""
    text = given.removeprefix("0x")
    raw = bytes.fromhex(text) if len(text) <= _MOST_DIGITS or text.startswith(f"{_BLOB:02x}") else b""
    if raw and raw[0] == _BLOB:
        raw = raw[:1] + _without_blobs(raw[1:])
    return raw


def _hash(raw: bytes) -> str:
    return f"0x{sha3.keccak_256(raw).hexdigest()}"


def _sender(raw: bytes) -> str:
    """The address that has signed the transaction; empty if it cannot be determined."""
    is_typed = raw[0] in _SIGNED_LAST
    if not is_typed and raw[0] < _SHORT_LIST:
        return ""
    try:
        fields, parity, r, s = _signature(raw[1:] if is_typed else raw)
        if not is_typed:
            fields, parity = _of_legacy(fields, parity)
        signed = raw[: int(is_typed)] + _list(fields)
        signature = r.to_bytes(32, "big") + s.to_bytes(32, "big") + bytes([parity])
        key = coincurve.PublicKey.from_signature_and_message(signature, sha3.keccak_256(signed).digest(), hasher=None)
    except (ValueError, OverflowError):
        return ""
    return f"0x{sha3.keccak_256(key.format(compressed=False)[1:]).hexdigest()[24:]}"


def _signature(rlp: bytes) -> tuple[bytes, int, int, int]:
    """The encoded fields of a transaction without its signature, and the numbers of the signature: the last three items."""
    *fields, parity, r, s = _items(rlp)
    return b"".join(fields), _number(parity), _number(r), _number(s)


def _items(rlp: bytes) -> list[bytes]:
    """The encoded items of an RLP list. Raises ValueError if the bytes are not exactly one list, or if it is too long."""
    head, length = _list_sizes(rlp)
    items, at = list[bytes](), head
    while 0 < head <= at < len(rlp) and len(items) < _MOST_FIELDS:
        first = rlp[at : at + _MOST_HEAD]
        size = sum(_list_sizes(first) if first[0] >= _SHORT_LIST else _text_sizes(first))
        items.append(rlp[at : at + size])
        at += size
    if not head or at != len(rlp) or head + length != at:
        raise ValueError("not a list")
    return items


def _text(item: bytes) -> bytes:
    """The content of an encoded RLP string. Raises ValueError for a list."""
    if item[0] >= _SHORT_LIST:
        raise ValueError("not a string")
    return item[_text_sizes(item)[0] :]


def _number(item: bytes) -> int:
    return int.from_bytes(_text(item), "big")


def _of_legacy(fields: bytes, v: int) -> tuple[bytes, int]:
    """The fields that the signature of a transaction without a type covers, and its parity."""
    if v < _EIP_155:
        return fields, v - _BEFORE_155
    chain_id, parity = divmod(v - _EIP_155, 2)
    number = chain_id.to_bytes((chain_id.bit_length() + 7) // 8, "big")
    encoded = number if 0 < chain_id < _SHORT_TEXT else bytes([_SHORT_TEXT + len(number)]) + number
    return fields + encoded + bytes([_SHORT_TEXT, _SHORT_TEXT]), parity


def _list(content: bytes) -> bytes:
    """An RLP list of this content."""
    if len(content) <= _LONG_LIST - _SHORT_LIST:
        return bytes([_SHORT_LIST + len(content)]) + content
    size = len(content).to_bytes((len(content).bit_length() + 7) // 8, "big")
    return bytes([_LONG_LIST + len(size)]) + size + content


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


def _text_sizes(rlp: bytes) -> tuple[int, int]:
    """The length of an RLP string's head and of its content. A byte below 0x80 is its own content."""
    if rlp[0] < _SHORT_TEXT:
        return 0, 1
    if rlp[0] <= _LONG_TEXT:
        return 1, rlp[0] - _SHORT_TEXT
    size = rlp[0] - _LONG_TEXT
    return 1 + size, int.from_bytes(rlp[1 : 1 + size], "big")
