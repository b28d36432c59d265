"""The JSON-RPC 2.0 envelope: read strictly, never forwarded, rebuilt.

Go nodes match member names without case and let the last one win, so an envelope that is checked here and forwarded as it
came could run as something else. Therefore: exactly the four members of the specification, by exact name; the method as
ASCII text; `id` and `params` kept as the bytes they were (an id beyond 64 bits comes back as it was sent); and what goes to
the upstream is written anew from those parts.
"""

from __future__ import annotations

from typing import Any

import msgspec

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
LIMIT_EXCEEDED = -32005
UNAUTHORIZED = -32016
TIMEOUT = -32015

MAX_BATCH = 100
# An id is echoed: longer ones serve nobody.
MAX_ID_BYTES = 256
MAX_METHOD = 64
NULL = b"null"


class Call(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """One call as it was sent. `params` and `id` are empty where absent; a call without an id is a notification."""

    jsonrpc: str
    method: str
    params: msgspec.Raw = msgspec.Raw()
    id: msgspec.Raw = msgspec.Raw()


class Malformed(Exception):
    """The bytes are no call: a JSON-RPC code, and words that say what is wrong."""

    def __init__(self, code: int, message: str, id: bytes = NULL) -> None:  # noqa: A002
        super().__init__(message)
        self.code = code
        self.message = message
        self.id = id


_call = msgspec.json.Decoder(Call).decode
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_loose = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_anything = msgspec.json.Decoder(Any).decode


def is_batch(body: bytes) -> bool:
    return body.lstrip(b" \t\r\n")[:1] == b"["


def parse(body: bytes) -> Call:
    """A single call, or Malformed."""
    try:
        call = _call(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        raise _malformed(body, exc) from None
    if fault := _fault(call):
        raise Malformed(INVALID_REQUEST, fault, id_of(call) if _is_id(bytes(call.id)) else NULL)
    return call


def parse_batch(body: bytes) -> list[Call | Malformed]:
    """Each item a call or what is wrong with it, in order; Malformed for a body that is no batch at all."""
    try:
        raws = _items(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        raise _malformed(body, exc) from None
    if not raws:
        raise Malformed(INVALID_REQUEST, "the batch is empty")
    if len(raws) > MAX_BATCH:
        raise Malformed(INVALID_REQUEST, f"the batch has {len(raws)} items: at most {MAX_BATCH} are allowed")
    return [_item(bytes(raw)) for raw in raws]


def _item(raw: bytes) -> Call | Malformed:
    try:
        return parse(raw)
    except Malformed as exc:
        return exc


def id_of(call: Call) -> bytes:
    return bytes(call.id) or NULL


def is_notification(call: Call) -> bool:
    return not call.id


def _fault(call: Call) -> str | None:
    if call.jsonrpc != "2.0":
        return 'member "jsonrpc" must be "2.0"'
    if not call.method.isascii() or not 0 < len(call.method) <= MAX_METHOD:
        return 'member "method" must be the name of a method'
    params = bytes(call.params)[:1]
    if params not in (b"", b"[", b"{"):
        return 'member "params" must be an array or an object'
    if call.id and not _is_id(bytes(call.id)):
        return 'member "id" must be a string, a number or null'
    return None


def _is_id(raw: bytes) -> bool:
    return len(raw) <= MAX_ID_BYTES and (raw[:1] in _ID_STARTS or raw == NULL)


_ID_STARTS = frozenset(bytes([c]) for c in b'"-0123456789')


def _malformed(body: bytes, exc: Exception) -> Malformed:
    """Tell bytes that are no JSON from JSON that is no call, and find the id to answer under."""
    if isinstance(exc, RecursionError):
        return Malformed(PARSE_ERROR, "parse error: nested too deeply")
    try:
        members = _loose(body)
    except msgspec.ValidationError:
        return Malformed(INVALID_REQUEST, f"invalid request: {exc}")
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return Malformed(PARSE_ERROR, f"parse error: {exc}")
    raw = bytes(members.get("id", msgspec.Raw(NULL)))
    return Malformed(INVALID_REQUEST, f"invalid request: {exc}", raw if _is_id(raw) else NULL)


def request(id: int, method: str, params: bytes | msgspec.Raw) -> bytes:  # noqa: A002
    """The call as it goes to an upstream, under our own id."""
    return b'{"jsonrpc":"2.0","id":%d,"method":"%b","params":%b}' % (id, method.encode("ascii"), bytes(params) or b"[]")


def result_reply(id: bytes, result: bytes) -> bytes:  # noqa: A002
    return b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (id, result)


def error_reply(id: bytes, error: bytes) -> bytes:  # noqa: A002
    return b'{"jsonrpc":"2.0","id":%b,"error":%b}' % (id, error)


def error(code: int, message: str, data: Any = None) -> bytes:
    """An error object of our own."""
    body: dict[str, Any] = {"code": code, "message": message}
    if data is not None:
        body["data"] = data
    return msgspec.json.encode(body)


class UpstreamReply(msgspec.Struct, gc=False):
    """What an upstream answered. Exactly one of `result` and `error` must be there."""

    id: msgspec.Raw = msgspec.Raw()
    result: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()


_upstream_reply = msgspec.json.Decoder(UpstreamReply).decode


def read_reply(body: bytes, id: int) -> UpstreamReply:  # noqa: A002
    """The upstream's reply to our call, or ValueError: such bytes are never relayed."""
    try:
        reply = _upstream_reply(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        raise ValueError("not a JSON-RPC reply") from exc
    if bytes(reply.id) != b"%d" % id:
        raise ValueError("a reply to another call")
    has_error = bool(reply.error) and reply.error != NULL
    if has_error == bool(reply.result):
        raise ValueError("neither result nor error, or both")
    if not has_error:
        reply.error = msgspec.Raw()
    return reply
