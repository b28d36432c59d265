"""Checks whether a key may make a call, before it is charged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from proxy.chains.families import family_of
from proxy.core import jsonrpc
from proxy.core.access import Key
from proxy.core.jsonrpc import RawCall
from proxy.core.near_names import near_names
from proxy.errors import Fault
from proxy.services.accounts.admission import missing_scope
from proxy.services.rpc.flights import Caller
from proxy.services.rpc.method_policy import MethodPolicy, unknown_called
from proxy.services.rpc.networks import Route


class SubscriptionCalls(Protocol):
    """Answers the calls that start and end subscriptions, for callers with a socket."""

    def subscribe(self, caller: Caller, policy: MethodPolicy, params: bytes) -> None: ...


def check_call(
    caller: Caller, route: Route, key: Key, call: RawCall, subscriber: SubscriptionCalls | None = None
) -> MethodPolicy | bytes | Fault:
    """The policy of the call's method; or a JSON-RPC error or a fault if the key may not make this call."""
    policy = route.policies.get(call[0])
    if policy is None:
        caller.on_checked(unknown_called(route.unknown, call[0]))
        return _no_method(route, call[0])
    caller.on_checked(policy)
    if not key.scopes & policy.scope:
        return missing_scope(policy.scope)
    if key.restrictions is not None and (refusal := key.restrictions.method_refusal(call[0])) is not None:
        return refusal
    if policy.method.kind == "subscription" and subscriber is None:
        return jsonrpc.error(jsonrpc.METHOD_NOT_FOUND, f"the method {call[0]} needs a WebSocket")
    if policy.is_checked and route.guard is not None and (error := route.guard.fault_of(policy, call[1])) is not None:
        return error
    if key.restrictions is not None and key.restrictions.limits_contracts:
        return key.restrictions.contract_refusal(_contracts(route, policy, call[1])) or policy
    return policy


def _contracts(route: Route, policy: MethodPolicy, params: bytes) -> Sequence[str] | None:
    """The contracts that the call reaches; None if it may reach any."""
    if policy.is_checked and route.guard is not None:
        return route.guard.contracts_of(policy, params)
    return policy.family.contracts(policy.method, params)


def _no_method(route: Route, name: str) -> bytes:
    if reason := family_of(route.network).refused.get(name):
        return jsonrpc.error(jsonrpc.METHOD_NOT_FOUND, f"the method {name} is not available: {reason}")
    nearest = near_names(frozenset(route.policies)).nearest(name)
    advice = f"; did you mean {nearest}?" if nearest else ""
    return jsonrpc.error(jsonrpc.METHOD_NOT_FOUND, f"the method {name} does not exist or is not available{advice}")
