"""Questions to an upstream as data: calls, and paths to the values in their results.

A lookup is a sequence of calls. Each call names the values that it reads from its result, and later calls may use them in their
params. Bitcoin's head takes two: `getbestblockhash` reads `hash`, and `getblockheader ["{hash}", true]` reads the number.

A path is the names of members and the indexes of items, joined by dots: `sync_info.latest_block_height`, `0.hash`. The empty
path is the whole result. Only the parts of a result that a path names are decoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from proxy.core.data_bounds import DataKind

# A method and its params, for calls that the proxy makes itself.
UpstreamCall = tuple[str, bytes]
# The number, the hash and the parent hash of a block. The parent hash is empty if it is not known.
ReportedBlock = tuple[int, str, str]
# How a family writes block numbers: `5`, `"5"` or `"0x5"`. A family that writes text also accepts numbers.
NumberForm = Literal["number", "text", "hex"]
# Values by name, as JSON.
Values = dict[str, bytes]

_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
# A block number has at most 63 bits: see `core/heads.py`. Longer text is not decoded.
_LONGEST_NUMBER = 24
ABSENT = b""


def value_at(result: bytes, path: str) -> bytes:
    """The JSON value at a path; empty if there is none."""
    for step in path.split(".") if path else ():
        try:
            result = _below(result, step)
        except (*_UNREADABLE, LookupError, ValueError):
            return ABSENT
    return result.strip()


def _below(result: bytes, step: str) -> bytes:
    if result[:1] == b"[":
        return bytes(_items(result)[int(step)])
    return bytes(_members(result)[step])


def with_value(given: bytes, path: str, value: bytes) -> bytes:
    """The JSON with this value at a path. It adds members, and the item after the last one of an array. Raises LookupError or
    ValueError if the path leads nowhere."""
    if not path:
        return value
    step, _, rest = path.partition(".")
    if given[:1] == b"[" or (not given and step.isdecimal()):
        items, index = _items(given or b"[]"), int(step)
        if index > len(items):
            raise LookupError(f"there are only {len(items)} items")
        below = bytes(items[index]) if index < len(items) else ABSENT
        items[index : index + 1] = [msgspec.Raw(with_value(below, rest, value))]
        return msgspec.json.encode(items)
    members = _members(given or b"{}")
    members[step] = msgspec.Raw(with_value(bytes(members.get(step, ABSENT)), rest, value))
    return msgspec.json.encode(members)


def without_member(given: bytes, name: str) -> bytes:
    return msgspec.json.encode({each: value for each, value in _members(given).items() if each != name})


def text_of(value: bytes) -> str:
    """The text of a string or of another scalar; empty for null, for objects and for arrays."""
    if value[:1] != b'"':
        return "" if value[:1] in (b"", b"n", b"{", b"[") else value.decode("utf-8", "replace")
    try:
        return str(msgspec.json.decode(value))
    except _UNREADABLE:
        return ""


def number_of(value: bytes, form: NumberForm) -> int | None:
    """The number that a JSON value names in this form; None if it names none."""
    if len(value) > _LONGEST_NUMBER:
        return None
    is_quoted = value[:1] == b'"'
    text = value[1:-1] if is_quoted and form != "number" else b"" if is_quoted or form == "hex" else value
    digits = text[2:] if form == "hex" and text[:2] == b"0x" else b"" if form == "hex" else text
    if not digits.isalnum():
        return None
    try:
        return int(digits, 16 if form == "hex" else 10)
    except ValueError:
        return None


def number_text(number: int, form: NumberForm) -> bytes:
    match form:
        case "number":
            return b"%d" % number
        case "text":
            return b'"%d"' % number
        case "hex":
            return b'"0x%x"' % number


@dataclass(frozen=True, slots=True)
class LookupCall:
    """One call. `params` may contain strings such as `{hash}`, which stand for values that were read before. `read`: the paths
    of values by their names. `offers`: methods that the upstream serves only if the value at a path is true."""

    method: str
    params: Any = ()
    read: Mapping[str, str] = field(default_factory=dict)
    offers: Mapping[str, str] = field(default_factory=dict)

    def with_values(self, values: Values) -> UpstreamCall:
        return self.method, _filled(self.params, values)

    def values_in(self, result: bytes) -> Values:
        values = {name: value_at(result, path) for name, path in self.read.items()}
        return {name: value for name, value in values.items() if value not in (ABSENT, b"null")}

    def lacked_in(self, result: bytes) -> tuple[str, ...]:
        """The methods that the upstream does not serve."""
        return tuple(method for method, path in self.offers.items() if value_at(result, path) != b"true")


def _filled(params: Any, values: Values) -> bytes:
    """The params as JSON, with values in place of their names."""
    if isinstance(params, str) and params[:1] == "{" and params[1:-1] in values:
        return values[params[1:-1]]
    if isinstance(params, list | tuple):
        return b"[%b]" % b",".join([_filled(item, values) for item in params])
    if isinstance(params, Mapping):
        members = [b"%b:%b" % (msgspec.json.encode(name), _filled(item, values)) for name, item in params.items()]
        return b"{%b}" % b",".join(members)
    return msgspec.json.encode(params)


@dataclass(frozen=True, slots=True)
class Lookup:
    """`unknown_parent`: the hash that some nodes report for a parent that they do not know."""

    calls: tuple[LookupCall, ...]
    numbers: NumberForm = "number"
    unknown_parent: str = ""

    @property
    def first(self) -> UpstreamCall:
        return self.calls[0].with_values({})

    def given(self, number: int, name: str = "number") -> Values:
        return {name: number_text(number, self.numbers)}

    def number(self, values: Values) -> int | None:
        return number_of(values.get("number", ABSENT), self.numbers)

    def identity(self, values: Values) -> str:
        """The name of a chain: a text, or a number in decimal digits."""
        number = self.number(values)
        return text_of(values.get("chain", ABSENT)) if number is None else str(number)

    def block(self, values: Values) -> ReportedBlock | None:
        """The block that the values describe. Without a hash, it is its number alone."""
        number, parent = self.number(values), text_of(values.get("parent", ABSENT))
        if number is None or number < 0:
            return None
        return number, text_of(values.get("hash", ABSENT)), "" if parent == self.unknown_parent else parent

    def block_in(self, result: bytes) -> ReportedBlock | None:
        """The block in one result or notification; None if it has no hash."""
        block = self.block(self.calls[-1].values_in(result))
        return block if block is not None and block[1] else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookups:
    """How to ask an upstream of a family about its chain.

    `number`: the head's number. `head`, `final`: the head and the newest final block, with their hashes if they have any.
    `block`: the block with a given number, in families whose blocks can be replaced by others of the same height.
    `chain`: the identity that the settings of a network name. `first`: something that identifies the chain better, if there is.
    `version`: that of the API, which must be the same for all upstreams, because results differ between versions.
    `status`: whether the upstream is syncing, its lowest block, and methods that it does not serve.
    `bounds`: for each kind of data, a question for that data of the block `number`, whose answer is `found`. `before` is the
    block before it.
    `subscribe`: subscribes to new heads, and reads notifications as `head` reads results. `slots`: subscribes to numbers of new
    blocks, and reads them.
    """

    number: Lookup = Lookup(())
    head: Lookup | None = None
    final: Lookup | None = None
    block: Lookup | None = None
    chain: Lookup | None = None
    first: Lookup | None = None
    version: Lookup | None = None
    status: Lookup | None = None
    bounds: Mapping[DataKind, Lookup] = field(default_factory=dict)
    subscribe: Lookup | None = None
    slots: Lookup | None = None


NO_LOOKUPS = Lookups()
