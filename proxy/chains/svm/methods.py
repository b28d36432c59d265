"""How the params and results of the methods of Solana-like chains refer to slots. `config/methods` lists the methods.

A write is never repeated: a signature that may have landed must not be sent again.

A commitment (`processed`, `confirmed`, `finalized`; the default is `finalized`) is a moving head like any tag. Only a
result that is pinned to one slot and read as finalized is cached forever: a block by its slot, a transaction by its
signature. Processed data may be on a fork that dies and is never cached. Member names are matched case-sensitively
here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from proxy.chains.family import BlockRef, Family, HeadReader, Method, SubscriptionParams, SubscriptionRules
from proxy.chains.svm.address import FORMAT, LIST_IDS
from proxy.core.caching import Lifetime

_TAGS = {tag: BlockRef("tag", tag=tag) for tag in ("processed", "confirmed", "finalized")}
_HASHES = {tag: BlockRef("hash", tag=tag) for tag in _TAGS}
# A longer text, which may have a megabyte, is not hashed.
_LONGEST_TAG = max(map(len, _TAGS))
NONE = BlockRef("none")

_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_slot = msgspec.json.Decoder(int).decode
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class _Config(msgspec.Struct, gc=False):
    commitment: str = "finalized"


_config = msgspec.json.Decoder(_Config).decode


def block_ref(method: Method, params: bytes) -> BlockRef:
    """The slot, or the commitment, that the call is about; a slot and a signature have their commitment as the tag."""
    if method.cache == "never" or method.cache == "static":
        return NONE
    # Most calls name neither a slot nor a commitment: nothing is decoded for them.
    if method.block_at is None and b"commitment" not in params and b"\\" not in params:
        return _HASHES["finalized"] if method.cache == "hash" else _TAGS["finalized"]
    try:
        items = [bytes(item) for item in _items(params)]
    except _UNREADABLE:
        items = []
    tag = _commitment(items)
    if method.cache == "hash":
        return _HASHES[tag]
    at = method.block_at
    number = _number(items[at]) if at is not None and at < len(items) else None
    return _TAGS[tag] if number is None else BlockRef("number", number, tag)


def _commitment(items: list[bytes]) -> str:
    """The commitment of the call's config, its last object. An unknown word is left for the upstream to refuse,
    and counts as the commitment that is never cached."""
    config = next((item for item in reversed(items) if item.startswith(b"{")), b"{}")
    try:
        tag = _config(config).commitment
    except _UNREADABLE:
        return "processed"
    return tag if len(tag) <= _LONGEST_TAG and tag in _TAGS else "processed"


def _number(raw: bytes) -> int | None:
    try:
        number = _slot(raw)
    except _UNREADABLE:
        return None
    return number if number >= 0 else None


# Some upstreams pretty-print JSON, with a space in empty values.
_EMPTY = frozenset((b"", b"null", b"[]", b"{}", b"[ ]", b"{ }"))
# `{"context":{…},"value":null}` with every member that the context has had so far is well below this.
_SMALL = 512


class _InContext(msgspec.Struct, gc=False):
    value: msgspec.Raw = msgspec.Raw()


_in_context = msgspec.json.Decoder(_InContext).decode


def is_empty(method: Method, result: bytes) -> bool:
    """Null, bare or in its context; or no items, if the method's row says that this is doubtful."""
    value = result
    if len(result) < _SMALL and result.startswith(b"{"):
        try:
            value = bytes(_in_context(result).value) or result
        except _UNREADABLE:
            return False
    return value == b"null" or (method.empty and len(value) < _SMALL and value in _EMPTY)


class _AtSlot(msgspec.Struct, gc=False):
    slot: int = -1


_at_slot = msgspec.json.Decoder(_AtSlot).decode


def lifetime(method: Method, params: bytes, result: bytes, ref: BlockRef, head: int, final: int) -> Lifetime:
    """How long the result may be cached: see `Method.cache`."""
    if method.cache == "never" or ref.tag == "processed" or is_empty(method, result):
        return "never"
    if method.cache == "static":
        return "forever"
    if method.cache == "head" or ref.tag != "finalized":
        return "head"
    slot = _slot_of(result) if method.cache == "hash" else ref.number
    if slot > head:
        return "never"
    return "forever" if 0 <= slot <= final else "head"


def _slot_of(result: bytes) -> int:
    try:
        return _at_slot(result).slot
    except _UNREADABLE:
        return -1


def read_slot(result: bytes) -> int | None:
    return _number(result)


def read_subscription(method: str, params: list[Any]) -> SubscriptionParams:
    """`accountSubscribe` and the like. The upstream validates the params, and all events have one price."""
    notification = method.removesuffix("Subscribe").encode() + b"Notification"
    detail = msgspec.json.encode(params, order="deterministic")
    return SubscriptionParams(method, detail, None, "svm", notification)


def list_id(network: str, chain_id: int | None) -> int | None:
    return LIST_IDS.get(network)


SVM = Family(
    name="svm",
    block_ref=block_ref,
    lifetime=lifetime,
    is_empty=is_empty,
    head=HeadReader(read_number=read_slot),
    addresses=FORMAT,
    subscriptions=SubscriptionRules("svm", read_subscription, numeric_ids=True),
    tokens="svm",
    list_id=list_id,
)
