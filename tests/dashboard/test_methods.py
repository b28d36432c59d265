"""Calls, errors and latencies by method and upstream, from records of requests."""

from __future__ import annotations

import time
from typing import Any

from proxy.core.request_records import RecordedAttempt, RequestRecord
from proxy.services.method_matrix import MOST_METHODS, matrix_of
from proxy.store.postgres.request_store import RequestStore
from tests.dashboard.service import DashboardService

ANSWERED = "answered"


def record(account: str, method: str, *attempts: RecordedAttempt, ago_s: float = 1.0, **more: Any) -> RequestRecord:
    given: dict[str, Any] = {"network": "test/matrix", "surface": "http", "status": 200, "reason": "sampled", **more}
    return RequestRecord(
        id=f"req_{method}", at=time.time() - ago_s, account=account, key="", method=method, attempts=attempts, **given
    )


async def matrix(client: Any, span: str = "hour") -> dict[str, list[dict[str, Any]]]:
    found = (await client.get(f"/admin/methods?span={span}")).data["networks"]
    (mine,) = [each for each in found if each["network"] == "test/matrix"]
    return {each["method"]: each["upstreams"] for each in mine["methods"]}


async def test_methods_are_counted_by_upstream(service: DashboardService) -> None:
    operator, account = await service.operator(), (await service.account(plan="free"))["id"]
    retried = (("node-a", 0.0, 2.0, "no reply in time"), ("node-b", 2.0, 0.01, ANSWERED))
    await RequestStore(service.pool).write(
        [
            record(account, "eth_call", ("node-a", 0.0, 0.004, ANSWERED)),
            record(account, "eth_call", *retried, reason="slow"),
            record(account, "eth_chainId", ("node-b", 0.0, 0.001, ANSWERED), ago_s=7200),
            record(account, "batch", ("node-a", 0.0, 0.001, ANSWERED), surface="batch"),
            record(account, "eth_hit", cache="hit"),
        ]
    )
    found = await matrix(operator)
    assert [*found] == ["eth_call"]
    first, second = found["eth_call"]
    # The sampled call stands for a hundred, the slow one for itself.
    assert (first["upstream"], first["calls"], first["errors"]) == ("node-a", 101, 1)
    assert (second["upstream"], second["calls"], second["errors"]) == ("node-b", 1, 0)
    assert 2.5 <= first["p50_ms"] <= 5.0
    assert {*await matrix(operator, "day")} == {"eth_call", "eth_chainId"}
    (await operator.get("/admin/methods?span=year")).fault(400)
    (await (await service.holder()).get("/admin/methods")).fault(401)


def test_only_the_busiest_methods_are_listed() -> None:
    rows = [
        {"network": "n", "method": f"m{number}", "upstream": "u", "bucket": 0, "calls": number, "errors": 0}
        for number in range(1, MOST_METHODS + 6)
    ]
    methods = [*matrix_of(rows)["n"]]
    assert len(methods) == MOST_METHODS
    assert methods[0] == f"m{MOST_METHODS + 5}"
