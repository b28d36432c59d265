"""A small chain family: heights are decimal numbers, the head's tag is `newest`, and addresses are three words."""

from __future__ import annotations

import msgspec

from proxy.chains.family import NONE, AddressFormat, BlockRef, Family, HeadReader, Method
from proxy.core.caching import Lifetime

NEWEST = BlockRef("tag", tag="newest")
# Nodes prune older balances.
KEPT_BLOCKS = 50

_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_height = msgspec.json.Decoder(int).decode


def block_ref(method: Method, params: bytes) -> BlockRef:
    if method.block_at is None:
        return NONE
    try:
        return BlockRef("number", _height(bytes(_items(params)[method.block_at])))
    except (msgspec.DecodeError, IndexError):
        return NEWEST


def lifetime(method: Method, params: bytes, result: bytes, ref: BlockRef, head: int, final: int) -> Lifetime:
    if method.cache == "never" or result == b"null":
        return "never"
    if method.cache == "static":
        return "forever"
    return "forever" if ref.kind == "number" and ref.number <= final else "head"


def is_archive(ref: BlockRef, head: int) -> bool:
    return ref.kind == "number" and head - ref.number >= KEPT_BLOCKS


def is_empty(method: Method, result: bytes) -> bool:
    return result == b"null"


def read_height(result: bytes) -> int | None:
    try:
        return _height(result)
    except msgspec.DecodeError:
        return None


def parse(text: str) -> bytes | None:
    words = text.split("-")
    return text.encode() if len(words) == 3 and all(word.isalpha() for word in words) else None


TOY = Family(
    name="toy",
    block_ref=block_ref,
    lifetime=lifetime,
    is_archive=is_archive,
    is_empty=is_empty,
    latest=NEWEST.tag,
    head=HeadReader(
        number_call=("toyHeight", b"[]"),
        read_number=read_height,
        genesis_call=("toyGenesis", b"[]"),
    ),
    addresses=AddressFormat(parse, bytes.decode, "three words joined by hyphens"),
)
