"""What a call asks to listen to: its params, read strictly. What is wrong with them is said by the name of the member."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from proxy.chains.family import Family
from proxy.core import jsonrpc
from proxy.services.feed.topics import Topic
from proxy.services.rpc.calls import RpcError

_decode = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class SubscriptionRequest:
    """What a call asks for: a topic, and the block to begin with where it names one."""

    topic: Topic
    from_block: int | None
    kind: str
    # The method of its notifications.
    notice: bytes
    numeric_id: bool = False


def read_wish(family: Family, method: str, params: bytes) -> SubscriptionRequest:
    """What a call of a subscribing method asks for; RpcError says what is wrong with it."""
    rules = family.subscriptions
    assert rules is not None  # a family that has methods which subscribe
    try:
        given = _decode(params)
        if not isinstance(given, list):
            raise ValueError('member "params" must be an array')
        found = rules.read(method, given)
    except (ValueError, msgspec.DecodeError, RecursionError) as exc:
        raise RpcError(jsonrpc.error(jsonrpc.INVALID_PARAMS, f"{method}: {exc}")) from None
    topic = Topic(found.topic, found.detail)
    return SubscriptionRequest(topic, found.from_block, found.event, found.notification, rules.numeric_ids)


def read_id(params: bytes) -> bytes:
    """The id that a call ends, as it is written; empty where it gives none."""
    try:
        given = _decode(params)
    except (msgspec.DecodeError, RecursionError):
        return b""
    if not isinstance(given, list) or len(given) != 1 or isinstance(given[0], bool):
        return b""
    if isinstance(given[0], int):
        return b"%d" % given[0]
    return b'"%b"' % given[0].encode() if isinstance(given[0], str) and given[0].isascii() else b""
