"""The JSON-RPC 2.0 envelope: parsed strictly, never forwarded, rebuilt.

Go nodes match member names case-insensitively and let the last one win, so an envelope that is checked here and
forwarded unchanged could run as something else. Therefore only the four members of the specification are accepted, by
exact name and once; the method is ASCII text; `id` and `params` stay raw bytes (an id beyond 64 bits is returned as it
was sent); and the upstream's request is rebuilt from these parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec

from proxy.core.nesting import has_too_many_values, is_deeper

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
# EIP-1474: a requested resource is not available.
RESOURCE_UNAVAILABLE = -32002
LIMIT_EXCEEDED = -32005
UNAUTHORIZED = -32016

# Ids are echoed; longer ones have no use.
MAX_ID_BYTES = 256
MAX_METHOD = 128
# No method's params are nested as deeply.
MAX_DEPTH: Final = 500
NULL = b"null"
NO_PARAMS = b"[]"
NO_NAMED_PARAMS = b"{}"

# A call: its method, its params and its id as they were sent. An empty id is a notification's. That of a call before JSON-RPC
# 2.0 is followed by OLD_SUCCESS: replies to such calls have both members, `result` and `error`, and one of them is null. The
# clients of Bitcoin read `error` without checking that it is there. Those of TON read `ok`: see `Dialect`.
RawCall: TypeAlias = tuple[str, bytes, bytes]
OLD_SUCCESS: Final = b',"error":null'
OK_SUCCESS: Final = b',"ok":true'


class Envelope(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    jsonrpc: Literal["2.0"]
    method: str
    params: msgspec.Raw = msgspec.Raw()
    id: msgspec.Raw = msgspec.Raw()


class Dialect(msgspec.Struct, frozen=True):
    """The forms besides JSON-RPC 2.0 that clients of a chain family send.

    `named_params`: params may be an object. `only_named`: they must be one. `old_versions`: calls may be of JSON-RPC 1.0 or
    1.1, whose version is in `jsonrpc`, in `version` or nowhere. `says_ok`: replies have the member `ok` beside those of
    JSON-RPC. `lone_object`: params of methods that begin like this may be an object, which is read as an array with this
    one item. A service's SDK sends them so.
    """

    named_params: bool = False
    only_named: bool = False
    old_versions: bool = False
    says_ok: bool = False
    lone_object: str = ""


STRICT: Final = Dialect()


class OldEnvelope(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    method: str
    jsonrpc: Literal["1.0", "1.1", "2.0"] | None = None
    version: Literal["1.0", "1.1"] | None = None
    params: msgspec.Raw = msgspec.Raw()
    id: msgspec.Raw = msgspec.Raw()


AnyEnvelope: TypeAlias = Envelope | OldEnvelope


class _Members(msgspec.Struct, gc=False):
    """The members of a malformed call that its error reply needs. The decoder skips all others."""

    jsonrpc: msgspec.Raw = msgspec.Raw(NULL)
    method: msgspec.Raw = msgspec.Raw()
    id: msgspec.Raw = msgspec.Raw(NULL)


class MalformedCall(Exception):
    """The bytes are not a call: the JSON-RPC code, and the reason."""

    def __init__(self, code: int, message: str, id: bytes = NULL) -> None:  # noqa: A002
        super().__init__(message)
        self.code = code
        self.message = message
        self.id = id


_envelope = msgspec.json.Decoder(Envelope).decode
_old_envelope = msgspec.json.Decoder(OldEnvelope).decode
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_any = msgspec.json.Decoder(msgspec.Raw).decode
_loose = msgspec.json.Decoder(_Members).decode
_BAD = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
NOT_AN_OBJECT = 'a call must be an object such as {"jsonrpc": "2.0", "id": 1, "method": "…", "params": []}'
# Messages of the decoder. A name is repeated only if it is shorter than an API key.
_TRUNCATED = "Input data was truncated"
_UNKNOWN = re.compile(r"Object contains unknown field `(\w{1,40})`", re.ASCII)
TOO_DEEP = "parse error: nested too deeply, or too many values"
_ARRAY = b"["
_OBJECT = b"{"
_ID_STARTS = frozenset(b'"-0123456789')
# For the hot path, which takes the steps of `parse` and `read_reply` itself.
read_envelopes = msgspec.json.Decoder(list[Envelope]).decode
NOT_JSON = _BAD
ID_STARTS = _ID_STARTS


_SPACES: Final = b" \t\r\n"
# Space before a batch. A body with more is no batch: skipping a megabyte of it takes milliseconds.
MOST_SPACE: Final = 1024


def envelope_reader(dialect: Dialect) -> Callable[[bytes], AnyEnvelope]:
    """Reads calls on the hot path. Raises NOT_JSON for those that need the checks of `parse`."""
    return _read_old if dialect.old_versions else _envelope


def _read_old(body: bytes) -> OldEnvelope:
    """A call of any version, with OLD_SUCCESS after its id unless it is of version 2.0. In calls of that version, the hot path
    looks for repeated members itself."""
    envelope = _old_envelope(body)
    if envelope.jsonrpc != "2.0" or envelope.version is not None:
        if b"\\" in body or (not _is_compact(body, envelope) and max(map(body.count, _OLD_NAMES)) > 1):
            raise msgspec.DecodeError("a member may be repeated")
        if envelope.id and envelope.jsonrpc != "2.0":
            envelope.id = msgspec.Raw(bytes(envelope.id) + OLD_SUCCESS)
    return envelope


def is_batch(body: bytes) -> bool:
    return body[:1] == b"[" or body[:MOST_SPACE].lstrip(_SPACES)[:1] == b"["


def parse(body: bytes, envelope: Envelope | None = None, dialect: Dialect = STRICT) -> RawCall:
    """Parse a single call. Raises MalformedCall. `envelope`: the decoded body, if the caller has decoded it."""
    if dialect.old_versions and envelope is None and (len(body) <= MOST_SEARCHED or b'"2.0"' not in body):
        return _parse_old(body, dialect)
    try:
        if not body.isascii():
            body.decode()  # The decoder does not check members that are kept as bytes: they must be UTF-8 too.
        if envelope is None:
            if has_too_many_values(body):
                raise MalformedCall(PARSE_ERROR, TOO_DEEP)
            envelope = _envelope(body)
        call = checked(envelope, dialect)
    except _BAD as exc:
        raise _malformed(body, exc) from None
    if len(body) - _least_size(envelope) >= LEAST_REPEAT and repeats_members(body, envelope):
        raise MalformedCall(INVALID_REQUEST, "a member is repeated")
    return call


def _parse_old(body: bytes, dialect: Dialect) -> RawCall:
    """Parse a call of any version. It is searched for repeated members unless none of their names occurs twice."""
    try:
        if not body.isascii():
            body.decode()
        if has_too_many_values(body):
            raise MalformedCall(PARSE_ERROR, TOO_DEEP)
        envelope = _old_envelope(body)
        call = checked(envelope, dialect)
    except _BAD as exc:
        raise _malformed(body, exc, dialect) from None
    if b"\\" in body or max(map(body.count, _OLD_NAMES)) > 1:
        if len(body) > MOST_SEARCHED:
            raise MalformedCall(INVALID_REQUEST, 'a member may be repeated: send large calls with "jsonrpc": "2.0"')
        pairs = json.loads(body, object_pairs_hook=list, parse_int=str, parse_float=str)
        if len(dict(pairs)) < len(pairs):
            raise MalformedCall(INVALID_REQUEST, "a member is repeated")
    return call if envelope.jsonrpc == "2.0" or not call[2] else (call[0], call[1], call[2] + OLD_SUCCESS)


def checked(envelope: AnyEnvelope, dialect: Dialect = STRICT) -> RawCall:
    method, params, id_ = envelope.method, bytes(envelope.params) or NO_PARAMS, bytes(envelope.id)
    if params == NULL:
        params = NO_PARAMS
    good_id = not id_ or (len(id_) <= MAX_ID_BYTES and (id_[0] in _ID_STARTS or id_ == NULL))
    if len(params) > MAX_DEPTH and is_deeper(params, MAX_DEPTH):
        raise MalformedCall(PARSE_ERROR, TOO_DEEP)
    if dialect.only_named and params == NO_PARAMS:
        params = NO_NAMED_PARAMS
    if params[:1] == _OBJECT and dialect.lone_object and method.startswith(dialect.lone_object):
        params = _ARRAY + params + b"]"
    good_params = (params[:1] == _ARRAY and not dialect.only_named) or (dialect.named_params and params[:1] == _OBJECT)
    if good_id and good_params and method.isascii() and 0 < len(method) <= MAX_METHOD:
        return method, params, id_ + OK_SUCCESS if dialect.says_ok and id_ else id_
    reason = _fault(envelope, dialect, good_id=good_id)
    raise MalformedCall(INVALID_REQUEST, reason, id_ if good_id and id_ else NULL)


# Repeated members. Our decoder keeps the last one and other parsers keep the first, so a call with any is refused. A call with
# a repeated member is longer than its parts, so most calls need no search.
AROUND: Final = len(b'{"jsonrpc":"2.0","method":"","params":,"id":}')
LEAST_REPEAT: Final = len(b',"id":1')
# A call with all four members and at most this many bytes around their values certainly repeats none of them.
COMPACT: Final = AROUND + LEAST_REPEAT - 1
# The names of the members of a call of any version, and the values of its `jsonrpc`.
_OLD_NAMES = (b'"id"', b'"params"', b'"method"', b'"jsonrpc"', b'"version"')
_OLD_VERSIONS = (NULL, b'"1.0"', b'"1.1"', b'"2.0"')
# A larger call is measured instead of searched, which would take tens of milliseconds.
MOST_SEARCHED: Final = 16_384


def repeats_members(body: bytes, envelope: AnyEnvelope) -> bool:
    """Whether the call, which was read without an error, has a member more than once."""
    if b"\\" not in body and max(map(body.count, (b'"id"', b'"params"', b'"method"', b'"jsonrpc"'))) < 2:
        return False
    if len(body) > MOST_SEARCHED:
        return _has_more_than_its_parts(body, envelope)
    try:
        pairs = json.loads(body, object_pairs_hook=list, parse_int=str, parse_float=str)
    except RecursionError:
        return True
    return len(dict(pairs)) < len(pairs)


def _has_more_than_its_parts(body: bytes, envelope: AnyEnvelope) -> bool:
    """Whether there is anything but space around the parts of the call: a repeated member, or a name with an escape."""
    parts = (envelope.method.encode(), bytes(envelope.params), bytes(envelope.id))
    return len(body) - _least_size(envelope) > _spaces(body) - sum(map(_spaces, parts))


def _spaces(text: bytes) -> int:
    return len(text) - len(text.translate(None, _SPACES))


def _least_size(envelope: AnyEnvelope) -> int:
    """The size of the call in its shortest form, without spaces and repeated members."""
    size = AROUND + len(envelope.method) + len(envelope.params) + len(envelope.id)
    return size - (0 if envelope.params else len(',"params":')) - (0 if envelope.id else len(',"id":'))


def _is_compact(body: bytes, envelope: OldEnvelope) -> bool:
    """Whether a call that names its version has all members and no room for another one. `version` and its value are as long as
    `jsonrpc` and its."""
    if envelope.jsonrpc is None and envelope.version is None:
        return False
    params, call_id = envelope.params, envelope.id
    around = len(body) - len(params) - len(call_id) - len(envelope.method)
    return bool(params and call_id) and around <= COMPACT


def batch_may_repeat(body: bytes, envelopes: Sequence[Envelope]) -> bool:
    """Whether a call of the batch may have a repeated member. A quick test, which rules it out for most batches."""
    count = len(envelopes)
    if len(body) - sum(map(_least_size, envelopes)) - count - 1 < LEAST_REPEAT:
        return False
    is_plain = b"\\" not in body and all(envelope.params and envelope.id for envelope in envelopes)
    return not is_plain or max(map(body.count, (b'"id"', b'"params"', b'"method"', b'"jsonrpc"'))) > count


def _fault(envelope: AnyEnvelope, dialect: Dialect, *, good_id: bool) -> str:
    if not envelope.method.isascii() or not 0 < len(envelope.method) <= MAX_METHOD:
        return 'member "method" must be the name of a method'
    if not good_id:
        return 'member "id" must be a string, a number or null'
    if dialect.only_named:
        return 'member "params" must be an object'
    return f'member "params" must be an array{" or an object" if dialect.named_params else ""}'


def _malformed(body: bytes, exc: Exception, dialect: Dialect = STRICT) -> MalformedCall:
    """Distinguish invalid JSON from JSON that is not a call, and find the id for the reply."""
    if isinstance(exc, RecursionError):
        return MalformedCall(PARSE_ERROR, TOO_DEEP)
    try:
        body.decode()
        _any(body)
    except _BAD as fault:
        return MalformedCall(PARSE_ERROR, f"parse error: {_json_fault(body, fault)}")
    try:
        members = _loose(body)
    except _BAD:
        return MalformedCall(INVALID_REQUEST, f"invalid request: {NOT_AN_OBJECT}")
    raw = bytes(members.id)
    good = len(raw) <= MAX_ID_BYTES and (raw[0] in _ID_STARTS or raw == NULL)
    return MalformedCall(
        INVALID_REQUEST, f"invalid request: {_member_fault(members, exc, dialect)}", raw if good else NULL
    )


def _json_fault(body: bytes, exc: Exception) -> str:
    if not body[:MOST_SPACE].strip(_SPACES) and len(body) <= MOST_SPACE:
        return "the body is empty: send a JSON-RPC call"
    if isinstance(exc, UnicodeDecodeError):
        return "the body is not UTF-8"
    return "the JSON ends too early" if str(exc) == _TRUNCATED else str(exc)


def _member_fault(members: _Members, exc: Exception, dialect: Dialect) -> str:
    """Why an object is not a call."""
    if bytes(members.jsonrpc) not in (_OLD_VERSIONS if dialect.old_versions else (b'"2.0"',)):
        return f'member "jsonrpc" must be "2.0"{", 1.1 or 1.0" if dialect.old_versions else ""}'
    if not members.method:
        return 'member "method" is missing'
    if bytes(members.method)[:1] != b'"':
        return 'member "method" must be the name of a method'
    named = _UNKNOWN.fullmatch(str(exc))
    return f"a call has the members jsonrpc, id, method and params only{', not ' + named[1] if named else ''}"


# Writing

ENVELOPE_START = b'{"jsonrpc":"2.0","id":'


def request_tail(method: str) -> bytes:
    """The bytes between a call's id and its params."""
    return b',"method":"%b","params":' % method.encode("ascii")


def result_reply(id: bytes, result: bytes | msgspec.Raw) -> bytes:  # noqa: A002
    return b"".join((ENVELOPE_START, id, b',"result":', result, b"}"))


def result_start(id: bytes) -> bytes:  # noqa: A002
    """The start of a reply with a result."""
    return b'%b%b,"result":' % (ENVELOPE_START, id)


def error_reply(id: bytes, error: bytes) -> bytes:  # noqa: A002
    if id.endswith(OLD_SUCCESS):
        return b"".join((ENVELOPE_START, id.removesuffix(OLD_SUCCESS), b',"result":null,"error":', error, b"}"))
    if id.endswith(OK_SUCCESS):
        return b"".join((ENVELOPE_START, id.removesuffix(OK_SUCCESS), b',"ok":false,"error":', error, b"}"))
    return b"".join((ENVELOPE_START, id or NULL, b',"error":', error, b"}"))


def error(code: int, message: str, data: Any = None) -> bytes:
    """An error object with our own code and message."""
    body: dict[str, Any] = {"code": code, "message": message}
    if data is not None:
        body["data"] = data
    return msgspec.json.encode(body)


# Reading an upstream's reply


class UpstreamReply(msgspec.Struct, gc=False):
    """An upstream's reply. Exactly one of `result` and `error` is not empty."""

    id: msgspec.Raw = msgspec.Raw()
    result: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()


class NumberedReply(msgspec.Struct, gc=False):
    """The reply to a call whose id is a positive number. This is faster to read than an id that is kept as bytes."""

    id: int = 0
    result: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()


_reply = msgspec.json.Decoder(UpstreamReply).decode
_replies = msgspec.json.Decoder(list[UpstreamReply]).decode
read_any_reply = _reply
read_numbered_reply = msgspec.json.Decoder(NumberedReply).decode
read_any_replies = _replies


class ForeignReply(ValueError):
    """A reply with the id of another call: replies on this connection no longer match the calls."""


# A larger reply is not read whole, which takes 2 ms for each megabyte. Its beginning and its end have to be right, as for one
# that is passed on while it arrives.
READ_WHOLE = 1 << 20
_LONGEST_TAIL = 8


def read_reply(body: bytes, id: bytes) -> UpstreamReply:  # noqa: A002
    """The upstream's reply to our call. Raises ValueError for anything else, which must not be relayed."""
    try:
        if not body.isascii():
            body.decode()
        reply = (_large_reply(body, id) if len(body) > READ_WHOLE else None) or _reply(body)
    except _BAD as exc:
        raise ValueError("not a JSON-RPC reply") from exc
    if bytes(reply.id) != id and not is_anonymous_error(reply):
        raise ForeignReply("a reply to another call")
    return _settled(reply)


def _large_reply(body: bytes, id: bytes) -> UpstreamReply | None:  # noqa: A002
    """A reply whose result comes last, and is an object, an array or a text; None for any other one."""
    start = result_start(id)
    if not body.startswith(start) or body[len(start) : len(start) + 1] not in (b"{", b"[", b'"'):
        return None
    # White space that a node sends is a line break. An upstream that sends megabytes of it gets no search for its beginning.
    tail = body[-_LONGEST_TAIL:].rstrip(b" \r\n\t")
    if not tail.endswith(b"}"):
        return None
    end = len(body) - _LONGEST_TAIL + len(tail) - 1
    return UpstreamReply(id=msgspec.Raw(id), result=msgspec.Raw(memoryview(body)[len(start) : end]))


class _ProtocolError(msgspec.Struct, gc=False):
    code: int
    message: str


_protocol_error = msgspec.json.Decoder(_ProtocolError).decode
# JSON-RPC 2.0, 5: the id "MUST be Null" in an error that occurred before the request's id was read.
_WITHOUT_ID = (-32700, -32600)


def is_anonymous_error(reply: UpstreamReply) -> bool:
    """Whether this is a parse error or an invalid request without an id. Other replies without an id may be a gateway's and
    are not relayed."""
    if not reply.error or bytes(reply.id) not in (NULL, b"") or bytes(reply.result) not in (NULL, b""):
        return False
    try:
        return _protocol_error(bytes(reply.error)).code in _WITHOUT_ID
    except _BAD:
        return False


def read_replies(body: bytes) -> dict[bytes, UpstreamReply]:
    """The replies to a batch of ours, by id; an error without an id is under NULL. Raises ValueError."""
    try:
        if not body.isascii():
            body.decode()
        replies = _replies(body)
    except _BAD as exc:
        raise ValueError("not a JSON-RPC batch") from exc
    anonymous = [reply for reply in replies if is_anonymous_error(reply)]
    by_id = {bytes(reply.id): _settled(reply) for reply in replies if reply not in anonymous}
    if len(by_id) != len(replies) - len(anonymous):
        raise ValueError("two replies to one call")
    if anonymous:
        by_id[NULL] = _settled(anonymous[0])
    return by_id


def _settled(reply: UpstreamReply) -> UpstreamReply:
    if reply.result:
        if not reply.error:
            return reply
        if bytes(reply.error) == NULL:
            reply.error = msgspec.Raw()
            return reply
        if bytes(reply.result) == NULL:
            reply.result = msgspec.Raw()
            return reply
    elif reply.error and bytes(reply.error) != NULL:
        return reply
    raise ValueError("neither result nor error, or both")
