"""The policies of a bundler's methods."""

from __future__ import annotations

from collections.abc import Callable

from proxy.chains.evm.bundler_methods import BUNDLER, BY_HASH, ESTIMATE, RECEIPT, SEND
from proxy.chains.family import Method, MethodTable
from proxy.chains.registry import Network
from proxy.core import access
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.telemetry import Tally

# A key that may send operations, or read the chain, may also read operations.
ANY_SCOPE = access.SCOPE_BIT["bundler:send"] | access.SCOPE_BIT["rpc:read"]


def policies_of(network: Network, methods: MethodTable, tally: Callable[[str, str], Tally]) -> dict[str, MethodPolicy]:
    policies = {}
    for name, method in methods.items():
        policy = policies[name] = MethodPolicy(method, BUNDLER, tally(network.id, name))
        policy.is_checked = name in (SEND, ESTIMATE)
        policy.looks_up_null = name in (BY_HASH, RECEIPT)
    return policies


def unknown_of(network: Network, tally: Callable[[str, str], Tally]) -> MethodPolicy:
    return MethodPolicy(Method("other"), BUNDLER, tally(network.id, "other"))
