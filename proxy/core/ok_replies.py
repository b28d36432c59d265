"""Replies in the envelope of TON's servers: `{"ok": true, "result": …}`, or `{"ok": false, "error": text, "code": number}`.

Some of these servers send the id of the call as well, others do not.
"""

from __future__ import annotations

from typing import Final

import msgspec

from proxy.core.jsonrpc import NOT_JSON, error_reply, result_reply

NOT_A_REPLY: Final = b"the reply is not JSON"
_LONGEST_MESSAGE: Final = 1000


class _Reply(msgspec.Struct):
    ok: bool
    result: msgspec.Raw = msgspec.Raw()
    error: str = ""
    code: int = 0


_reply = msgspec.json.Decoder(_Reply).decode


def as_jsonrpc(id: bytes, status: int, body: bytes) -> bytes:  # noqa: A002
    """The reply of JSON-RPC to the call with this id. A body that is none of both kinds makes it invalid."""
    try:
        if not body.isascii():
            body.decode()
        reply = _reply(body)
    except NOT_JSON:
        # A gateway before the server may have written it.
        return NOT_A_REPLY if status < 400 else _error(id, status, f"status {status}")
    if reply.ok:
        return result_reply(id, reply.result) if reply.result else NOT_A_REPLY
    return _error(id, reply.code or status, reply.error[:_LONGEST_MESSAGE])


def _error(id: bytes, code: int, message: str) -> bytes:  # noqa: A002
    return error_reply(id, b'{"code":%d,"message":%b}' % (code, msgspec.json.encode(message)))
