"""The reader of families that are data alone: their file and the rows of their methods say everything.

A method's row says where its params name a block (`block_at` in an array, `block_name` in an object). A number is a block; the
family's tags and a param that is left out mean a moving head; any other text is the hash of a block or of a transaction. The
row's cache rule, or that of the first of its `cases` that fits, decides how long a result is valid:

`static` and `hash` results never change, the latter only once `final_if` holds, if the row has it. A `block` result is final
when its block is or when `final_if` says so, and one at a hash is as final as a `hash` result. Everything else is valid until
the head moves, except for results that `never_if` names: those about transactions in no block change before that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from proxy.chains.family import HASH, NONE, AddressFormat, BlockRef, CacheRule, Family, FinalResult, HeadReader, Method
from proxy.chains.lookups import (
    ABSENT,
    Lookup,
    Lookups,
    NumberForm,
    number_of,
    number_text,
    text_of,
    value_at,
    with_value,
    without_member,
)
from proxy.core.caching import Lifetime

# Shorter text of digits alone is a number.
_SHORTEST_HASH = 20
# The longest text that names a block, with escapes. Longer ones, which may have a megabyte, are not hashed.
_LONGEST_NAME = 1024
# Some upstreams pretty-print JSON, with a space in empty values.
_EMPTY = frozenset((b"", b"null", b"[]", b"{}", b"[ ]", b"{ }", b'""'))
_LONGEST_EMPTY = max(map(len, _EMPTY))
# The record of a reply has its headers as well. Those that are passed on are short.
_LONGEST_EMPTY_RECORD = 4096


@dataclass(frozen=True, slots=True)
class BlockNames:
    """How params name blocks. `latest`: the word for the head. `tags`: words for other moving heads. `pending`: words for state
    outside of any block, which is never cached. `members`: those of an object that names a block, `number` and `hash`.
    `tag_member`: the param that has the word, where params are an object and the block is another one. `by_hash`: reads of
    state name blocks by their hashes alone. `only_numbers`: blocks have numbers from 1 on, and everything else stands for the
    newest one: nodes read `0`, `00` and `-0` as no number."""

    numbers: NumberForm = "number"
    latest: str = "latest"
    tags: frozenset[str] = frozenset()
    pending: frozenset[str] = frozenset()
    members: Mapping[str, str] = field(default_factory=dict)
    tag_member: str = ""
    by_hash: bool = False
    only_numbers: bool = False


def family_of_tables(name: str, names: BlockNames, lookups: Lookups, *, is_rest: bool = False) -> Family:
    rules = _Rules(names, is_empty_record if is_rest else is_empty)
    reader = HeadReader(
        read_number=_HeadNumber(lookups.head or lookups.number, names.numbers),
        write_number=lambda number: number_text(number, names.numbers),
    )
    return Family(
        name=name,
        block_ref=rules.block_ref,
        lifetime=rules.lifetime,
        is_empty=rules.is_empty,
        head=reader,
        addresses=AddressFormat(_no_address, bytes.decode, "not read on chains of this family"),
        latest=names.latest,
        at_head=True,
        at_block=rules.at_block,
    )


def _no_address(text: str) -> bytes | None:
    return None


def is_empty(method: Method, result: bytes) -> bool:
    return result == b"null" or (method.empty and len(result) <= _LONGEST_EMPTY and result in _EMPTY)


def is_empty_record(method: Method, result: bytes) -> bool:
    """The same for the record of a reply (`core/rest_routes.py`)."""
    return method.empty and len(result) <= _LONGEST_EMPTY_RECORD and value_at(result, "body") in _EMPTY


@dataclass(frozen=True, slots=True)
class _HeadNumber:
    """The number in a result that is the head's number, or the head block."""

    lookup: Lookup
    form: NumberForm

    def __call__(self, result: bytes) -> int | None:
        number = number_of(result, self.form)
        if number is None and result[:1] == b"{":
            return self.lookup.number(self.lookup.calls[-1].values_in(result))
        return number


@dataclass(frozen=True, slots=True)
class _Rules:
    names: BlockNames
    is_empty: Callable[[Method, bytes], bool]

    def block_ref(self, method: Method, params: bytes) -> BlockRef:
        rule = cache_rule(method, params)
        if method.block_at is None or rule == "head":
            return self._without_block(rule)
        value = param(params, method.block_at, method.block_name)
        if value in (ABSENT, b"null") and (tag := self._tag(params)):
            return BlockRef("tag", tag=tag)
        return self._named(value)

    def at_block(self, method: Method, params: bytes, number: int) -> bytes:
        """The params with this block in place of the newest one, named or left out. Other blocks stay."""
        names, at = self.names, method.block_at
        if at is None or method.cache != "block" or names.by_hash or self.block_ref(method, params).tag != names.latest:
            return params
        value = number_text(number, names.numbers)
        if "number" in names.members:
            value = b"{%b:%b}" % (msgspec.json.encode(names.members["number"]), value)
        try:
            if params[:1] == b"[":
                return with_value(params, str(at), value)
            bare = without_member(params, names.tag_member) if self._tag(params) else params
            return with_value(bare, method.block_name, value)
        except (LookupError, ValueError, msgspec.DecodeError):
            return params

    def _tag(self, params: bytes) -> str:
        """The word for a block in a param of its own."""
        names = self.names
        return text_of(value_at(params, names.tag_member)) if names.tag_member and params[:1] == b"{" else ""

    def _without_block(self, rule: CacheRule) -> BlockRef:
        """A call that names no block depends on the head, unless its result never changes or is not cached."""
        if rule == "never" or rule == "static":
            return NONE
        return HASH if rule == "hash" else BlockRef("tag", tag=self.names.latest)

    def _named(self, value: bytes) -> BlockRef:
        names = self.names
        number = number_of(value, names.numbers)
        if number is None and names.numbers != "number":
            number = number_of(value, "number")  # Some families accept both.
        if names.only_numbers and not number:
            return BlockRef("tag", tag=names.latest)
        if number is not None:
            return BlockRef("number", number)
        if value[:1] == b"{":
            return self._in_object(value)
        if len(value) > _LONGEST_NAME:
            return BlockRef("tag", tag=names.latest)
        text = text_of(value)
        if not text or text == names.latest or text in names.tags or text in names.pending:
            return BlockRef("tag", tag=text or names.latest)
        if text.isdecimal() and len(text) < _SHORTEST_HASH:
            return BlockRef("number", int(text))
        return BlockRef("hash", block_hash=text.lower())

    def _in_object(self, value: bytes) -> BlockRef:
        for kind, member in self.names.members.items():
            if (given := value_at(value, member)) not in (ABSENT, b"null"):
                number = number_of(given, self.names.numbers) if kind == "number" else None
                if number is not None:
                    return BlockRef("number", number)
                return BlockRef("hash", block_hash=text_of(given).lower())
        return BlockRef("tag", tag=self.names.latest)

    def lifetime(self, method: Method, params: bytes, result: bytes, ref: BlockRef, head: int, final: int) -> Lifetime:
        rule = cache_rule(method, params)
        if rule == "never" or ref.tag in self.names.pending or self.is_empty(method, result):
            return "never"
        if method.never_if is not None and _has_value(result, method.never_if):
            return "never"
        if rule == "static":
            return "forever"
        if rule == "hash" or (rule == "block" and ref.kind == "hash"):
            return self._by_result(method, result, final)
        if rule == "block" and ref.kind == "number":
            is_final = ref.number <= final or _says_final(method, result)
            return "forever" if is_final else "head" if ref.number <= head else "never"
        return "never" if method.fresh else "head"

    def _by_result(self, method: Method, result: bytes, final: int) -> Lifetime:
        if method.final_if is None:
            return "forever"
        if method.final_if.values:
            return "forever" if _says_final(method, result) else "head"
        number = number_of(value_at(result, method.final_if.path), self.names.numbers)
        return "forever" if number is not None and number <= final else "head"


def _says_final(method: Method, result: bytes) -> bool:
    """Whether the result says by itself that it never changes again."""
    return method.final_if is not None and _has_value(result, method.final_if)


def _has_value(result: bytes, wanted: FinalResult) -> bool:
    return _is_one_of(_decoded(value_at(result, wanted.path)), wanted.values)


def cache_rule(method: Method, params: bytes) -> CacheRule:
    """The cache rule of a call: that of the first case that fits, or the method's."""
    for case in method.cases:
        if _is_one_of(_decoded(param(params, case.at, case.name)), case.values):
            return case.cache
    return method.cache


def _is_one_of(value: Any, listed: Sequence[Any]) -> bool:
    """Whether a file lists this value. TOML has no null, so `"null"` stands for it and for a value that is left out."""
    if value is None:
        return "null" in listed
    # In Python, 0 equals false and 1 equals true; files mean one of them.
    return any(value == each and type(value) is type(each) for each in listed)


def param(params: bytes, at: int, name: str) -> bytes:
    """One of the params as JSON, by its index in an array or its name in an object; empty if it is left out."""
    return value_at(params, str(at)) if params[:1] == b"[" else value_at(params, name) if name else ABSENT


def _decoded(value: bytes) -> Any:
    """The value, to be compared with those that a file lists. Files list short ones."""
    if len(value) > _LONGEST_NAME:
        return value
    try:
        return msgspec.json.decode(value) if value else None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
