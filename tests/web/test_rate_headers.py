"""Replies to clients without a valid key: they too have `X-RateLimit-*` headers, of the client's address."""

from __future__ import annotations

import pytest

from proxy.services.accounts.admission import AuthFailures
from proxy.store.shared_memory import host_memory
from proxy.store.shared_memory.host_memory import HostMemory
from proxy.web.front.handler_connection import MAX_HEADERS, MAX_TARGET_BYTES
from tests.http_client import Reply, request
from tests.web.worker import on_uvloop, running_worker

NOWHERE = "http://127.0.0.1:1/"

MANY_HEADERS = b"".join(b"X-%d: 1\r\n" % n for n in range(MAX_HEADERS + 1))
PREFLIGHT = request("OPTIONS", "/v1/wallets", Origin="https://app.example.com", Access_Control_Request_Method="GET")


def assert_has_rate_headers(reply: Reply) -> None:
    limit, remaining = (int(reply.headers[f"x-ratelimit-{name}"]) for name in ("limit", "remaining"))
    assert 0 <= remaining <= limit
    assert int(reply.headers["x-ratelimit-reset"]) >= int(reply.at)
    assert reply.headers["x-request-id"]
    assert reply.headers["server"] == "Penstock"


@pytest.mark.parametrize(
    ("status", "data"),
    [
        (401, request("GET", "/v1/wallets")),
        (401, request("POST", "/v1/rpc/ethereum/mainnet", b"{}", key="svc_live_nonsense")),
        (401, request("GET", "/v1/ws/ethereum/mainnet?apiKey=x")),
        (404, request("GET", "/v1/nowhere")),
        (404, request("GET", "/nowhere")),
        (405, request("DELETE", "/v1/wallets")),
        (200, request("GET", "/healthz")),
        (204, PREFLIGHT),
        (400, b"GET / HTTP/1.1\r\nHost: a\r\nBad Header: 1\r\n\r\n"),
        (400, b"nonsense\r\n\r\n"),
        (414, request("GET", "/" + "a" * MAX_TARGET_BYTES)),
        (431, b"GET / HTTP/1.1\r\nHost: a\r\n" + MANY_HEADERS + b"\r\n"),
        (505, b"GET / HTTP/2.0\r\nHost: a\r\n\r\n"),
    ],
)
@on_uvloop
async def test_reply_without_a_valid_key_has_rate_headers(status: int, data: bytes) -> None:
    async with running_worker(NOWHERE) as worker, await worker.connect() as client:
        reply = await client.send(data)
        assert reply.status == status
        assert_has_rate_headers(reply)
        assert reply.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)


@pytest.mark.parametrize(
    ("status", "server"),
    [(503, {"max_connections": 1}), (429, {"connections_per_address": 1}), (408, {"header_timeout_s": 0.1})],
)
@on_uvloop
async def test_connection_that_is_refused_gets_rate_headers(status: int, server: dict[str, float]) -> None:
    async with (
        running_worker(NOWHERE, server=server) as worker,
        await worker.connect(),
        await worker.connect() as client,
    ):
        if status == 408:
            await client.write(b"GET ")
        reply = await client.reply()
        assert reply.status == status
        assert_has_rate_headers(reply)


def headers(failures: AuthFailures, now: float) -> tuple[int, int]:
    found = failures.rate_headers("192.0.2.1", now)
    return int(found["X-RateLimit-Limit"]), int(found["X-RateLimit-Remaining"])


def test_rate_headers_of_an_address_show_the_failures_that_are_left() -> None:
    failures = AuthFailures(180, HostMemory(host_memory.create()).addresses)
    assert headers(failures, 1000.0) == (180, 180)
    for _ in range(178):
        assert failures.count("192.0.2.1", 1000.0) == 0.0
    assert headers(failures, 1000.0) == (180, 2)
    assert [failures.count("192.0.2.1", 1000.0) > 0 for _ in range(3)] == [False, False, True]
    assert headers(failures, 1000.0) == (180, 0)
    assert headers(failures, 1000.34) == (180, 1)
    assert headers(failures, 1060.0) == (180, 180)
