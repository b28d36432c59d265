"""Classifies upstream errors: one table from codes and phrases to meanings.

Vendors share no codes (-32005 is a rate limit here, too many logs there, a missing block elsewhere) and error texts
change. A rule is therefore a set of codes, a phrase, or both, and the first rule that matches decides. Phrases come
before bare codes and specific rules before general ones: "nonce too low" is found before the -32003 it comes with. An
error without a rule passes unchanged: the caller can read it, and any meaning would be a guess.

The row of a kind in `KINDS` is its effect on the flow: whether another upstream may give a better reply, and whether
the error counts against the upstream. With a pruned upstream the call is sent elsewhere without blame; with one that
has reached its own limits it is sent elsewhere and the upstream is left alone for a while.

Phrases are matched in the message alone, lower-cased. `data` is the contract's to fill: a revert reason may say anything.

A message may repeat the caller's own words, so a phrase alone has little effect. The codes by which JSON-RPC rejects the
request itself do not count against an upstream, and an upstream rests only if its code says so. All other blame follows the
rule in `upstream_health`: failures of one client's calls do not close an upstream to others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import msgspec

ErrorKind = Literal[
    "revert", "invalid", "missing_data", "behind", "range_too_large", "rate_limited", "unauthorized", "unsupported",
    "already_known",
    "nonce_too_low", "underpriced", "rejected", "timeout", "server", "unknown",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class ErrorMeaning:
    """`retry_elsewhere`: another upstream may answer better. `blame`: it counts against the upstream that returned it. `code`:
    our code for it; None keeps the upstream's. `weight`: if several upstreams failed, the error with the greatest weight is
    passed on: first one about the call, then an upstream's own problem, then the lack of a method."""

    retry_elsewhere: bool = False
    blame: bool = False
    code: int | None = None
    weight: int = 0


LACK, TROUBLE, ABOUT_THE_CALL = 1, 2, 3


KINDS: dict[ErrorKind, ErrorMeaning] = {
    # The chain's verdict, or the caller's mistake: every upstream returns the same.
    "revert": ErrorMeaning(code=3),
    "invalid": ErrorMeaning(),
    "already_known": ErrorMeaning(),
    "nonce_too_low": ErrorMeaning(),
    "underpriced": ErrorMeaning(),
    "rejected": ErrorMeaning(),
    # The range is split, or the error suggests one that works (`log_range`).
    "range_too_large": ErrorMeaning(code=-32602),
    # Another upstream may have it, or may do it.
    "missing_data": ErrorMeaning(retry_elsewhere=True, weight=ABOUT_THE_CALL),
    # Another upstream may have it, if this one has not reached the head. One that has is right.
    "behind": ErrorMeaning(retry_elsewhere=True, weight=ABOUT_THE_CALL),
    "unsupported": ErrorMeaning(retry_elsewhere=True, code=-32601, weight=LACK),
    # The upstream's own problem.
    "rate_limited": ErrorMeaning(retry_elsewhere=True, blame=True, code=-32005, weight=TROUBLE),
    "unauthorized": ErrorMeaning(retry_elsewhere=True, blame=True, code=-32603, weight=TROUBLE),
    "timeout": ErrorMeaning(retry_elsewhere=True, blame=True, code=-32015, weight=TROUBLE),
    "server": ErrorMeaning(retry_elsewhere=True, blame=True, weight=TROUBLE),
    # Passed on unchanged.
    "unknown": ErrorMeaning(),
}


# JSON-RPC 2.0, 5.1: the request is not JSON, not a request, or has the wrong params. A caller can cause all three.
REJECTS_THE_REQUEST = frozenset((-32700, -32600, -32602))
# Codes that do not identify the cause: a tracer script or a contract can cause them with any message.
GENERIC_CODES = frozenset((0, 3, -32000, -32603)) | REJECTS_THE_REQUEST


class UpstreamError(msgspec.Struct, frozen=True, gc=False):
    """A classified upstream error. `code` and `message` are the upstream's. `wants_rest`: the upstream asks for a pause.
    `lacks_method`: its code says that it does not have the method, so nothing was executed."""

    kind: ErrorKind
    code: int
    message: str
    retry_elsewhere: bool
    blame: bool
    wants_rest: bool
    lacks_method: bool
    weight: int


@dataclass(frozen=True, slots=True)
class ErrorRule:
    """Matches if the code is one of `codes` (any, if empty) and the pattern is found in the message (any, if empty). `in_data`:
    in the members `data` and `cause` instead, in families whose nodes give their reasons there and whose contracts cannot
    write it."""

    kind: ErrorKind
    codes: frozenset[int]
    pattern: re.Pattern[str] | None
    in_data: bool = False


def matching(kind: ErrorKind, *phrases: str, codes: Iterable[int] = (), in_data: bool = False) -> ErrorRule:
    """Phrases are lower case; `*` stands for anything between."""
    pattern = "|".join(re.escape(phrase).replace(r"\*", ".*") for phrase in phrases)
    return ErrorRule(kind, frozenset(codes), re.compile(pattern, re.DOTALL) if pattern else None, in_data)


def _codes(kind: ErrorKind, *codes: int) -> ErrorRule:
    return matching(kind, codes=codes)


RULES: tuple[ErrorRule, ...] = (
    # EIP-1474's revert, by code and by text, before all others: a contract writes its own words into the message.
    _codes("revert", 3),
    matching("revert", "execution reverted", "vm execution error", "vm exception", "transaction reverted",
             "transaction: revert", "always failing transaction", "transaction simulation failed"),
    # Errors about a transaction that was sent.
    matching("already_known", "already known", "known transaction", "alreadyknown", "already imported",
             "already in mempool", "already in the mempool", "already exists in mempool", "transaction already exists",
             "already have transaction"),
    matching("nonce_too_low", "nonce too low", "nonce is too low", "nonce has already been used", "oldnonce"),
    matching("underpriced", "underpriced", "fee too low", "feetoolow", "gas price too low", "max fee per gas less than",
             "fee cap less than", "tip cap less than"),
    matching("rejected", "insufficient funds", "insufficient balance", "intrinsic gas", "exceeds block gas limit",
             "nonce too high", "txpool is full", "transaction pool is full", "invalid sender", "invalid signature",
             "invalid chain id", "signature verification failure"),
    # Ranges before rates: "eth_getLogs is limited to" and "query exceeds limit" are not throttling.
    matching("range_too_large", "block range should work", "try with this block range", "retry with the range",
             "range is too wide", "range is too large", "range too large", "range too wide", "exceeds the range",
             "exceed maximum block range", "max block range", "maximum block range", "block range limit", "max range",
             "range limit exceeded", "block range exceed", "blocks distance", "logs over more", "returned more than",
             "exceeds max results", "too many logs", "too many results", "response size exceeded", "response size should not",
             "response is too big", "response too large", "query exceeds limit", "limit the query to", "getlogs is limited",
             "limited to a * range", "limited to * block", "up to a * block range", "too large, max is",
             "specify less number of address", "max addresses or topics", "too many addresses", "too many topics",
             "reduce your block range", "reducing your block range",
             "query timeout exceeded. consider"),
    _codes("range_too_large", -32614),
    matching("range_too_large", "too big", "too large", codes=(-32005, -32008, -32012, -32600, -32602)),
    # Errors about params may quote the caller: such words must not be classified as the upstream's failure.
    matching("missing_data", "pruned", "block not found", "unknown block", "header not found", "beyond current head",
             codes=(-32602,)),
    _codes("invalid", -32602),
    matching("rate_limited", "too many requests", "rate limit", "rate-limit", "ratelimit", "request limit",
             "requests limited", "requests per second", "calls per second", "compute units per second", "capacity limit",
             "capacity exceeded", "exceeded the quota", "reached the quota", "quota exceeded", "request count exceeded",
             "has exceeded", "free tier", "upgrade your tier", "current plan's limit", "too much load", "throttled"),
    matching("rate_limited", "limit exceeded", "limit reached",
             codes=(-32000, -32005, -32007, -32009, -32011, -32012, -32016)),
    # The upstream is behind or unhealthy; another one may answer. By phrase, because Solana's codes mean other things
    # elsewhere.
    matching("server", "node is behind", "node is unhealthy", "still syncing", "is syncing"),
    matching("invalid", "was skipped", "transaction version"),
    # Before missing data: "the method trace_block is not available" is about the method, not about a block.
    matching("unsupported", "unsupported method", "not whitelisted", "not included in your", "not implemented",
             "method * not found", "method not found", "method * not available", "method not available",
             "method * not supported", "method not supported", "method * not allowed", "method * disabled",
             "method * does not exist", "does not exist/is not available", "module * disabled", "not a supported"),
    _codes("unsupported", -32601),
    matching("missing_data", "missing trie node", "header not found", "header for hash not found", "block not found",
             "unknown block", "could not find block", "cannot find block", "no such block", "missing block",
             "block not available", "block * not available", "state * not available", "state not found", "historical state",
             "state already discarded", "no state available", "pruned", "pruning", "archive", "not yet available",
             "transaction not found", "receipt not found", "transaction indexing is in progress", "history has been",
             "after last accepted block", "unfinalized data", "block out of range", "beyond current head",
             "latest block number is", "height is not available", "height must be less than", "missing in long-term storage",
             "minimum context slot", "data not found"),
    _codes("missing_data", -32014, -32001, 4444),
    matching("timeout", "timeout", "timed out", "deadline exceeded", "took too long"),
    matching("unauthorized", "unauthorized", "unauthenticated", "must be authenticated", "authentication", "forbidden",
             "access denied", "not allowed to access", "api key", "invalid project id", "key is inactive"),
    _codes("unsupported", -32004),
    matching("invalid", "invalid argument", "invalid param", "missing value for required argument", "too many arguments",
             "cannot unmarshal", "invalid request", "parse error", "non-array args", "hex string", "invalid address",
             "out of gas", "gas required exceeds", "invalid opcode", "stack underflow", "invalid jump", "rlp:",
             "transaction type not supported", "typed transaction too short"),
    # Codes alone, if no phrase matched.
    _codes("invalid", -32600, -32700, -32006),
    _codes("rejected", -32003),
    _codes("rate_limited", 402, 429, -32005, -32097, -33000, -33300, -33400),
    _codes("timeout", -32015, 408, 504),
    matching("server", "internal error", "server error", "unavailable", "bad gateway", "no server available", "overloaded",
             "connection refused", "connection reset", "unexpected eof", "try again", "method handler crashed"),
    _codes("server", -32603, -32002, -32098, -32099, 500, 502, 503),
)  # fmt: skip


class _Error(msgspec.Struct, gc=False):
    code: int | float | str | None = None
    message: str | None = None


_error = msgspec.json.Decoder(_Error).decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
# Longer texts are truncated to bound the time.
_READ_CHARACTERS = 1000
# The message in place of one that callers must not see, because it is about our contract with the upstream, or names an address
# or a credential.
_OUR_WORDS: dict[ErrorKind, str] = {
    "revert": "execution reverted",
    "invalid": "the upstream rejected the call as invalid",
    "already_known": "already known",
    "nonce_too_low": "nonce too low",
    "underpriced": "transaction underpriced",
    "rejected": "the upstream rejected the call",
    "range_too_large": "the range is too large: request fewer blocks",
    "missing_data": "the upstream does not have the data",
    "behind": "the upstream does not have the block",
    "unsupported": "the upstream does not support the call",
    "rate_limited": "the upstream takes no more calls at the moment",
    "unauthorized": "the upstream refused the call",
    "timeout": "the upstream timed out",
    "server": "the upstream failed",
    "unknown": "the upstream failed",
}
# Texts about our plans, prices and keys at the upstream.
_NEVER_SHOWN: frozenset[ErrorKind] = frozenset(("unauthorized", "rate_limited"))
# Texts that contracts write. They may name any address but the upstream's own.
_WRITTEN_BY_CONTRACTS: frozenset[ErrorKind] = frozenset(("revert", "rejected"))
_PLACE = re.compile(
    r"://|localhost|\b\d{1,3}(?:\.\d{1,3}){3}\b|\[[0-9a-f]*:[0-9a-f:.]+\]|[\w-]\.[a-z]{2,}:\d", re.IGNORECASE
)
_INTERNAL_ERROR = -32603
_LARGEST_CODE = 2**53 - 1
# JSON-RPC 2.0, 5.1.
_METHOD_NOT_FOUND = -32601


def classify(error: bytes, rules: Sequence[ErrorRule] = ()) -> UpstreamError:
    """Classify an upstream's error object. `rules`: those of the chain's family, which decide first."""
    try:
        sent = _error(error)
    except _UNREADABLE:
        # Not a JSON-RPC error object: an upstream that returns this is not healthy.
        return _verdict("server", 0, "")
    code, message = _code(sent.code), sent.message or ""
    text = message[:_READ_CHARACTERS].lower()
    data = _data_text(error) if any(rule.in_data for rule in rules) else ""
    for rule in chain(rules, RULES):
        searched = data if rule.in_data else text
        if (not rule.codes or code in rule.codes) and (rule.pattern is None or rule.pattern.search(searched)):
            return _verdict(rule.kind, code, message)
    return _verdict("unknown", code, message)


def _data_text(error: bytes) -> str:
    members = _members(error)
    texts = [bytes(members[name])[:_READ_CHARACTERS] for name in ("cause", "data") if name in members]
    return b"\n".join(texts).decode("utf-8", "replace").lower()


def _verdict(kind: ErrorKind, code: int, message: str) -> UpstreamError:
    meaning = KINDS[kind]
    # Vendors refuse our credentials with -32600 too.
    blame = meaning.blame and (code not in REJECTS_THE_REQUEST or kind == "unauthorized")
    wants_rest = kind == "rate_limited" and code not in GENERIC_CODES
    lacks_method = kind == "unsupported" and code == _METHOD_NOT_FOUND
    return UpstreamError(kind, code, message, meaning.retry_elsewhere, blame, wants_rest, lacks_method, meaning.weight)


_DAY = re.compile(r"dail?y|per day|today", re.IGNORECASE)
_CAPACITY = re.compile(
    r"month\w*\W+(?:\w+\W+){0,3}(?:capacity|quota|limit|credit|allowance)|(?:capacity|quota|credit|allowance)\W+(?:\w+\W+){0,4}"
    r"(?:month|exhausted|used up)|(?:dail?y)\W+(?:\w+\W+){0,3}(?:capacity|quota|credit|limit)",
    re.IGNORECASE,
)


def exhausted_period(words: str) -> Literal["day", "month"] | None:
    """Whether a refusal says that the capacity of a day or a month is used up, and not that of a second."""
    if not _CAPACITY.search(words[:_READ_CHARACTERS]):
        return None
    return "day" if _DAY.search(words[:_READ_CHARACTERS]) else "month"


def _code(code: int | float | str | None) -> int:
    """Some upstreams send the code as text."""
    try:
        number = int(code or 0)
    except (ValueError, OverflowError):
        return 0
    return number if abs(number) <= _LARGEST_CODE else 0


def translate(
    error: bytes,
    verdict: UpstreamError,
    *,
    in_our_codes: bool,
    private: Sequence[str] = (),
    is_named: bool = True,
    members: Sequence[str] = (),
) -> bytes:
    """The error as a caller sees it: our code for its class, with the upstream's message and data, the `members` that clients
    of the chain family read, and nothing else.

    The code stays if the chain family has its own codes (`in_our_codes` is false). The text is replaced if it contains one of
    the upstream's `private` words, or is under no id (`is_named` is false): a gateway may have written it.
    """
    ours = KINDS[verdict.kind].code if in_our_codes else None
    code = ours or verdict.code or _INTERNAL_ERROR
    if not is_named or not _may_be_shown(error, verdict, private):
        code = _INTERNAL_ERROR if verdict.kind == "unauthorized" else code
        return b'{"code":%d,"message":"%b"}' % (code, _OUR_WORDS[verdict.kind].encode())
    parts = [b'"code":%d' % code, b'"message":%b' % msgspec.json.encode(verdict.message)]
    given = _members(error)
    parts += [b'"%b":%b' % (name.encode(), bytes(given[name])) for name in ("data", *members) if name in given]
    return b"{%b}" % b",".join(parts)


def _may_be_shown(error: bytes, verdict: UpstreamError, private: Sequence[str]) -> bool:
    """Only an error object with a number as its code is shown at all."""
    if verdict.kind in _NEVER_SHOWN:
        return False
    try:
        is_standard, text = isinstance(_error(error).code, int), _unescaped(error)
    except (*_UNREADABLE, ValueError):
        return False
    if not is_standard:
        return False
    if verdict.kind not in _WRITTEN_BY_CONTRACTS and _PLACE.search(text):
        return False
    lowered = text.lower()
    return not any(word in lowered for word in private)


def _unescaped(error: bytes) -> str:
    """The error without escapes, which could hide a word."""
    return str(msgspec.json.decode(error)) if b"\\" in error else error.decode()
