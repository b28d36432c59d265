"""What a call asks to listen to: its params, read strictly. What is wrong with them is said by the name of the member."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.chains.evm import log_filter
from proxy.core import jsonrpc
from proxy.services.feed.topics import Topic
from proxy.services.rpc.calls import RpcError

_HEADS, _LOGS, _PENDING, _SYNCING = "newHeads", "logs", "newPendingTransactions", "syncing"
_EVM_KINDS = (_HEADS, _LOGS, _PENDING, _SYNCING)
# All kinds of that family have one price and one count.
SVM = "svm"
_decode = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class SubscriptionRequest:
    """What a call asks for: a topic, and the block to begin with where it names one."""

    topic: Topic
    from_block: int | None
    kind: str
    # The method of its notifications.
    notice: bytes


def read_wish(method: str, params: bytes) -> SubscriptionRequest:
    """What a call of a subscribing method asks for; RpcError says what is wrong with it."""
    try:
        given = _decode(params)
        if not isinstance(given, list):
            raise ValueError('member "params" must be an array')
        if method != "eth_subscribe":
            return _svm_wish(method, given)
        return _evm_wish(given)
    except (ValueError, msgspec.DecodeError, RecursionError) as exc:
        raise RpcError(jsonrpc.error(jsonrpc.INVALID_PARAMS, f"{method}: {exc}")) from None


def _svm_wish(method: str, given: list[Any]) -> SubscriptionRequest:
    notice = method.removesuffix("Subscribe").encode() + b"Notification"
    return SubscriptionRequest(Topic(method, msgspec.json.encode(given, order="deterministic")), None, SVM, notice)


def _evm_wish(given: list[Any]) -> SubscriptionRequest:
    kind = given[0] if given else None
    option = given[1] if len(given) > 1 else None
    if kind not in _EVM_KINDS:
        raise ValueError(f"the first param must be one of {', '.join(_EVM_KINDS)}")
    if len(given) > 2:
        raise ValueError(f"{kind} takes one option at the most")
    from_block = None
    match kind:
        case "logs":
            topic = Topic(_LOGS, log_filter.parse(option))
            from_block = log_filter.read_cursor(option.get("fromBlock")) if option else None
        case "newHeads":
            topic = Topic(_HEADS)
            from_block = log_filter.read_cursor(_only_cursor(option))
        case "newPendingTransactions":
            topic = Topic(_PENDING, _is_full(option))
        case _:
            if option is not None:
                raise ValueError("syncing takes no option")
            topic = Topic(_SYNCING)
    return SubscriptionRequest(topic, from_block, kind, b"eth_subscription")


def _only_cursor(option: Any) -> Any:
    if option is None:
        return None
    if not isinstance(option, dict) or set(option) - {"fromBlock"}:
        raise ValueError('the option of newHeads must be an object with the member "fromBlock"')
    return option.get("fromBlock")


def _is_full(option: Any) -> bool:
    """Nodes take `true`; some take an object that says the same."""
    if isinstance(option, dict) and not set(option) - {"includeTransactions", "hashesOnly"}:
        return bool(option.get("includeTransactions", not option.get("hashesOnly", True)))
    if option is None or isinstance(option, bool):
        return bool(option)
    raise ValueError(
        "the option of newPendingTransactions must be true or false: whether whole transactions are wanted"
    )


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
