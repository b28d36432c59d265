"""Block ranges of `eth_getLogs` and `trace_filter`: parse, split and join them, and read the allowed range from an upstream's
refusal.

A range is closed: [first, last]. It is split into [a, mid] and [mid + 1, b], so no block is requested twice and none is
left out, and the logs of the parts, joined in order, are the logs of the whole. The rest of the filter (addresses,
topics) and the logs pass through byte for byte: results are joined as bytes, and no element is decoded.

A filter is split only if its range is given by numbers, `earliest` or `latest` (the head as the caller of this module
knows it). Filters with `safe`, `finalized`, `pending` or a block hash go upstream unchanged. So do filters with a member
whose name differs from the right one only in case, because some upstreams accept it.

A filter with more addresses or topics than an upstream accepts is split too: into two with half of the longest list each.
Their logs are of the same blocks, so they are put into order by block and index; traces by block, transaction and the place in
its tree of calls. `trace_filter` may name a page by `after` and `count`, which address the joined list.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import msgspec

from proxy.core import jsonrpc

# 32 bytes in hex: a longer number is not a block number.
_MAX_DIGITS = 64
_HEX = frozenset((b'"0x', b'"0X'))

_filter = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_number = msgspec.json.Decoder(int).decode
_text = msgspec.json.Decoder(str).decode
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
_SPACE = b" \t\r\n"
_NAMES = frozenset(("fromblock", "toblock", "blockhash"))
# Lists of addresses: of logs, and the senders and receivers of traces. Nodes return the traces that both lists name, or, with
# the mode `union`, one of them. Either way these are the traces of the halves of one list together, some perhaps in both.
_ADDRESSES = ("address", "fromAddress", "toAddress")


def quantity(raw: bytes) -> int | None:
    """The number of a JSON string such as `"0x1b4"`, leading zeros allowed; None for anything else."""
    digits = raw[3:-1]
    # isalnum rejects what int() accepts: signs, spaces, underscores.
    if raw[:3] not in _HEX or not digits.isalnum() or len(digits) > _MAX_DIGITS:
        return None
    try:
        return int(digits, 16)
    except ValueError:
        return None


class LogRange(msgspec.Struct, frozen=True, gc=False):
    """A query for logs: its first and last block, and the other members of its filter as they were sent."""

    first: int
    last: int
    rest: bytes = b""

    @property
    def blocks(self) -> int:
        return self.last - self.first + 1

    def params(self) -> bytes:
        """The params of a call for this range."""
        comma = b"," if self.rest else b""
        return b'[{"fromBlock":"0x%x","toBlock":"0x%x"%b%b}]' % (self.first, self.last, comma, self.rest)

    def part(self, first: int, last: int) -> LogRange:
        return LogRange(first, last, self.rest)

    def halves(self) -> tuple[LogRange, LogRange] | None:
        """Two ranges that together are this one; None for a single block."""
        if self.first >= self.last:
            return None
        middle = (self.first + self.last) // 2
        return self.part(self.first, middle), self.part(middle + 1, self.last)

    def filter_halves(self) -> tuple[LogRange, LogRange] | None:
        """Two queries for the same blocks that together are this one, each with half of the longest list of addresses or
        topics; None if no list can be divided."""
        members = _members(b"{%b}" % self.rest)
        lists = [(name, -1, _listed(members.get(name))) for name in _ADDRESSES]
        positions = _listed(members.get("topics"))
        lists += [("topics", at, _listed(topics)) for at, topics in enumerate(positions)]
        name, at, longest = max(lists, key=lambda each: len(each[2]))
        if len(longest) < 2:
            return None
        middle = len(longest) // 2
        halves = []
        for half in (longest[:middle], longest[middle:]):
            given = _joined(half)
            changed = given if name in _ADDRESSES else _joined([*positions[:at], given, *positions[at + 1 :]])
            halves.append(LogRange(self.first, self.last, _rest({**members, name: changed})))
        return halves[0], halves[1]

    def unpaged(self) -> tuple[LogRange, int, int | None] | None:
        """This query without `after` and `count`, and these; None if they are not numbers."""
        members = _members(b"{%b}" % self.rest)
        after, count = _index(members.pop("after", None)), _index(members.pop("count", None))
        if after is None or count is None:
            return None
        return LogRange(self.first, self.last, _rest(members)), max(after, 0), count if count >= 0 else None

    def chunks(self, size: int) -> Iterator[LogRange]:
        """Ranges of at most `size` blocks, in order. Lazy: a caller may name four billion blocks."""
        size = max(size, 1)
        for first in range(self.first, self.last + 1, size):
            yield self.part(first, min(first + size - 1, self.last))


def parse(params: bytes, head: int) -> LogRange | None:
    """The range of a query, or None if it cannot be split."""
    try:
        filters = _filter(params)
    except _UNREADABLE:
        return None
    if len(filters) != 1:
        return None
    members = filters[0]
    named = [name for name in members if name.casefold() in _NAMES]
    if "blockHash" in named or any(name not in ("fromBlock", "toBlock") for name in named):
        return None
    first = _bound(members.pop("fromBlock", None), head)
    last = _bound(members.pop("toBlock", None), head)
    if first is None or last is None or first > last:
        return None
    return LogRange(first, last, _rest(members))


def _rest(members: Mapping[str, bytes | msgspec.Raw]) -> bytes:
    return b",".join(b"%b:%b" % (msgspec.json.encode(name), bytes(value)) for name, value in members.items())


def _listed(raw: msgspec.Raw | None) -> list[msgspec.Raw]:
    """The items of an array; none for anything else."""
    return [] if raw is None or bytes(raw)[:1] != b"[" else _items(raw)


def _joined(items: Iterable[bytes | msgspec.Raw]) -> bytes:
    return b"[%b]" % b",".join(bytes(each) for each in items)


def _index(raw: msgspec.Raw | None) -> int | None:
    """The number of `after` or `count`; -1 if it is not given, None if it is not a number."""
    if raw is None or raw == b"null":
        return -1
    try:
        return quantity(bytes(raw)) if bytes(raw)[:1] == b'"' else _number(raw)
    except _UNREADABLE:
        return None


# Allowed blocks beyond this process's head, which may be a little behind.
_AHEAD = 1000


def within_head(params: bytes, head: int) -> bytes:
    """The same query, ending near the head. Some nodes visit every block that a range names, even if it does not exist:
    Hardhat would be busy for years."""
    query = parse(params, head) if head else None
    if query is None or query.last <= max(head, query.first) + _AHEAD:
        return params
    if query.first > head:
        return query.part(query.first, query.first + _AHEAD).params()
    comma = b"," if query.rest else b""
    return b'[{"fromBlock":"0x%x","toBlock":"latest"%b%b}]' % (query.first, comma, query.rest)


def _bound(raw: msgspec.Raw | None, head: int) -> int | None:
    """The number of one end: absent, null and `latest` are the head."""
    value = b"null" if raw is None else bytes(raw)
    if value == b"null":
        return head
    if (number := quantity(value)) is not None:
        return number
    try:
        return {"latest": head, "earliest": 0}.get(_text(value))
    except _UNREADABLE:
        return None


def merge(results: Iterable[bytes]) -> bytes:
    """The arrays of the parts as one array. Raises ValueError if one is not an array: a partial reply would be wrong.

    All of them are copied once, in one call: copies of megabytes would take milliseconds of the event loop each.
    """
    pieces: list[bytes | memoryview] = []
    for result in results:
        array = result.strip(_SPACE)
        if len(array) < 2 or array[:1] != b"[" or array[-1:] != b"]":
            raise ValueError("the logs of a part are no array")
        is_padded = array[1:2] in _SPACE or array[-2:-1] in _SPACE
        if logs := array[1:-1].strip(_SPACE) if is_padded else memoryview(array)[1:-1]:
            pieces += (b",", logs) if pieces else (b"[", logs)
    return b"".join((*pieces, b"]")) if pieces else b"[]"


class _LogPlace(msgspec.Struct, frozen=True, gc=False):
    """The block and the index of a log. Numbers of old nodes may have leading zeros."""

    blockNumber: str
    logIndex: str


_place = msgspec.json.Decoder(_LogPlace).decode


# The place of a log: its block and index. The place of a trace: `_trace_place`.
Place: TypeAlias = tuple[int, int] | tuple[int, int, tuple[int, ...], str, int]


def places(logs: bytes) -> list[tuple[Place, bytes]]:
    """The logs of a part, each with its block and index. Raises ValueError if one has none."""
    try:
        items = _items(logs)
        parsed = [_place(each) for each in items]
    except _UNREADABLE:
        raise ValueError("the logs of a part have no places") from None
    numbers = [(int(place.blockNumber, 16), int(place.logIndex, 16)) for place in parsed]
    return list(zip(numbers, map(bytes, items), strict=True))


class _Reward(msgspec.Struct, frozen=True, gc=False):
    """The action of a reward; that of a call has other members."""

    author: str = ""
    rewardType: str = ""


class _Trace(msgspec.Struct, frozen=True, gc=False):
    blockNumber: int
    transactionPosition: int | None = None
    traceAddress: tuple[int, ...] = ()
    action: _Reward = _Reward()


_trace = msgspec.json.Decoder(_Trace).decode
# Rewards come after the transactions of their block.
_AFTER_ALL = 1 << 62


def trace_places(traces: bytes) -> list[tuple[Place, bytes]]:
    """The traces of a part, each with its place: the block, the transaction, the address in the tree of calls, the reward, and
    a number that distinguishes equal ones of this part. Raises ValueError if one has none."""
    try:
        items = _items(traces)
        parsed = [_trace_place(_trace(each)) for each in items]
    except _UNREADABLE:
        raise ValueError("the traces of a part have no places") from None
    seen: Counter[tuple[int, int, tuple[int, ...], str]] = Counter()
    numbered: list[tuple[Place, bytes]] = []
    for place, item in zip(parsed, items, strict=True):
        numbered.append(((*place, seen[place]), bytes(item)))
        seen[place] += 1
    return numbered


def _trace_place(trace: _Trace) -> tuple[int, int, tuple[int, ...], str]:
    if trace.transactionPosition is not None:
        return trace.blockNumber, trace.transactionPosition, trace.traceAddress, ""
    reward = f"{trace.action.rewardType} {trace.action.author.lower()}"
    return trace.blockNumber, _AFTER_ALL, trace.traceAddress, reward


def in_order(placed: Mapping[Place, bytes]) -> bytes:
    """The logs or traces by their places as one array."""
    return _joined(placed[place] for place in sorted(placed))


def page(results: bytes, after: int, count: int | None) -> bytes:
    """The items of an array from one on, at most `count`."""
    if not after and count is None:
        return results
    return _joined(_items(results)[after : None if count is None else after + count])


# "exceed max addresses or topics per search position", "please specify less number of addresses", "too many topics"
_ABOUT_FILTER = re.compile(
    r"(?:max|maximum|too many|number of|fewer|less) (?:number of )?(?:addresses|topics|address\b)|addresses or topics",
    re.IGNORECASE,
)


def is_about_filter(message: str) -> bool:
    """Whether a refusal is about the number of addresses or topics, and not of blocks."""
    return _ABOUT_FILTER.search(message[:_READ_CHARACTERS]) is not None


# "this block range should work: [0x1, 0x7d0]", "Try with this block range [0x1, 0x7d0].", "retry with the range 5-10"
_SUGGESTED_HEX = re.compile(r"\[\s*(0x[0-9a-f]{1,16})\s*,\s*(0x[0-9a-f]{1,16})\s*\]", re.IGNORECASE)
_SUGGESTED_DECIMAL = re.compile(r"range\s+(\d{1,18})\s*-\s*(\d{1,18})", re.IGNORECASE)
# "max 500", "limited to a 10,000 range", "up to a 2K block range", "maximum is set to 2000", "range limit of 1000"
_COUNT = r"(\d{1,3}(?:,\d{3})+|\d{1,9})\s?(k?)\b"
_ALLOWED = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"up to an? {_COUNT}(?: block)? range",
        rf"limited to(?: an?)? {_COUNT}",
        rf"(?:max|maximum)(?: allowed| block)*(?: range)?(?: is| allowed| of| set to| limit| exceeded)*[:,]? {_COUNT}",
        rf"(?:range|distance)(?: limit)?(?: of| is| to|:| exceeds| should be less than)* {_COUNT}",
        rf"(?:more than|greater than|exceeds?|limit(?: is| of)?) {_COUNT} blocks?",
        rf"{_COUNT} blocks? (?:range|limit|distance)",
    )
)
# Limits on results, not on blocks: they say nothing about the range.
_RESULTS = re.compile(rf"{_COUNT}\s*(?:results|logs|entries|bytes|mb)", re.IGNORECASE)
# Longer texts are truncated to bound the time.
_READ_CHARACTERS = 1000


def suggested(message: str) -> tuple[int, int] | None:
    """The range that the upstream says would work."""
    text = message[:_READ_CHARACTERS]
    if match := _SUGGESTED_HEX.search(text):
        first, last = int(match[1], 16), int(match[2], 16)
    elif match := _SUGGESTED_DECIMAL.search(text):
        first, last = int(match[1]), int(match[2])
    else:
        return None
    return (first, last) if first <= last else None


def allowed_blocks(message: str) -> int | None:
    """The number of blocks that the upstream says it allows in one range."""
    if pair := suggested(message):
        return pair[1] - pair[0] + 1
    text = _RESULTS.sub("", message[:_READ_CHARACTERS])
    for pattern in _ALLOWED:
        if match := pattern.search(text):
            return int(match[1].replace(",", "")) * (1000 if match[2] else 1) or None
    return None


def narrowed(asked: LogRange, message: str) -> LogRange | None:
    """The first part of a refused range: as long as the upstream says it allows, otherwise half of it.

    None for a single block, which cannot be split. The upstream's suggestion is used only inside the range.
    """
    if (halves := asked.halves()) is None:
        return None
    blocks = allowed_blocks(message)
    if blocks is None or blocks >= asked.blocks:
        return halves[0]
    return asked.part(asked.first, asked.first + blocks - 1)


def refusal(first: int, last: int) -> bytes:
    """The error of a range that is too large, with one that would work: in the data, and in Alchemy's phrase, which indexers
    (ponder, rindexer) look for."""
    return _refusal(jsonrpc.INVALID_PARAMS, "", first, last)


def limit_refusal(first: int, last: int, reason: str) -> bytes:
    """The same for a range that is too large for the limits of the account."""
    return _refusal(jsonrpc.LIMIT_EXCEEDED, f"{reason}; ", first, last)


def _refusal(code: int, reason: str, first: int, last: int) -> bytes:
    hexes = f"0x{first:x}", f"0x{last:x}"
    message = f"the block range is too large: {reason}this block range should work: [{hexes[0]}, {hexes[1]}]"
    return jsonrpc.error(code, message, {"suggested_from": hexes[0], "suggested_to": hexes[1]})
