"""Which calls may take the short path, by the text of their envelope."""

from __future__ import annotations

from typing import Final

from proxy.core import jsonrpc
from proxy.core.jsonrpc import MAX_DEPTH, Envelope
from proxy.core.nesting import is_deeper
from proxy.services.rpc.method_policy import MethodPolicy

# JSON-RPC ids longer than this take the long path, which has their limit.
LONGEST_ID: Final = 64
_ARRAY: Final = ord("[")
_ID_STARTS: Final = jsonrpc.ID_STARTS
_COMPACT: Final[int] = jsonrpc.COMPACT
_repeats_members: Final = jsonrpc.repeats_members


def is_short(policy: MethodPolicy, envelope: Envelope, params: bytes, call_id: bytes, body: bytes) -> bool:
    """Whether the call is certainly valid, and about the newest block if about any. All others take the long path, which has
    all checks. `params` and `call_id` are those of the envelope, which was read from `body`."""
    return not (
        not params
        or params[0] != _ARRAY
        or not call_id
        or call_id[0] not in _ID_STARTS
        or len(call_id) > LONGEST_ID
        or (
            policy.has_block
            and (params[1] != policy.opens or params.partition(policy.before_latest)[2] != policy.latest)
            and not policy.is_latest(params)
        )
        or not body.isascii()
        or (len(body) - len(params) - len(call_id) - len(envelope.method) > _COMPACT and _repeats_members(body))
        or (len(params) > MAX_DEPTH and is_deeper(params, MAX_DEPTH))
    )
