"""The queries of the Grafana board and the alert rules, against the metrics of a running service."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families

from proxy import telemetry
from proxy.telemetry import CallCollector
from tests.flows.upstream import Upstream
from tests.service import Service, until
from tests.test_monitoring import SERIES, queries

PROMETHEUS = shutil.which("prometheus")
SELECTOR = re.compile(r"\b(penstock_\w+)(?:\{([^}]*)\})?")
GROUPS = re.compile(r"\bby \(([^)]*)\)")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
# Variables of the board.
VARIABLES = {"$network": ".*", "$host": ".*", "$__rate_interval": "1m"}
# Labels that Prometheus adds to every series.
ADDED = {"instance", "job"}
# Longer than anything here takes. The service's metrics are scraped each second.
SOON_S = 60.0


def concrete(query: str) -> str:
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    return query


ALL = sorted({concrete(query) for query in queries()})


async def busy(service: Service) -> None:
    """Use the parts of the service that count something: calls, a chain's error, REST, a refusal."""
    await service.rpc("eth_blockNumber")
    await service.rpc("eth_call", [{}, "nonsense"])
    await service.rpc("eth_blockNumber", key="svc_live_unknown")
    await service.send("GET", "/webhooks")


async def labels(service: Service, tmp_path: Path) -> dict[str, set[str]]:
    """The label names of every metric: as declared, and of the series that exist by now."""
    own = [each for each in vars(telemetry).values() if isinstance(each, MetricWrapperBase)]
    known = {each._name: {*each._labelnames} for each in own}
    known |= {family.name: {*getattr(family, "_labelnames", ())} for family in CallCollector(tmp_path).collect()}
    text = await (await service.get(service.ready["metrics_url"])).text()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            known.setdefault(family.name, set()).update(sample.labels)
    return known


async def test_labels_of_every_query_exist(service: Service, upstream: Upstream, tmp_path: Path) -> None:
    await busy(service)
    known = await labels(service, tmp_path)
    for query in ALL:
        found = [(SERIES.sub("", name), matchers) for name, matchers in SELECTOR.findall(query)]
        for name, matchers in found:
            assert {*MATCHER.findall(matchers)} <= known[name] | ADDED, query
        grouped = {label.strip() for group in GROUPS.findall(query) for label in group.split(",")}
        assert not found or grouped <= set.union(*(known[name] for name, _ in found)) | {"le"}, query


@pytest.fixture(scope="module")
async def prometheus(service: Service, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """A Prometheus that scrapes the service. Yields the address of its queries."""
    if PROMETHEUS is None:
        pytest.skip("prometheus is not installed")
    room = tmp_path_factory.mktemp("prometheus")
    target = service.ready["metrics_url"].removeprefix("http://").removesuffix("/metrics")
    (room / "prometheus.yml").write_text(
        f"scrape_configs: [{{job_name: penstock, scrape_interval: 1s, static_configs: [{{targets: ['{target}']}}]}}]"
    )
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    words = [f"--config.file={room}/prometheus.yml", f"--storage.tsdb.path={room}", f"--web.listen-address={address}"]
    with (room / "log").open("wb") as log:
        process = subprocess.Popen([PROMETHEUS, *words], stdout=log, stderr=log)
    try:
        yield f"http://{address}/api/v1/query"
    finally:
        process.terminate()
        process.wait(20)


async def ask(url: str, query: str) -> list[Any] | None:
    """The result of a query; None while Prometheus starts. Fails if it refuses the query."""
    try:
        async with aiohttp.ClientSession() as session, session.get(url, params={"query": query}) as response:
            said = await response.json()
    except (aiohttp.ClientError, ValueError):
        return None
    assert said["status"] == "success", (query, said)
    return list(said["data"]["result"])


async def test_prometheus_answers_every_query(service: Service, upstream: Upstream, prometheus: str) -> None:
    """A query whose series all exist has a result."""
    await busy(service)

    async def is_counting() -> bool:
        return bool(await ask(prometheus, "rate(penstock_calls_total[1m]) >= 0"))

    await until(is_counting, within_s=SOON_S)
    answered = 0
    for query in ALL:
        result = await ask(prometheus, query)
        selectors = [match[0] for match in SELECTOR.finditer(query)]
        there = [await ask(prometheus, selector) for selector in selectors]
        # Alerts have no result as long as nothing is wrong.
        if selectors and all(there) and not re.search(r"[<>]|==| and ", query):
            assert result, query
            answered += 1
    assert answered > 15
