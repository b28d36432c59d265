"""Errors of geth reach callers as geth wrote them, however many nodes are asked before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.real_harness import ADDRESS, BASE, RealHarness, real_harness
from tests.real_nodes import RealNode, geth_nodes
from tests.web.worker import on_uvloop

# So far beyond the head that no node is about to have it.
FUTURE = "0xffffff"
ABSENT = "0x" + "ab" * 32
SIMULATED = {"blockStateCalls": [{"calls": [{"from": ADDRESS, "to": ADDRESS}]}]}
# The code that deploys a contract which returns nothing and reverts.
REVERTS = "0x60006000fd"

CALLS: list[tuple[str, list[Any]]] = [
    ("eth_simulateV1", [SIMULATED, FUTURE]),
    ("eth_simulateV1", [SIMULATED, {"blockHash": ABSENT}]),
    ("eth_simulateV1", [{"blockStateCalls": []}, "latest"]),
    ("debug_traceTransaction", [ABSENT]),
    ("debug_traceBlockByNumber", [FUTURE]),
    ("debug_traceBlockByHash", [ABSENT]),
    ("debug_traceCall", [{"to": ADDRESS}, FUTURE]),
    ("eth_getLogs", [{"fromBlock": FUTURE, "toBlock": FUTURE}]),
    ("eth_getLogs", [{"fromBlock": "0x1", "toBlock": hex(len(BASE) + 5)}]),
    ("eth_getLogs", [{"fromBlock": "0x5", "toBlock": "0x2"}]),
    ("eth_getLogs", [{"blockHash": ABSENT}]),
    ("eth_call", [{"to": ADDRESS}, FUTURE]),
    ("eth_call", [{"to": ADDRESS}, {"blockHash": ABSENT}]),
    ("eth_call", [{"data": REVERTS}, "latest"]),
    ("eth_getBalance", [ADDRESS, FUTURE]),
    ("eth_getProof", [ADDRESS, [], FUTURE]),
    ("eth_estimateGas", [{"data": REVERTS}]),
    ("eth_sendRawTransaction", ["0x01"]),
    ("eth_getBalance", ["0x01", "latest"]),
]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealNode]]:
    with geth_nodes(4, tmp_path_factory.mktemp("nodes")) as found:
        yield found


async def shown(harness: RealHarness, method: str, params: list[Any]) -> Any:
    reply = (await harness.call(method, params)).json
    return reply.get("error", reply)


@pytest.mark.parametrize("count", [1, 2, 4])
@on_uvloop
async def test_error_has_the_code_that_geth_gave_it(nodes: list[RealNode], count: int) -> None:
    async with real_harness(nodes[:count]) as harness:
        for method, params in CALLS:
            expected = (await nodes[0].reply(method, params))["error"]
            for _ in range(3):
                assert await shown(harness, method, params) == expected, (method, params)


@pytest.mark.parametrize("count", [1, 2, 4])
@on_uvloop
async def test_method_that_no_geth_has_does_not_exist(nodes: list[RealNode], count: int) -> None:
    async with real_harness(nodes[:count]) as harness:
        for _ in range(3):
            for method in ("trace_block", "eth_noSuchThing"):
                assert (await shown(harness, method, ["0x1"]))["code"] == -32601
        # One of them is out of use.
        await harness.proxies[-1].switch("reset")
        for _ in range(3):
            assert count == 1 or (await shown(harness, "trace_block", ["0x1"]))["code"] == -32601
