"""Hostile results of upstreams for each request that a client can send: none of them fails inside the service.

A request whose upstream sends rubbish may get the rubbish (it asked for that upstream's words) or an error that names the
upstream. It never gets a 500, and nothing is logged with a traceback. The values are those of `test_hostile_rows.py`.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.web.api_spec import ApiOperation
from tests.chains.test_asset_changes import result
from tests.costs import cells
from tests.costs.cells import EVM, SVM, Request, Seeds
from tests.costs.deep_upstream import HEAD
from tests.costs.driver import FAST
from tests.costs.hostile_inputs import topic
from tests.costs.service import CostService, FreeAccount, running_service
from tests.database import MIGRATED, Server
from tests.http_client import Reply, request
from tests.isolation.test_hostile_replies import PLAIN, spoiled
from tests.isolation.test_hostile_rows import ROWS, SEED
from tests.rpc_upstreams import Refused
from tests.service import until
from tests.services.test_gas_prices import history
from tests.web.worker import ChunkedClient

# How often each request is sent: with other hostile values each time.
TIMES = max(6, ROWS // 20)
# One result in so many is as it should be, so that later calls of a request are reached.
GOOD = 3
# One in so many is an error.
REFUSED = 8
TO, FROM = "0x" + "22" * 20, "0x" + "33" * 20
pytestmark = pytest.mark.timeout(600.0 + 3 * ROWS)


@dataclass
class Spoiler:
    """Spoils two results of three; some are refused like methods that a node does not have."""

    chance: random.Random

    def __call__(self, value: Any) -> Any:
        if not self.chance.randrange(GOOD):
            return value
        if not self.chance.randrange(REFUSED):
            raise Refused(-32601, "the method does not exist")
        plain = orjson.loads(value.contents) if isinstance(value, orjson.Fragment) else value
        return spoiled(self.chance, plain, PLAIN)


@pytest.fixture
async def service(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CostService]:
    monkeypatch.delenv("PENSTOCK_HOSTILE_ROWS", raising=False)  # no setting of the service
    name = await server.create(MIGRATED)
    async with running_service(server.url(name), tmp_path) as found:
        yield found
    await server.drop(name)


def good_requests(seeds: Seeds) -> Iterator[Request]:
    """A valid request of each operation, kind of method and method of our own, and some with directives."""
    for operation in cells.SPEC.operations.values():
        is_ours = operation.session is None and operation.id not in cells.BY_METHOD
        if is_ours and operation.method != "DELETE":
            yield from _of_operation(operation, seeds)
    for row in cells.rows():
        if row.caller == "key" and " " in row.name and row.name != "batches":
            yield from (each for each in row.requests(seeds) if each.shape == "sample" or each.is_dear)
    reads: Mapping[str, list[Any]] = {
        "eth_getBalance": [TO, "latest"],
        "eth_call": [{"to": TO, "data": "0x"}, "latest"],
        "eth_getBlockByNumber": ["0x10", True],
        "eth_getTransactionReceipt": [topic(1)],
        "eth_getLogs": [{"fromBlock": hex(HEAD - 5), "toBlock": hex(HEAD - 1)}],
        "eth_getStorageAt": [TO, "0x0", "latest"],
    }
    for verify in ("1/1", "proof"):
        for method, params in reads.items():
            yield _call(EVM, method, params, X_Verify=verify)
    sent = ["0x" + "ab" * 100]
    yield _call(EVM, "eth_sendRawTransaction", sent)
    yield _call(EVM, "eth_sendRawTransaction", sent, X_Retry="2")
    yield _call(SVM, "getBalance", ["11111111111111111111111111111111"])


def _of_operation(operation: ApiOperation, seeds: Seeds) -> Iterator[Request]:
    spec = cells.DOCUMENT["paths"][operation.path][operation.method.lower()]
    for found in cells.operation_requests(operation, seeds):
        if found.shape in ("plain", "all parameters"):
            yield found
        elif "requestBody" in spec:
            schema = cells.INPUTS.resolved(spec["requestBody"])["content"]["application/json"]["schema"]
            sample = cells.INPUTS.sample(schema)
            if "policy_id" in sample:
                sample["policy_id"] = seeds["policies"]
            yield replace(found, shape="sample", body=orjson.dumps(sample))
            return


def _call(network: str, method: str, params: list[Any], **headers: str) -> Request:
    body = orjson.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
    return Request("sample", "POST", f"/v1/rpc/{network}", body, headers=headers)


def good_results(service: CostService) -> None:
    """Give the upstream results that requests can use, where the stub has none."""
    service.evm.answers |= {
        "eth_feeHistory": history,
        "eth_gasPrice": lambda _: "0x3b9aca00",
        "eth_estimateGas": lambda _: "0x15f90",
        "eth_simulateV1": lambda params: orjson.loads(result([])) * len(params[0]["blockStateCalls"]),
        "eth_getProof": lambda _: {"accountProof": ["0xf8"], "balance": "0x1", "nonce": "0x1", "storageProof": []},
    }


async def with_things(service: CostService, account: FreeAccount) -> Seeds:
    """The ids of a wallet, a webhook and a policy of the account."""
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "wallets": ("/v1/wallets/create", {"chain": "ethereum", "owner": TO}),
        "policies": ("/v1/gas/policies", {"name": "Answers", "chain": "ethereum", "rules": {}}),
    }
    found = {**account.seeds}
    for name, (path, body) in bodies.items():
        reply = await send(service, account, Request("", "POST", path, orjson.dumps(body)))
        assert reply.status in (200, 201), reply
        found[name] = reply.json.get("address") or reply.json["id"]
    return found


async def send(service: CostService, account: FreeAccount, cell: Request) -> Reply:
    data = request(cell.method, cell.path, cell.body or b"", key=account.key, **cell.headers)
    async with await ChunkedClient.open(service.port) as client:
        return await client.send(data, 60.0)


async def test_no_request_fails_inside_the_service_whatever_upstreams_send(service: CostService) -> None:
    await service.fill_wallet()
    good_results(service)
    account = await service.new_account("enterprise", FAST)
    await until(lambda: is_known(service, account))
    seeds = await with_things(service, account)
    spoil = Spoiler(random.Random(SEED))
    failed: list[str] = []
    for cell in good_requests(seeds):
        for _ in range(TIMES):
            service.evm.spoil = service.svm.spoil = service.moving.spoil = spoil
            reply = await send(service, account, cell)
            faults = [line for line in service.log_lines() if "exception" in line]
            is_internal = reply.status == 500 and reply.json["error"]["reason"] == "internal"
            if is_internal or faults or service.is_replaced():
                failed.append(_shown(cell, reply, faults))
    assert not failed, "\n\n".join(failed)


async def is_known(service: CostService, account: FreeAccount) -> bool:
    return (await send(service, account, Request("", "GET", "/v1/chains"))).status == 200


def _shown(cell: Request, reply: Reply, faults: list[dict[str, Any]]) -> str:
    lines = [f"{cell.method} {cell.path} {(cell.body or b'')[:120]!r}: {reply.status} {reply.body[:200]!r}"]
    return "\n".join([*lines, *(f"{each['message']}\n{each['exception'][-1500:]}" for each in faults)])
