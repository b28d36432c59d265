"""Calls that can never be verified get a 400 with the reason. Those that may be verified later get a 503 with `Retry-After`."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core import jsonrpc
from proxy.settings.crosschecks import network_faults
from tests.http_client import rpc
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.shipped_tables import TABLES
from tests.sockets import bare
from tests.web.worker import on_uvloop

ADDRESS, HASH = "0x" + "11" * 20, "0x" + "22" * 32
UpstreamOptions = list[dict[str, Any]]
# X-Verify, a call, and a part of the reason.
NEVER: list[tuple[str, str, list[Any], str]] = [
    ("proof", "eth_gasPrice", [], "the chain's hashes do not prove replies of this method"),
    ("proof", "eth_call", [{"to": ADDRESS}, "latest"], "do not prove replies of this method"),
    ("proof", "eth_getBalance", [ADDRESS, "pending"], "pending blocks cannot be proven"),
    ("proof", "eth_getBalance", [ADDRESS, {"blockNumber": "pending"}], "pending blocks cannot be proven"),
    ("proof", "eth_getTransactionCount", [ADDRESS, "pending"], "pending blocks cannot be proven"),
    ("proof", "eth_getBlockByNumber", ["pending", False], "pending blocks cannot be proven"),
    ("proof", "eth_getLogs", [{"fromBlock": "0x1", "toBlock": "pending"}], "pending blocks cannot be proven"),
    ("proof", "eth_getLogs", [{"fromBlock": "0x1", "toBlock": "0x1000"}], "logs of at most 200 blocks"),
    ("proof", "eth_getLogs", [{"fromBlock": "earliest"}], "logs of at most 200 blocks"),
    ("proof", "eth_getLogs", [{"blockHash": HASH, "toBlock": "0x1"}], "no fromBlock or toBlock"),
    ("proof", "eth_getLogs", [{"address": "0x12"}], "'0x12' is not an address"),
    ("proof", "eth_getLogs", [{"topics": [["0x12"]]}], "'0x12' is not a topic"),
    ("proof", "eth_getLogs", [], "a filter object"),
    ("proof", "eth_getBalance", ["nonsense", "latest"], "'nonsense' is not an address"),
    ("proof", "eth_getBalance", [ADDRESS, "newest"], "'newest' names no block"),
    ("proof", "eth_getBalance", [ADDRESS, {"blockHash": "0x1"}], "'0x1' is not a hash"),
    ("proof", "eth_getStorageAt", [ADDRESS, "nonsense"], "'nonsense' is not a storage slot"),
    ("proof", "eth_getBlockByHash", ["0x1", False], "'0x1' is not a hash"),
    ("proof", "eth_getBlockByNumber", [], "None names no block"),
    ("proof", "eth_getTransactionReceipt", [{"a": "b" * 99}], "is not a hash"),
    ("quorum 4/5", "eth_getBalance", [ADDRESS, "latest"], "needs upstreams of 4 operators, and ethereum/mainnet has 3"),
]
# The scripted chain has no valid hashes, so nothing of it can be proven; but it might change.
LATER: list[tuple[str, str, list[Any], str]] = [
    ("proof", "eth_getBalance", [ADDRESS, "latest"], "not verified"),
    ("proof", "eth_getBlockByNumber", ["0xffffffff", False], "the upstream does not have the block"),
    ("proof", "eth_getTransactionReceipt", [HASH], "not verified"),
]


async def over_http(harness: RpcHarness, verify: str, method: str, params: list[Any]) -> tuple[int, str | None, str]:
    reply = await harness.call(method, params, X_Verify=verify)
    return reply.status, reply.headers.get("retry-after"), reply.json["error"]["message"]


def asked_upstreams(harness: RpcHarness) -> list[str]:
    """The methods that upstreams were asked, besides those of the tracker."""
    found = {method for each in harness.upstreams for method in each.counts}
    return sorted(found - {"eth_chainId", "eth_blockNumber", "eth_getBlockByNumber"})


async def in_a_batch(harness: RpcHarness, verify: str, method: str, params: list[Any]) -> dict[str, Any]:
    found, _ = (await harness.batch((method, params), ("eth_chainId", []), X_Verify=verify)).json
    return dict(found["error"])


async def on_a_socket(harness: RpcHarness, verify: str, method: str, params: list[Any]) -> dict[str, Any]:
    async with bare(harness.worker, network=harness.network, X_Verify=verify) as socket:
        socket.write(rpc(method, params))
        return dict((await socket.json())["error"])


@on_uvloop
async def test_call_that_can_never_be_verified_is_refused_with_the_reason() -> None:
    async with rpc_harness(3) as harness:
        for verify, method, params, reason in NEVER:
            status, later, message = await over_http(harness, verify, method, params)
            assert (status, later) == (400, None), (method, params, message)
            assert message.startswith(f"{method} cannot be verified by {verify}: "), message
            assert reason in message
            for asked in (in_a_batch, on_a_socket):
                error = await asked(harness, verify, method, params)
                assert error == {"code": jsonrpc.INVALID_REQUEST, "message": message}
        assert not asked_upstreams(harness)
        assert harness.states == ["up"] * 3


@on_uvloop
async def test_call_that_may_be_verified_later_says_when_to_retry() -> None:
    async with rpc_harness(3) as harness:
        for verify, method, params, reason in LATER:
            status, later, message = await over_http(harness, verify, method, params)
            assert (status, later) == (503, "1"), (method, params, message)
            assert reason in message
            for asked in (in_a_batch, on_a_socket):
                error = await asked(harness, verify, method, params)
                assert (error["code"], error["data"]) == (jsonrpc.INTERNAL_ERROR, {"retryAfter": 1})
        for upstream in harness.route.upstreams[:2]:
            upstream.health.cordon(cordoned=True, now=0.0)
        status, later, message = await over_http(harness, "quorum 2/3", "eth_getBalance", [ADDRESS, "latest"])
        assert (status, later) == (503, "1"), message
        error = await in_a_batch(harness, "quorum 2/3", "eth_getBalance", [ADDRESS, "latest"])
        assert error["data"] == {"retryAfter": 1}


@pytest.mark.parametrize(
    ("options", "verify", "method", "reason"),
    [
        ([{"deny": ["eth_getProof"]}] * 3, "proof", "eth_getBalance", "has eth_getProof"),
        ([{"deny": ["eth_getCode"]}] * 3, "proof", "eth_getCode", "eth_getCode"),
        ([{"deny": ["eth_getBlockByNumber"]}] * 2, "proof", "eth_getBalance", "no upstream of a second operator"),
        ([{"deny": ["eth_getBalance"]}] * 2, "quorum 2/3", "eth_getBalance", "has 1 with eth_getBalance"),
        ([{"operator": "a"}] * 3, "quorum 2/3", "eth_getBalance", "has 1 with eth_getBalance"),
        ([{"operator": ""}] * 3, "quorum 2/3", "eth_getBalance", "has 1 with eth_getBalance"),
        ([{"operator": "a"}] * 3, "proof", "eth_getBalance", "no upstream of a second operator"),
        (
            [{"operator": "a", "deny": ["eth_getBalance"]}, *[{"operator": "b"}] * 2],
            "quorum 2/2",
            "eth_getBalance",
            "has 1",
        ),
    ],
    ids=["proofs", "code", "blocks", "quorum", "one operator", "one host", "proof of one", "one left"],
)
def test_methods_that_upstreams_are_not_configured_for_verify_nothing(
    options: UpstreamOptions, verify: str, method: str, reason: str
) -> None:
    @on_uvloop
    async def check() -> None:
        async with rpc_harness(3, options=options) as harness:
            status, later, message = await over_http(harness, verify, method, [ADDRESS, "latest"])
            assert (status, later) == (400, None), message
            assert reason in message
            assert not asked_upstreams(harness)

    check()


@on_uvloop
async def test_proof_asks_only_upstreams_that_are_configured_for_it() -> None:
    """One upstream gives the proof, and another, which may not, confirms its block."""
    options: UpstreamOptions = [{"deny": ["eth_getProof", "eth_getBalance"]}, {}]
    async with rpc_harness(2, options=options) as harness:
        assert (await over_http(harness, "proof", "eth_getBalance", [ADDRESS, "latest"]))[0] == 503
        assert not {*options[0]["deny"]} & {*harness.upstreams[0].counts}


def test_operator_cannot_ask_for_proofs_that_do_not_exist() -> None:
    rule = {"network": "ethereum/mainnet", "methods": ["eth_gasPrice"], "by": "proof"}
    (found,) = network_faults({"verify": [rule]}, TABLES)
    assert found.startswith("verify.0.methods: eth_gasPrice cannot be verified by proof"), found


@on_uvloop
async def test_upstream_that_fails_does_not_vote_with_the_reply_of_another() -> None:
    """A call for one upstream is repeated there or nowhere."""

    def fail(params: list[Any]) -> None:
        raise RuntimeError("broken")

    async with rpc_harness(2, options=[{"operator": "a"}, {"operator": "b"}]) as harness:
        harness.upstreams[1].answers["eth_getBalance"] = fail
        for _ in range(4):
            reply = await harness.call("eth_getBalance", [ADDRESS, "latest"], X_Verify="quorum 2/2")
            assert reply.status == 503, reply
            assert "fewer than 2 of 2 operators agree" in reply.json["error"]["message"]
        assert harness.upstreams[0].count("eth_getBalance") == 4
