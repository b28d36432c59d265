"""Calls that can never be verified, as far as their params and the configuration say. No retry helps, so they are refused."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from proxy.core.verification import Verification
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.networks import Route
from proxy.wire.upstream import Upstream

# Asked of other upstreams, to confirm the block that a proof starts from.
CONFIRMS = "eth_getBlockByNumber"


def why_never(route: Route, policy: MethodPolicy, params: bytes, how: Verification) -> str:
    """Why the call can never be verified; empty if it may be."""
    return _without_quorum(route, policy, how) if how.kind == "quorum" else _without_proof(route, policy, params)


def offering(route: Route, methods: Collection[str]) -> Sequence[Upstream]:
    """The upstreams that are configured to serve all of these methods."""
    if not all(method in route.policies for method in methods):
        return ()
    return [each for each in route.upstreams if all(map(each.health.may_serve, methods))]


def _without_quorum(route: Route, policy: MethodPolicy, how: Verification) -> str:
    count, method = len(offering(route, (policy.method.name,))), policy.method.name
    if count >= how.needed:
        return ""
    return f"it needs {how.needed} upstreams, and {route.network.id} has {count} with {method}"


def _without_proof(route: Route, policy: MethodPolicy, params: bytes) -> str:
    method, prover = policy.method.name, policy.family.prover
    if prover is None or not prover.covers(method):
        return "the chain's hashes do not prove replies of this method"
    needs = prover.needs(method)
    if not offering(route, needs):
        return f"no upstream of {route.network.id} has {' and '.join(needs)}, which the proof needs"
    if len(route.upstreams) > 1 and len(offering(route, (CONFIRMS,))) < 2:
        return f"{route.network.id} has no second upstream with {CONFIRMS}, which confirms the block"
    return prover.why_not(method, msgspec.json.decode(params))
