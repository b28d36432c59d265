"""Traces, end to end: a client's traceparent, the spans that a collector receives with OTLP, and what upstreams, Postgres and
receivers of webhooks get."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.flows import production
from tests.flows.production import OPEN_EGRESS, Production, settings_text
from tests.service import command_here, until

_serial = itertools.count(1)
ROLES = ("gateway", "deliverer")
# Blocks whose logs the upstream gives at once.
MOST_BLOCKS = 8


@dataclass
class Collector:
    """Receives spans with OTLP, calls as an upstream, and webhooks; and records the traceparent of the last two."""

    spans: list[Span] = field(default_factory=list)
    upstream: list[tuple[str, str]] = field(default_factory=list)
    webhooks: list[str] = field(default_factory=list)
    fails: int = 0
    url: str = ""

    async def on_spans(self, request: web.Request) -> web.Response:
        body = await request.read()
        body = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
        sent = ExportTraceServiceRequest.FromString(body)
        self.spans += [span for found in sent.resource_spans for scope in found.scope_spans for span in scope.spans]
        return web.Response(content_type="application/x-protobuf")

    async def on_call(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        calls = body if isinstance(body, list) else [body]
        self.upstream += [(call["method"], request.headers.get("traceparent", "")) for call in calls]
        if self.fails and any(call["method"] == "eth_getCode" for call in calls):
            self.fails -= 1
            return web.Response(status=500)
        answers = [{"jsonrpc": "2.0", "id": call["id"], **self._answer(call)} for call in calls]
        return web.json_response(answers if isinstance(body, list) else answers[0])

    def _answer(self, call: dict[str, Any]) -> dict[str, Any]:
        if call["method"] != "eth_getLogs":
            return {"result": self._result(call["method"])}
        first, last = (int(call["params"][0][name], 16) for name in ("fromBlock", "toBlock"))
        refusal = {"code": -32005, "message": f"query exceeds max block range {MOST_BLOCKS}"}
        return {"result": []} if last - first < MOST_BLOCKS else {"error": refusal}

    def _result(self, method: str) -> Any:
        block = {"number": "0x10", "hash": "0x" + "11" * 32, "parentHash": "0x" + "10" * 32, "timestamp": "0x1"}
        return {"eth_chainId": hex(11155111), "eth_blockNumber": "0x10", "eth_getBlockByNumber": block}.get(
            method, "0x1"
        )

    async def on_webhook(self, request: web.Request) -> web.Response:
        self.webhooks.append(request.headers.get("traceparent", ""))
        return web.Response()

    def trace(self, trace_id: str) -> dict[str, Span]:
        """The spans of a trace by name."""
        return {span.name: span for span in self.spans if span.trace_id.hex() == trace_id}

    def attempts(self, trace_id: str) -> list[Span]:
        found = [span for span in self.spans if span.trace_id.hex() == trace_id]
        return [span for span in found if span.name == "upstream attempt"]


@pytest.fixture(scope="module")
async def collector() -> AsyncIterator[Collector]:
    found = Collector()
    application = web.Application()
    application.router.add_post("/v1/traces", found.on_spans)
    application.router.add_post("/rpc", found.on_call)
    application.router.add_post("/second", found.on_call)
    application.router.add_post("/hook", found.on_webhook)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield found
    await runner.cleanup()


def settings(database: str, collector: Collector) -> str:
    text = settings_text(database, f"{collector.url}/rpc", workers=1)
    return f"""{text.replace("networks = []", 'networks = ["*"]')}
[tracing]
endpoint = "{collector.url}/v1/traces"
ratio = 1.0
flush_s = 0.2
{OPEN_EGRESS}
[[upstreams]]
network = "ethereum/sepolia"
url = "{collector.url}/second"
operator = "second"
"""


@pytest.fixture(scope="module")
async def serving(
    collector: Collector, server: Any, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Production]:
    name = await server.create("migrated")
    room = tmp_path_factory.mktemp("tracing")
    (config := room / "penstock.toml").write_text(settings(server.url(name), collector))
    key = await asyncio.to_thread(new_key, str(config))
    started = [await production.start(config, room / role, key, role=role) for role in ROLES]
    yield started[0]
    assert [await production.stop(each) for each in started] == [0, 0]
    await server.drop(name)


def new_key(config: str) -> str:
    holder = ("--name", "A", "--email", "a@example.com", "--plan", "enterprise")
    account = orjson.loads(command_here("accounts", "create", *holder, "--config", config, "--json").stdout)
    owned = ("--account", account["id"], "--mode", "test")
    return str(orjson.loads(command_here("keys", "create", *owned, "--config", config, "--json").stdout)["key"])


def new_trace(flags: str = "01") -> tuple[str, str]:
    """A trace id, and the header of a client's span in it."""
    trace_id = f"{next(_serial):032x}"
    return trace_id, f"00-{trace_id}-00f067aa0ba902b7-{flags}"


async def send(serving: Production, method: str, path: str, body: Any = None, **headers: str) -> Any:
    url = f"http://127.0.0.1:{serving.port}/v1{path}"
    sent = {"X-API-Key": serving.key, **headers}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, json=body, headers=sent) as response,
    ):
        assert response.status < 300, await response.text()
        return await response.json(content_type=None)


async def call(serving: Production, method: str, traceparent: str, *params: Any, **headers: str) -> Any:
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    return await send(serving, "POST", "/rpc/ethereum/sepolia", body, traceparent=traceparent, **headers)


async def metrics(serving: Production) -> str:
    url = f"http://127.0.0.1:{serving.metrics_port}/metrics"
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    async with aiohttp.ClientSession() as session, session.get(url, headers=accept) as response:
        return await response.text()


ADDRESS = "0x" + "00" * 20


async def test_trace_of_a_call_reaches_the_collector_and_the_upstream(
    serving: Production, collector: Collector
) -> None:
    trace_id, header = new_trace()
    await call(serving, "eth_getBalance", header, ADDRESS, "latest")
    root = "POST /v1/rpc/{chain}/{network}"
    await until(lambda: collector.trace(trace_id).keys() >= {root, "admission", "cache", "upstream attempt"})
    spans = collector.trace(trace_id)
    assert spans[root].parent_span_id.hex() == "00f067aa0ba902b7"
    assert spans[root].kind == Span.SPAN_KIND_SERVER
    for name in ("admission", "cache", "upstream attempt"):
        assert spans[name].parent_span_id == spans[root].span_id, name
    attempt = spans["upstream attempt"]
    assert attempt.kind == Span.SPAN_KIND_CLIENT
    sent = f"00-{trace_id}-{attempt.span_id.hex()}-01"
    assert ("eth_getBalance", sent) in collector.upstream


async def test_failed_attempt_is_an_error_and_the_next_one_a_span_of_its_own(
    serving: Production, collector: Collector
) -> None:
    trace_id, header = new_trace()
    collector.fails = 1
    await call(serving, "eth_getCode", header, ADDRESS, "latest")
    await until(lambda: len(collector.attempts(trace_id)) == 2)
    failed = [span for span in collector.attempts(trace_id) if span.status.code]
    assert [span.status.message for span in failed] == ["status 500"]


def texts(span: Span) -> dict[str, str]:
    return {each.key: each.value.string_value for each in span.attributes}


async def test_verification_has_an_attempt_on_each_upstream(serving: Production, collector: Collector) -> None:
    trace_id, header = new_trace()
    verify = {"X-Verify": "quorum 2/2"}

    async def are_both_up() -> bool:
        return len(re.findall(r"^penstock_upstream_up\{.*\} 1\.0$", await metrics(serving), re.MULTILINE)) == 2

    await until(are_both_up)
    await call(serving, "eth_getBalance", header, ADDRESS, "0x1", **verify)
    await until(lambda: "verification" in collector.trace(trace_id))
    span = collector.trace(trace_id)["verification"]
    assert texts(span).items() >= {"penstock.verify": "quorum 2/2", "penstock.outcome": "verified"}.items()
    attempts = collector.attempts(trace_id)
    assert {each.parent_span_id for each in attempts} == {span.span_id}
    assert len({texts(each)["penstock.upstream"] for each in attempts}) == 2


async def test_pieces_of_a_split_call_are_attempts(serving: Production, collector: Collector) -> None:
    trace_id, header = new_trace()
    await call(serving, "eth_getLogs", header, {"fromBlock": "0x1", "toBlock": "0x10"})
    # The whole, which is refused, and two pieces.
    await until(lambda: len(collector.attempts(trace_id)) >= 3)
    assert ("eth_getLogs", "") not in collector.upstream


async def test_cached_reply_has_no_attempt(serving: Production, collector: Collector) -> None:
    await call(serving, "eth_getStorageAt", new_trace()[1], ADDRESS, "0x0", "0x1")
    trace_id, header = new_trace()
    await call(serving, "eth_getStorageAt", header, ADDRESS, "0x0", "0x1")
    await until(lambda: "cache" in collector.trace(trace_id))
    assert texts(collector.trace(trace_id)["cache"])["penstock.cache"] == "hit"
    assert "upstream attempt" not in collector.trace(trace_id)


async def test_call_that_is_not_sampled_leaves_no_trace(serving: Production, collector: Collector) -> None:
    silent, header = new_trace("00")
    await call(serving, "eth_getTransactionCount", header, ADDRESS, "latest")
    await call(serving, "eth_getTransactionCount", "", ADDRESS, "latest")
    heard, sampled = new_trace()
    await call(serving, "eth_getTransactionCount", sampled, ADDRESS, "pending")
    await until(lambda: collector.trace(heard))
    assert not collector.trace(silent)
    assert ("eth_getTransactionCount", "") in collector.upstream


async def test_rest_request_shows_its_use_of_postgres(serving: Production, collector: Collector) -> None:
    trace_id, header = new_trace()
    await send(serving, "GET", "/webhooks", traceparent=header)
    await until(lambda: collector.trace(trace_id).keys() >= {"GET /v1/webhooks", "postgres"})
    spans = collector.trace(trace_id)
    assert spans["postgres"].parent_span_id == spans["GET /v1/webhooks"].span_id


async def test_delivery_carries_its_trace_to_the_receiver(serving: Production, collector: Collector) -> None:
    webhook = {"url": f"{collector.url}/hook", "chain": "ethereum", "event_type": "NEW_BLOCK"}
    made = await send(serving, "POST", "/webhooks", webhook)
    await send(serving, "POST", f"/webhooks/{made['id']}/test", {})
    await until(lambda: collector.webhooks)
    found = re.fullmatch(r"00-([0-9a-f]{32})-([0-9a-f]{16})-01", collector.webhooks[0])
    assert found is not None
    await until(lambda: "webhook delivery" in collector.trace(found[1]))
    assert collector.trace(found[1])["webhook delivery"].span_id.hex() == found[2]


async def test_latency_has_the_trace_as_an_exemplar(serving: Production, tmp_path: Path) -> None:
    trace_id, header = new_trace()
    await call(serving, "eth_gasPrice", header)

    async def is_shown() -> bool:
        return f'# {{trace_id="{trace_id}"}}' in await metrics(serving)

    await until(is_shown)
    [line] = [line for line in (await metrics(serving)).splitlines() if trace_id in line]
    assert line.startswith("penstock_call_seconds_bucket{")
    assert 'method="eth_gasPrice"' in line
