"""Directives over HTTP, in batches and on sockets: X-Upstream, X-Timeout-Ms, X-Max-Stale, X-Retry."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest

from proxy.core.directives import BY_NAME, DIRECTIVES, USUAL
from tests.http_client import request, rpc
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import Chain
from tests.sockets import bare, handshake, refused
from tests.web.worker import LIVE, NO_CACHE, TEST, on_uvloop, running_worker

ADDRESS = "0x" + "ab" * 20
BALANCE = ("eth_getBalance", [ADDRESS, "latest"])
ALL = USUAL | {"upstream"}
FIRST, SECOND, THIRD = (f"{LIVE}#{number}" for number in (1, 2, 3))
# aiohttp serves requests of web pages, the front all others.
SERVED_BY = [{}, {"Origin": "https://app.example.com"}]


def asked(harness: RpcHarness, method: str) -> list[int]:
    return [each.count(method) for each in harness.upstreams]


@pytest.mark.parametrize("more", SERVED_BY)
@on_uvloop
async def test_call_goes_to_the_named_upstream_only(more: dict[str, str]) -> None:
    async with rpc_harness() as harness:
        harness.worker.add_key("operator", directives=ALL)
        for _ in range(6):
            reply = await harness.call(*BALANCE, key="operator", X_Upstream=SECOND, **more)
            assert reply.status == 200, reply
        assert asked(harness, "eth_getBalance") == [0, 6, 0]
        batch = await harness.batch(BALANCE, ("eth_chainId", []), key="operator", X_Upstream=THIRD, **more)
        assert [each["id"] for each in batch.json] == [0, 1]
        assert asked(harness, "eth_getBalance") == [0, 6, 1]
        assert asked(harness, "eth_chainId")[2] >= 1


@pytest.mark.parametrize("more", SERVED_BY)
@on_uvloop
async def test_named_upstream_that_is_down_is_not_replaced_by_another(more: dict[str, str]) -> None:
    async with rpc_harness() as harness:
        harness.worker.add_key("operator", directives=ALL)
        await harness.upstreams[1].close()
        reply = await harness.call(*BALANCE, key="operator", X_Upstream=SECOND, **more)
        assert reply.status in (500, 503), reply
        assert asked(harness, "eth_getBalance") == [0, 0, 0]


@pytest.mark.parametrize("more", SERVED_BY)
@on_uvloop
async def test_directive_needs_permission_and_a_valid_value(more: dict[str, str]) -> None:
    async with rpc_harness() as harness:
        worker = harness.worker
        worker.add_key("operator", directives=ALL)
        worker.add_key("none", directives=frozenset())
        assert "X-Upstream" in (await harness.call(*BALANCE, X_Upstream=FIRST, **more)).fault(403)["message"]
        assert "X-Retry" in (await harness.call(*BALANCE, key="none", X_Retry="0", **more)).fault(403)["message"]
        unknown = await harness.call(*BALANCE, key="operator", X_Upstream="fourth", **more)
        assert "'fourth'" in unknown.fault(400)["message"]
        for name in set(BY_NAME) - {"upstream"}:
            header = BY_NAME[name].header
            for text in ("", "-1", "1,5", "soon", "9" * 300, "\x01", "\xff"):
                options: dict[str, Any] = {header: text, **more}
                reply = await harness.call(BALANCE[0], BALANCE[1], **options)
                message = reply.fault(400)["message"]
                assert header in message or text == "\x01", message
        assert not harness.count("eth_getBalance")


@on_uvloop
async def test_upstream_is_called_by_its_name_in_the_settings() -> None:
    async with rpc_harness(2, options=[{"name": "geth-1"}, {}]) as harness:
        harness.worker.add_key("operator", directives=ALL)
        network = harness.route.network.id
        assert [each.label for each in harness.route.upstreams] == [f"{network}#geth-1", f"{network}#2"]
        assert (await harness.call(*BALANCE, key="operator", X_Upstream=f"{network}#geth-1")).status == 200
        assert harness.upstreams[0].count("eth_getBalance") == 1


@on_uvloop
async def test_query_parameters_are_directives_too() -> None:
    async with rpc_harness() as harness:
        harness.worker.add_key("operator", directives=ALL)
        key = harness.worker.keys["operator"]

        async def send(query: str, **headers: str) -> Any:
            async with await harness.worker.connect() as client:
                target = f"/v1/rpc/{LIVE}?{query}"
                return await client.send(request("POST", target, rpc(*BALANCE), key=key, **headers))

        assert (await send(f"upstream={quote(THIRD)}&other=1")).status == 200
        assert asked(harness, "eth_getBalance") == [0, 0, 1]
        assert "X-Retry" in (await send("retry=7")).fault(400)["message"]
        assert "once" in (await send("retry=0&retry=1")).fault(400)["message"]
        assert "once" in (await send("retry=0", X_Retry="0")).fault(400)["message"]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("more", SERVED_BY)
@on_uvloop
async def test_call_is_given_up_at_its_own_deadline(count: int, more: dict[str, str]) -> None:
    async with rpc_harness(count) as harness:
        for each in harness.upstreams:
            each.held.add("eth_getBalance")
        reply = await harness.call(*BALANCE, X_Timeout_Ms="120", **more)
        assert "120 ms" in reply.fault(504)["message"]
        batch = await harness.batch(BALANCE, ("eth_chainId", []), X_Timeout_Ms="120", **more)
        assert "120 ms" in batch.json[0]["error"]["message"]
        assert "result" in batch.json[1]
        for each in harness.upstreams:
            each.gate.set()
        assert "up" in harness.states
        assert (await harness.call(*BALANCE, X_Timeout_Ms="20000", **more)).status == 200


@pytest.mark.parametrize("more", SERVED_BY)
@on_uvloop
async def test_failed_call_is_not_repeated_without_retries(more: dict[str, str]) -> None:
    async with rpc_harness(3, faults=False, **NO_CACHE) as harness:
        for each in harness.upstreams:
            each.limited, each.limited_by, each.retry_after = 1, 500, None
        reply = await harness.call(*BALANCE, X_Retry="0", **more)
        assert reply.status == 500, reply
        assert sum(each.limited for each in harness.upstreams) == 2
        assert (await harness.call(*BALANCE, **more)).status == 200


@pytest.mark.parametrize("more", SERVED_BY)
@on_uvloop
async def test_stale_reply_is_accepted_on_request_only(more: dict[str, str]) -> None:
    chain = Chain()
    async with rpc_harness(2, chain=chain) as harness:
        first = await harness.call(*BALANCE)
        assert first.headers["x-cache"] == "miss"
        chain.head += 1
        await harness.look()
        stale = await harness.call(*BALANCE, X_Max_Stale="600", **more)
        assert (stale.headers["x-cache"], stale.json["result"]) == ("stale", first.json["result"])
        fresh = await harness.call(*BALANCE, X_Max_Stale="0", **more)
        assert fresh.headers["x-cache"] == "miss"
        assert (await harness.call(*BALANCE, X_Max_Stale="600", **more)).headers["x-cache"] == "hit"


@on_uvloop
async def test_rest_read_has_directives_too() -> None:
    async with running_worker({TEST: ["http://127.0.0.1:1/"]}) as worker, await worker.connect() as client:
        path = "/v1/chains"
        good = await client.send(request("GET", f"{path}?timeout_ms=20000", key=worker.keys["main"]))
        assert good.status == 200, good
        bad = await client.send(request("GET", path, key=worker.keys["main"], X_Timeout_Ms="never"))
        assert "X-Timeout-Ms" in bad.fault(400)["message"]
        worker.add_key("operator", directives=ALL)
        pinned = await client.send(request("GET", path, key=worker.keys["operator"], X_Upstream="a"))
        assert "only with JSON-RPC" in pinned.fault(400)["message"]
        verified = await client.send(request("GET", path, key=worker.keys["main"], X_Verify="proof"))
        assert "only with JSON-RPC" in verified.fault(400)["message"]


# Invalid as a value of any directive, a label included, since there is no such upstream.
HOSTILE = ("", " ", "-1", "1,5", "soon", "NaN", "[1]", "9" * 300, "\xff", "1; drop table keys", "0x")


@on_uvloop
async def test_hostile_value_is_refused_on_every_path() -> None:
    async with rpc_harness(1) as harness:
        worker = harness.worker
        worker.add_key("operator", directives=ALL)
        key = worker.keys["operator"]
        paths = (
            ("GET", "/v1/chains", b""),
            ("POST", f"/v1/rpc/{LIVE}", rpc(*BALANCE)),
            ("POST", f"/v1/rpc/{LIVE}", b"[" + rpc(*BALANCE) + b"]"),
            ("POST", f"/v1/paymaster/{LIVE}", rpc("pm_nothing")),
        )
        for directive in DIRECTIVES:
            async with await worker.connect() as client:
                for text in HOSTILE:
                    header: dict[str, Any] = {directive.header: text}
                    for method, path, body in paths:
                        reply = await client.send(request(method, path, body, key=key, **header))
                        assert directive.header in reply.fault(400)["message"], (path, text)
                        query = f"{path}?{directive.name}={quote(text)}"
                        reply = await client.send(request(method, query, body, key=key))
                        assert directive.header in reply.fault(400)["message"], (query, text)
                    # The helper leaves out headers without a value.
                    opened = handshake(worker, key="operator", **{directive.header: text or " "})
                    queried = handshake(worker, key="operator").replace(
                        b" HTTP/1.1", f"&{directive.name}={quote(text)} HTTP/1.1".encode(), 1
                    )
                    for sent in (opened, queried):
                        async with await worker.connect() as other:
                            reply = await other.send(sent)
                        assert directive.header in reply.fault(400)["message"], (sent, text)
        assert not harness.count("eth_getBalance")


@on_uvloop
async def test_repeated_directive_is_refused_on_every_path() -> None:
    async with rpc_harness(1) as harness, await harness.worker.connect() as client:
        key = harness.worker.keys["main"]
        twice = b"\r\nX-Retry: 0\r\nX-Retry: 0\r\n\r\n"
        for sent in (request("GET", "/v1/chains", key=key), harness.worker.post(rpc(*BALANCE))):
            reply = await client.send(sent.replace(b"\r\n\r\n", twice, 1))
            assert "X-Retry must be given once" in reply.fault(400)["message"]


@on_uvloop
async def test_directives_of_a_handshake_apply_to_every_call_of_the_socket() -> None:
    async with rpc_harness() as harness:
        worker = harness.worker
        worker.add_key("operator", directives=ALL)
        assert "X-Retry" in (await refused(worker, X_Retry="many")).fault(400)["message"]
        async with bare(worker, key="operator", X_Upstream=SECOND) as socket:
            for _ in range(3):
                socket.write(rpc(*BALANCE))
                assert "result" in await socket.json()
        assert asked(harness, "eth_getBalance") == [0, 3, 0]
