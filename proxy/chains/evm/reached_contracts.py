"""The contracts that a call reaches, as its params name them, for keys that are limited to some contracts.

Addresses are in lower case. None means that the call may reach any contract: it names none where it should, creates one, sets
code for the time of the call, or cannot be read. Params are forwarded as the client wrote them, and nodes differ over repeated
members: Go's parser ignores case and keeps the last one. So an object in which two names differ at most in case is not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from proxy.chains.evm import transactions
from proxy.chains.evm.paymaster import inner_calls
from proxy.chains.evm.subscription_params import KINDS, LOGS
from proxy.chains.evm.user_operation import UserOperation
from proxy.chains.family import Method

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{40}", re.ASCII)
# State overrides that let a call reach no other code. With `code` or `state`, an allowed contract could be made to call any.
_HARMLESS = frozenset({"balance", "nonce"})
# Reading this many takes up to a millisecond.
_MOST_OBJECTS, _MOST_VALUES = 1_000, 10_000
# The index of the state overrides in the params of a call.
_OVERRIDES = 2


def of_call(method: Method, params: bytes) -> Sequence[str] | None:
    """The contracts that a JSON-RPC call reaches; see `Method.contract`."""
    if method.contract == "none":
        return ()
    if method.contract == "transaction":
        return transactions.targets_of_sent(params)
    items = _read(params)
    if items is None:
        return None
    match method.contract:
        case "address":
            return _addresses(items[:1])
        case "to":
            return _of_message(items)
        case "filter":
            return _of_filter(items[:1])
        case "subscription" if items[:1] == [LOGS]:
            return _of_filter(items[1:2])
        case "subscription" if items and items[0] in KINDS:
            return ()
        case _:
            return None


def of_operation(operation: UserOperation, overrides: bytes = b"") -> Sequence[str] | None:
    """The contracts that an operation reaches: those that its account calls, the factory, and the account's new delegate."""
    calls = inner_calls(operation.call_data) if operation.call_data else ()
    if calls is None or (overrides and not _are_harmless(_read(overrides))):
        return None
    others = (operation.factory, operation.delegate)
    return [f"0x{each.hex()}" for each in (*(call.target for call in calls), *others) if each]


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = {name.casefold() for name, _ in pairs}
    if len(names) < len(pairs):
        raise ValueError("a member is repeated")
    return dict(pairs)


def _read(params: bytes) -> Any:
    """The JSON value; None, which is never harmless, if it is not valid or takes too long to read."""
    if params.count(b"{") > _MOST_OBJECTS or params.count(b",") > _MOST_VALUES:
        return None
    try:
        return json.loads(params, object_pairs_hook=_members)
    except (ValueError, RecursionError):
        return None


def _addresses(items: list[Any]) -> list[str] | None:
    """The addresses, or None if there are none or one is not an address."""
    if not items or not all(isinstance(each, str) and _ADDRESS.fullmatch(each) for each in items):
        return None
    return [each.lower() for each in items]


def _of_message(items: list[Any]) -> list[str] | None:
    message = items[0] if items else None
    if not isinstance(message, dict) or any(name.casefold() == "authorizationlist" for name in message):
        return None
    overrides = items[_OVERRIDES] if len(items) > _OVERRIDES else None
    if overrides is not None and not _are_harmless(overrides):
        return None
    return _addresses([message.get("to")])


def _are_harmless(overrides: Any) -> bool:
    return isinstance(overrides, dict) and all(
        isinstance(each, dict) and _HARMLESS.issuperset(each) for each in overrides.values()
    )


def _of_filter(items: list[Any]) -> list[str] | None:
    if not items or not isinstance(items[0], dict):
        return None
    named = items[0].get("address")
    return _addresses(named if isinstance(named, list) else [named])
