"""The example errors in the API spec are the errors that a worker sends."""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

from proxy.core.access import Limits
from proxy.settings import SCHEMAS
from tests.http_client import request, rpc
from tests.web.worker import LIVE, TEST, Worker, on_uvloop, running_worker
from tests.wire.upstreams import Scripted, stub

RESPONSES = orjson.loads((SCHEMAS / "components" / "responses.json").read_bytes())
FAILURE = orjson.loads((SCHEMAS / "http" / "jsonrpc.json").read_bytes())["JsonRpcFailure"]["examples"][0]
NOWHERE = "http://127.0.0.1:1/"
READ = rpc("eth_chainId")
CALLS, BALANCES = f"/v1/rpc/{LIVE}", f"/v1/tokens/ethereum/balances/0x{'11' * 20}"
# The options of each key, by its name.
KEYS: dict[str, dict[str, Any]] = {
    "test": {"live": False},
    "reader": {"scopes": ("rpc:read",)},
    "slow": {"limits": Limits(10, 200, 0)},
}


class Case(NamedTuple):
    target: str
    body: bytes | None = None
    key: str | None = "main"
    # The request is sent so often, and the last reply counts.
    times: int = 1
    type: str = "application/json"


CASES = {
    "InvalidRequest.missing": Case("/v1/wallets/create", b'{"chain": "ethereum"}'),
    "InvalidRequest.range": Case(f"{BALANCES}?limit=101"),
    "InvalidRequest.json": Case("/v1/wallets/create", b"{"),
    "Unauthorized.missing": Case(CALLS, READ, key=None),
    "Unauthorized.invalid": Case(CALLS, READ, key="unknown"),
    "Forbidden.scope": Case(BALANCES, key="reader"),
    "Forbidden.network": Case(CALLS, READ, key="test"),
    "NotFound.chain": Case(BALANCES.replace("ethereum", "atlantis")),
    "PayloadTooLarge.size": Case(CALLS, b" " * 1_048_577),
    "UnsupportedMediaType.type": Case(CALLS, READ, type="text/plain"),
    "RateLimited.requests": Case(f"/v1/rpc/{TEST}", rpc("eth_gasPrice"), key="slow", times=20),
    "Unavailable.upstream": Case(CALLS, READ),
}


def example(name: str) -> Any:
    response, _, which = name.partition(".")
    return RESPONSES[response]["content"]["application/json"]["examples"][which]["value"]


async def last_reply(worker: Worker, case: Case) -> Any:
    key = worker.keys.get(case.key, "svc_live_unknown") if case.key else None
    method = "GET" if case.body is None else "POST"
    sent = request(method, case.target, case.body or b"", key=key, Content_Type=case.type)
    async with await worker.connect() as client:
        replies = [await client.send(sent) for _ in range(case.times)]
    return replies[-1].json


@on_uvloop
async def test_errors_are_their_examples() -> None:
    results = {"eth_gasPrice": "0x1"}
    async with (
        Scripted(stub(results)) as upstream,
        running_worker({LIVE: [NOWHERE], TEST: [upstream.url]}) as worker,
    ):
        for name, options in KEYS.items():
            worker.add_key(name, **options)
        for each in worker.app.networks.routes[LIVE].upstreams:
            each.health.cordon(cordoned=True, now=0.0)
        wrong = {
            name: reply for name, case in CASES.items() if (reply := await last_reply(worker, case)) != example(name)
        }
        assert not wrong
        assert await last_reply(worker, Case(CALLS, rpc("eth_nothing"))) == FAILURE
