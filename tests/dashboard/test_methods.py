"""Calls, errors and latencies by method, from usage, and the parts of upstreams, from records of requests."""

from __future__ import annotations

import time
from typing import Any

from proxy.core.request_records import RecordedAttempt, RequestRecord
from proxy.core.usage import BUCKETS, UsageSums
from proxy.services.method_matrix import MOST_METHODS, matrix_of
from proxy.store.postgres.request_store import RequestStore
from proxy.store.postgres.usage import UsageStore
from tests.dashboard.service import DashboardService

ANSWERED = "answered"


def record(account: str, method: str, *attempts: RecordedAttempt, ago_s: float = 1.0, **more: Any) -> RequestRecord:
    usual = {"id": f"req_{method}", "network": "test/matrix", "surface": "http", "status": 200, "reason": "sampled"}
    given: dict[str, Any] = {**usual, **more}
    return RequestRecord(at=time.time() - ago_s, account=account, key="", method=method, attempts=attempts, **given)


async def matrix(client: Any, span: str = "hour") -> dict[str, dict[str, Any]]:
    found = (await client.get(f"/admin/methods?span={span}")).data["networks"]
    (mine,) = [each for each in found if each["network"] == "test/matrix"]
    return {each["method"]: each for each in mine["methods"]}


async def write_usage(service: DashboardService, account: str, **used: UsageSums) -> None:
    """Usage of each method a minute ago."""
    minute = int(time.time()) // 60 - 1
    rows = {((account, "key_1", "test/matrix", method), minute): sums for method, sums in used.items()}
    store = UsageStore(service.pool)
    await store.write(f"worker of {account}", 1, rows)
    await store.sum_up(0.0)


def sums(requests: int, errors: int, faults: int) -> UsageSums:
    return UsageSums(requests, errors, requests, 0, [requests] + [0] * (BUCKETS - 1), faults)


async def test_methods_are_counted_and_their_upstreams_estimated(service: DashboardService) -> None:
    operator, account = await service.operator(), (await service.account(plan="free"))["id"]
    await write_usage(service, account, eth_call=sums(1200, 30, 2), eth_chainId=sums(5, 0, 0))
    retried = (("node-a", 0.0, 2.0, "no reply in time"), ("node-b", 2.0, 0.01, ANSWERED))
    await RequestStore(service.pool).write(
        [
            record(account, "eth_call", ("node-a", 0.0, 0.004, ANSWERED)),
            record(account, "eth_call", *retried, reason="slow"),
            record(account, "eth_call", ("node-b", 0.0, 0.004, "error: revert"), reason="failed"),
            record(account, "eth_chainId", ("node-b", 0.0, 0.001, ANSWERED), ago_s=7200),
            record(account, "batch", ("node-a", 0.0, 0.001, ANSWERED), surface="batch"),
            record(account, "eth_hit", cache="hit"),
        ]
    )
    found = await matrix(operator)
    assert [*found] == ["eth_call", "eth_chainId"]
    counted = found["eth_call"]
    assert (counted["calls"], counted["caller_errors"], counted["failures"]) == (1200, 28, 2)
    assert counted["p99_ms"] <= 0.5
    first, second = counted["upstreams"]
    # The sampled call stands for a hundred, the others for themselves. A revert is no failure of its upstream.
    assert (first["upstream"], first["calls"], first["failures"]) == ("node-a", 101, 1)
    assert (second["upstream"], second["calls"], second["failures"]) == ("node-b", 2, 0)
    assert 2.5 <= first["p50_ms"] <= 5.0
    assert found["eth_chainId"]["upstreams"] == []
    of_day = await matrix(operator, "day")
    assert [each["calls"] for each in of_day.values()] == [1200, 5]
    assert [each["upstream"] for each in of_day["eth_chainId"]["upstreams"]] == ["node-b"]
    (await operator.get("/admin/methods?span=year")).fault(400)
    (await (await service.holder()).get("/admin/methods")).fault(401)


async def test_failed_requests_alone_do_not_say_that_all_calls_failed(service: DashboardService) -> None:
    operator, account = await service.operator(), (await service.account(plan="free"))["id"]
    await write_usage(service, account, eth_estimateGas=sums(900, 210, 0))
    failed = [
        record(account, "eth_estimateGas", ("node-a", 0.0, 0.004, "error: revert"), reason="failed", id=f"req_{number}")
        for number in range(210)
    ]
    await RequestStore(service.pool).write(failed)
    found = (await matrix(operator))["eth_estimateGas"]
    assert (found["calls"], found["caller_errors"], found["failures"]) == (900, 210, 0)
    assert found["upstreams"] == []


def test_parts_of_upstreams_are_not_more_than_the_whole() -> None:
    """One of fifteen calls was sampled, which stands for a hundred."""
    common = {"network": "n", "method": "m", "bucket": 2}
    sampled = {**common, "upstream": "node-a", "calls": 100, "failures": 0, "sampled": 1}
    failed = {**common, "upstream": "node-b", "calls": 3, "failures": 3, "sampled": 0}
    cells = matrix_of({("n", "m"): UsageSums(requests=15)}, [sampled, failed])["n"]["m"].cells
    assert {name: (cell.calls, cell.failures) for name, cell in cells.items()} == {"node-a": (15, 0), "node-b": (3, 3)}


def test_only_the_busiest_methods_are_listed() -> None:
    counted = {("n", f"m{number}"): UsageSums(requests=number) for number in range(1, MOST_METHODS + 6)}
    methods = [*matrix_of(counted, [])["n"]]
    assert len(methods) == MOST_METHODS
    assert methods[0] == f"m{MOST_METHODS + 5}"
