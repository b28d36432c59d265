"""Health, readiness, the API reference, metrics over all workers, and logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.flows.upstream import Upstream
from tests.http_client import close_all, post, request, rpc, send_once, to_every_worker
from tests.service import Service, until

SEPOLIA = "ethereum/sepolia"
READ = rpc("eth_chainId")
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; each must be a JSON object with the common members."""
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    for line in lines:
        assert {"time", "level", "logger", "message"} <= set(line), line
    return lines


async def scraped(service: Service) -> Samples:
    response = await service.get(service.ready["metrics_url"])
    assert response.status == 200
    families = text_string_to_metric_families(await response.text())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def total(samples: Samples, name: str, **labels: str) -> float:
    return sum(value for (found, of), value in samples.items() if found == name and labels.items() <= dict(of).items())


async def test_health_and_readiness_need_no_key(service: Service) -> None:
    health, ready = await service.get("/healthz"), await service.get("/readyz")
    assert (health.status, await health.json()) == (200, {"status": "ok"})
    assert ready.status == 200
    assert await ready.json() == {"status": "ready", "degraded": []}


async def test_reference_is_served_as_a_document_and_as_a_page(service: Service) -> None:
    document = await (await service.get("/v1/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    assert len(document["paths"]) >= 12
    page = await service.get("/docs")
    assert page.content_type == "text/html"
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["X-Content-Type-Options"] == "nosniff"
    assert page.headers["Referrer-Policy"] == "no-referrer"
    text = await page.text()
    assert "<script>" not in text
    assert " style=" not in text
    assert await (await service.get("/docs/")).text() == text
    assert "<style>" in text
    assert "/docs/docs.js" in text
    script = await service.get("/docs/docs.js")
    assert (script.status, script.content_type) == (200, "text/javascript")


@pytest.mark.parametrize("path", ["/docs", "/docs/docs.js", "/v1/openapi.json", "/llms.txt"])
async def test_reference_is_compressed_and_revalidated(service: Service, path: str) -> None:
    """A browser loads it once, and all workers agree on its tag."""
    first = await service.get(path, **{"Accept-Encoding": "gzip"})
    assert (first.status, first.headers["Content-Encoding"]) == (200, "gzip")
    plain = await service.get(path, **{"Accept-Encoding": "identity"})
    assert int(first.headers["Content-Length"]) < int(plain.headers["Content-Length"]) / 2
    for _ in range(4):
        again = await service.get(path, **{"If-None-Match": first.headers["ETag"]})
        assert again.status == 304


async def test_examples_name_only_served_networks(service: Service) -> None:
    document = await (await service.get("/v1/openapi.json")).json()
    assert set(document["x-networks"]) == {"dev/mainnet", "dev/testnet", "ethereum/sepolia", "ethereum/hoodi"}
    parameters = document["components"]["parameters"]
    assert parameters["RpcChain"]["examples"] == {"evm": {"value": "dev"}}
    assert parameters["Network"]["examples"] == {"evm": {"value": "mainnet"}}
    rpc = document["paths"]["/rpc/{chain}/{network}"]["post"]["requestBody"]["content"]["application/json"]
    assert set(rpc["examples"]) == {"block_number", "eth_call", "batch"}
    created = document["paths"]["/webhooks"]["post"]["requestBody"]["content"]["application/json"]["examples"]
    assert {example["value"]["chain"] for example in created.values()} == {"dev"}


async def test_index_for_language_models_lists_every_operation(service: Service) -> None:
    document = await (await service.get("/v1/openapi.json")).json()
    reply = await service.get("/llms.txt")
    text = await reply.text()
    assert reply.content_type == "text/plain"
    assert text.startswith("# Penstock\n\n> ")
    assert "## Receiving webhooks" in text
    operations = [each for item in document["paths"].values() for each in item.values() if "operationId" in each]
    assert len(operations) > 50
    assert all(f"/docs#{each['operationId']})" in text for each in operations)


async def test_metrics_of_all_workers_add_up(service: Service, upstream: Upstream) -> None:
    """With a known number of requests on each worker, the totals equal the number sent."""
    key = service.keys["enterprise"]
    before = await scraped(service)
    held = await to_every_worker(service)
    answered = 0
    for index, clients in enumerate(held.values()):
        for _ in range(5 + index):
            assert (await clients[0].call("eth_gasPrice", key=key, network=SEPOLIA)).status == 200
            answered += 1
        (await clients[0].send(post(READ, key=key, network="dev/nowhere"))).fault(404)

    async def grew_by(count: int, name: str, **labels: str) -> bool:
        return total(await scraped(service), name, **labels) - total(before, name, **labels) == count

    await until(lambda: grew_by(answered, "penstock_calls_total", network=SEPOLIA, method="eth_gasPrice"))
    await until(lambda: grew_by(len(held), "penstock_requests_total", operation="rpc_call", status="404"))

    async def counts_connections() -> bool:
        return total(await scraped(service), "penstock_connections_open") >= len(held)

    await until(counts_connections)
    after = await scraped(service)
    assert total(after, "penstock_database_up") == 1
    assert total(after, "penstock_keys_loaded") >= 6
    await close_all(held)


async def test_labels_come_from_closed_sets(service: Service, upstream: Upstream) -> None:
    """Names chosen by clients are not used as labels, so the number of series does not grow with them."""
    key = service.keys["enterprise"]

    async def nonsense(mark: str) -> None:
        for index in range(15):
            name = f"{mark}{index}"
            await send_once(service, post(rpc(f"eth_{name}"), key=key))
            await send_once(service, post(READ, key=key, network=f"{name}/mainnet"))
            await send_once(service, request("GET", f"/v1/{name}", key=key))
            await send_once(service, request(f"X{name.upper()}", "/v1/rpc/dev/mainnet", key=key))
            await send_once(service, post(READ, key=f"svc_live_{name}", X_Request_Id=name, User_Agent=name))

    await nonsense("quux")
    held = await to_every_worker(service)
    for clients in held.values():
        await clients[0].call("eth_chainId", key=key)
    before = set(await scraped(service))
    await nonsense("zork")
    after = await scraped(service)
    assert not [series for series in after if "quux" in repr(series).lower() or "zork" in repr(series).lower()]
    assert len(after) - len(before) < 40, set(after) - before
    await close_all(held)


async def test_every_request_has_one_line_in_the_log(service: Service, upstream: Upstream) -> None:
    key = service.keys["growth"]
    wanted = {
        "flow-ok": post(READ, key=key, X_Request_Id="flow-ok"),
        "flow-404": request("GET", "/v1/nope", X_Request_Id="flow-404"),
        "flow-401": post(READ, key=None, X_Request_Id="flow-401"),
        "flow-400": post(b"{", key=key, X_Request_Id="flow-400"),
        "flow-post": post(rpc("eth_gasPrice"), key=key, network=SEPOLIA, X_Request_Id="flow-post"),
    }
    statuses = {name: (await send_once(service, data)).status for name, data in wanted.items()}

    def found() -> list[dict[str, Any]]:
        lines = json_lines(service.data / "logs" / "penstock.log")
        return [line for line in lines if str(line.get("request_id", "")).startswith("flow-")]

    await until(lambda: len(found()) >= len(wanted))
    lines = found()
    assert sorted(line["request_id"] for line in lines) == sorted(wanted)
    for line in lines:
        assert line["status"] == statuses[line["request_id"]]
        assert line["ms"] >= 0
        assert (line["key"] is not None) == (line["request_id"] in ("flow-ok", "flow-400", "flow-post"))


async def test_hostile_text_stays_inside_its_line(service: Service) -> None:
    """Line ends, control characters, bidirectional marks and quotes in every place that a client controls."""
    nasty = [
        '"}\r\n{"level":"x"}',
        "\x1b[31mred",
        "\u202etxet",
        "%0d%0a{}",
        "\x00",
        "'; drop table keys; --",
        "\\",
        "é" * 50,
    ]
    key = service.keys["enterprise"]
    for text in nasty:
        safe = text.replace("\r", "").replace("\n", "").replace("\0", "")
        await send_once(service, post(rpc(text), key=key, User_Agent=safe, Referer=safe))
        await send_once(service, request("GET", "/" + "".join(f"%{byte:02x}" for byte in text.encode())))
    json_lines(service.data / "logs" / "penstock.log")


async def test_docs_page_and_api_do_not_name_their_software(service: Service) -> None:
    """A version in a header helps an attacker to find known vulnerabilities."""
    for path in ("/healthz", "/docs", "/v1/nope"):
        server = (await service.get(path)).headers.get("Server", "")
        assert "aiohttp" not in server.lower()
        assert "python" not in server.lower()
