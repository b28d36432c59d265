"""The policies of a bundler's methods: their prices and scopes."""

from __future__ import annotations

from collections.abc import Callable

from proxy.chains.evm.bundler_methods import BUNDLER, BY_HASH, ESTIMATE, RECEIPT, SEND
from proxy.chains.family import Method
from proxy.chains.registry import Network
from proxy.core import access
from proxy.core.pricing import UnitPrices
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.telemetry import Tally

SENDING = access.SCOPE_BIT["bundler:send"]
# A key that may send operations, or read the chain, may also read operations.
READING = SENDING | access.SCOPE_BIT["rpc:read"]
ANY_SCOPE = READING


def policies_of(network: Network, prices: UnitPrices, tally: Callable[[str, str], Tally]) -> dict[str, MethodPolicy]:
    policies = {}
    for name, method in BUNDLER.methods.items():
        scope = SENDING if method.kind == "write" else READING
        policy = policies[name] = MethodPolicy(
            method, BUNDLER, prices.bundler[name], tally(network.id, name), scope=scope
        )
        policy.is_checked = name in (SEND, ESTIMATE)
        policy.looks_up_null = name in (BY_HASH, RECEIPT)
    return policies


def unknown_of(network: Network, tally: Callable[[str, str], Tally]) -> MethodPolicy:
    return MethodPolicy(Method("other"), BUNDLER, 0, tally(network.id, "other"))
