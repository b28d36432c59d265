"""Web pages of other origins: preflights, and which replies they may read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from proxy.core.access import KeyRestrictions, Limits
from tests.http_client import Reply, request, rpc
from tests.rpc_harness import rpc_harness
from tests.web.worker import LIVE, Worker, on_uvloop

APP, OTHER = "https://app.example.com", "https://elsewhere.example"
ALLOW, EXPOSE = "access-control-allow-origin", "access-control-expose-headers"
PATHS = {
    f"/v1/rpc/{LIVE}": "POST",
    f"/v1/bundler/{LIVE}": "POST",
    "/v1/wallets/create": "GET, HEAD, POST",
    "/v1/webhooks": "GET, HEAD, POST",
    "/v1/webhooks/wh_1": "DELETE, GET, HEAD, PATCH",
    "/v1/gas/ethereum/prices": "GET, HEAD",
}


@asynccontextmanager
async def served(*origins: str) -> AsyncIterator[Worker]:
    async with rpc_harness(1, server={"cors_origins": list(origins)}) as harness:
        page = harness.worker.add_key("page")
        harness.worker.app.keyring.remove(page)
        page.restrictions, page.needs_full_checks, page.alive = (
            KeyRestrictions((), (APP, "https://*.example.org")),
            True,
            True,
        )
        harness.worker.app.keyring.add(page)
        yield harness.worker


async def preflight(worker: Worker, target: str, origin: str = APP) -> Reply:
    async with await worker.connect() as client:
        return await client.send(request("OPTIONS", target, Origin=origin, Access_Control_Request_Method="POST"))


async def call(worker: Worker, key: str | None, origin: str, **options: Any) -> Reply:
    return await worker.send(rpc("eth_chainId"), key=key, Origin=origin, **options)


@on_uvloop
async def test_preflight_is_answered_alike_for_every_origin() -> None:
    """It must not show which origins some customer's key allows."""
    async with served() as worker:
        for target, methods in PATHS.items():
            replies = [await preflight(worker, target, origin) for origin in (APP, OTHER, "null")]
            for reply in replies:
                assert reply.status == 204
                assert reply.headers[ALLOW] == "*"
                assert reply.headers["access-control-allow-methods"] == methods
                assert reply.headers["access-control-allow-headers"] == "Authorization, *"
                assert reply.headers["access-control-max-age"] == "7200"
                assert "access-control-allow-credentials" not in reply.headers
                assert not reply.body


@pytest.mark.parametrize("target", ["/v1/account", "/v1/account/keys", "/v1/admin/accounts", "/dashboard", "/healthz"])
@on_uvloop
async def test_paths_for_signed_in_people_take_no_part(target: str) -> None:
    async with served("*") as worker:
        reply = await preflight(worker, target)
        assert reply.status == 405
        assert not [name for name in reply.headers if name.startswith("access-control")]


@on_uvloop
async def test_options_without_a_preflight_is_no_method() -> None:
    async with served() as worker, await worker.connect() as client:
        reply = await client.send(request("OPTIONS", f"/v1/rpc/{LIVE}"))
        assert "POST" in reply.fault(405)["message"]
        assert (await preflight(worker, "/v1/nope")).status == 404


@on_uvloop
async def test_page_reads_replies_and_errors_if_its_key_allows_the_origin() -> None:
    async with served() as worker:
        for origin in (APP, "https://a.example.org"):
            reply = await call(worker, "page", origin)
            assert (reply.status, reply.headers[ALLOW], reply.headers["vary"]) == (200, origin, "Origin")
            for name in (
                "X-RateLimit-Limit",
                "X-RateLimit-Remaining",
                "X-RateLimit-Reset",
                "X-Request-Id",
                "Retry-After",
            ):
                assert name in reply.headers[EXPOSE]
        rest = await worker.connect()
        async with rest:
            found = await rest.send(request("GET", "/v1/gas/nowhere/prices", key=worker.keys["page"], Origin=APP))
            assert (found.status, found.headers[ALLOW]) == (404, APP)
        refused = await call(worker, "page", OTHER)
        assert ALLOW not in refused.headers
        assert "origin" in refused.fault(403)["message"]


@on_uvloop
async def test_page_reads_that_its_key_is_missing_or_over_its_limit() -> None:
    async with served("*") as worker:
        assert (await call(worker, None, OTHER)).headers[ALLOW] == "*"
        worker.add_key("small", limits=Limits(1, 1000, 0))
        replies = [await call(worker, "small", OTHER) for _ in range(20)]
        limited = next(reply for reply in replies if reply.status == 429)
        assert limited.headers[ALLOW] == "*"
        assert limited.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("default", "origin", "allowed"),
    [
        ([], APP, None),
        (["*"], OTHER, "*"),
        ([APP], APP, APP),
        ([APP], OTHER, None),
        (["https://*.example.com"], APP, APP),
    ],
)
@on_uvloop
async def test_key_without_origins_follows_the_operators_default(
    default: list[str], origin: str, allowed: str | None
) -> None:
    async with served(*default) as worker:
        reply = await call(worker, "main", origin)
        assert (reply.status, reply.headers.get(ALLOW)) == (200, allowed)
        plain = await worker.send(rpc("eth_chainId"))
        assert not [name for name in plain.headers if name.startswith("access-control") or name == "vary"]


@on_uvloop
async def test_operators_default_does_not_widen_a_keys_own_list() -> None:
    async with served("*") as worker:
        refused = await call(worker, "page", OTHER)
        assert refused.status == 403
        assert ALLOW not in refused.headers
