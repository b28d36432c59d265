"""The params of a subscription call, read strictly. Errors name the member that is wrong."""

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
    """A topic, and the block to start a replay from, if the call names one."""

    topic: Topic
    from_block: int | None
    kind: str
    # The method of its notifications.
    notification: bytes
    numeric_id: bool = False
    # See `SubscriptionRules`.
    echoes_id: bool = False


def read_request(family: Family, method: str, params: bytes) -> SubscriptionRequest:
    """Read the params of a subscribe method. Raises RpcError if they are not valid."""
    rules = family.subscriptions
    assert rules is not None  # only families with subscriptions have such methods
    try:
        given = _decode(params)
        if not isinstance(given, list) and not (rules.echoes_ids and isinstance(given, dict)):
            raise ValueError('member "params" must be an array')
        wanted = rules.read(method, given)
    except (ValueError, msgspec.DecodeError, RecursionError) as exc:
        raise RpcError(jsonrpc.error(jsonrpc.INVALID_PARAMS, f"{method}: {exc}")) from None
    topic = Topic(wanted.topic, wanted.detail)
    ids = rules.numeric_ids, rules.echoes_ids
    return SubscriptionRequest(topic, wanted.from_block, wanted.event, wanted.notification, *ids)


def read_id(params: bytes) -> bytes:
    """The subscription id of an unsubscribe call, as JSON; empty if the params contain none."""
    try:
        given = _decode(params)
    except (msgspec.DecodeError, RecursionError):
        return b""
    if not isinstance(given, list) or len(given) != 1 or isinstance(given[0], bool):
        return b""
    if isinstance(given[0], int):
        return b"%d" % given[0]
    return b'"%b"' % given[0].encode() if isinstance(given[0], str) and given[0].isascii() else b""
