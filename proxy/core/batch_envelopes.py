"""Reading a short batch in one pass. Most batches are short, and their calls are valid and of the usual form."""

from __future__ import annotations

from typing import Final

from proxy.core import jsonrpc
from proxy.core.jsonrpc import ID_STARTS, MAX_DEPTH, MAX_ID_BYTES, MAX_METHOD, MalformedCall, RawCall, checked

# A batch within these bounds is parsed at once, which takes a fraction of a millisecond.
SHORT_BATCH_BYTES: Final = 16_384
SHORT_BATCH_ITEMS: Final = 100

_ARRAY: Final = ord("[")
_ID_STARTS: Final = ID_STARTS
_AROUND: Final[int] = jsonrpc.AROUND
_LEAST_REPEAT: Final[int] = jsonrpc.LEAST_REPEAT
_MAX_ID: Final[int] = MAX_ID_BYTES
_MAX_METHOD: Final[int] = MAX_METHOD
_MAX_DEPTH: Final[int] = MAX_DEPTH
_read: Final = jsonrpc.read_envelopes
_NOT_CALLS: Final = (*jsonrpc.NOT_JSON, MalformedCall)


def parse_short_batch(body: bytes) -> list[RawCall] | None:
    """All calls of a short batch in which each is valid. None: read it item by item, with a `BatchReader`."""
    if len(body) > SHORT_BATCH_BYTES:
        return None
    try:
        is_ascii = body.isascii()
        if not is_ascii:
            body.decode()
        # In an ASCII body without escapes, every string is ASCII too.
        has_ascii_text = is_ascii and b"\\" not in body
        envelopes = _read(body)
        if not 0 < len(envelopes) <= SHORT_BATCH_ITEMS:
            return None
        calls: list[RawCall] = []
        parts, are_usual = 0, True
        for envelope in envelopes:
            method, params, call_id = envelope.method, bytes(envelope.params), bytes(envelope.id)
            if (
                params
                and params[0] == _ARRAY
                and len(params) <= _MAX_DEPTH
                and call_id
                and call_id[0] in _ID_STARTS
                and len(call_id) <= _MAX_ID
                and 0 < len(method) <= _MAX_METHOD
                and (has_ascii_text or method.isascii())
            ):
                calls.append((method, params, call_id))
                parts += len(method) + len(params) + len(call_id)
            else:
                calls.append(checked(envelope))
                are_usual = False
    except _NOT_CALLS:
        return None
    # The bytes of four members per call, a comma or bracket after each call and one more bracket. If the body is hardly longer,
    # it has no room for a repeated member.
    if are_usual and len(body) - parts - len(calls) * (_AROUND + 1) - 1 < _LEAST_REPEAT:
        return calls
    return None if jsonrpc.batch_may_repeat(body, envelopes) else calls
