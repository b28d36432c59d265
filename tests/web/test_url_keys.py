"""Keys in URLs and in Basic authentication, over HTTP and on sockets: with permission, without it, and beside headers."""

from __future__ import annotations

import base64
from typing import Any

import aiohttp
import pytest

from proxy.core.access import KeyRestrictions
from proxy.web.front.front_connection import FrontConnection
from tests.http_client import Reply, request, rpc
from tests.web.worker import LIVE, Worker, on_uvloop, running_worker
from tests.wire.upstreams import Scripted

CALL = rpc("eth_gasPrice")
PATH = f"/v1/rpc/{LIVE}"
FORMS = (f"{PATH}/{{key}}", f"{PATH}?apiKey={{key}}")
APP = "https://app.example.com"


async def send(worker: Worker, target: str, body: bytes = CALL, *, method: str = "POST", **headers: Any) -> Reply:
    async with await worker.connect() as client:
        return await client.send(request(method, target, body, **headers))


def basic(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"


@pytest.mark.parametrize("form", FORMS)
@on_uvloop
async def test_hot_path_serves_allowed_keys_in_urls(form: str) -> None:
    async with Scripted() as upstream, running_worker(upstream.url) as worker:
        worker.add_key("open", allow_in_url=True)
        async with await worker.connect() as client:
            for _ in range(4):
                reply = await client.send(request("POST", form.format(key=worker.keys["open"]), CALL))
                assert reply.status == 200
                assert reply.headers["x-ratelimit-limit"] == "100000"
            assert isinstance(worker.only_connection, FrontConnection)


@on_uvloop
async def test_hot_path_serves_basic_authentication_without_permission() -> None:
    """The password is in a header. Clients of Bitcoin's JSON-RPC have nothing else."""
    async with Scripted() as upstream, running_worker(upstream.url) as worker, await worker.connect() as client:
        for text in (f"user:{worker.keys['main']}", f"{worker.keys['main']}:"):
            for _ in range(3):
                assert (await client.send(request("POST", PATH, CALL, Authorization=basic(text)))).status == 200
        assert isinstance(worker.only_connection, FrontConnection)


@pytest.mark.parametrize("form", FORMS)
@on_uvloop
async def test_key_without_permission_works_in_the_header_only(form: str) -> None:
    async with Scripted() as upstream, running_worker(upstream.url) as worker:
        key = worker.keys["main"]
        for _ in range(3):
            reply = await send(worker, form.format(key=key))
            error = reply.fault(403)
            assert error["reason"] == "url"
            assert "header X-API-Key" in error["message"]
            assert "dashboard" in error["message"]
        for headers in ({"X_API_Key": key}, {"Authorization": f"Bearer {key}"}, {"Authorization": basic(f"x:{key}")}):
            assert (await send(worker, form.format(key=key), CALL, **headers)).status == 200


@pytest.mark.parametrize("form", FORMS)
@on_uvloop
async def test_two_different_keys_are_refused(form: str) -> None:
    async with Scripted() as upstream, running_worker(upstream.url) as worker:
        worker.add_key("open", allow_in_url=True)
        main, other = worker.keys["main"], worker.keys["open"]
        target = form.format(key=other)
        for headers in (
            {"X_API_Key": main},
            {"Authorization": f"Bearer {main}"},
            {"Authorization": basic(f"x:{main}")},
        ):
            assert "two different" in (await send(worker, target, CALL, **headers)).fault(400)["message"]
        assert "two different" in (await send(worker, f"{PATH}/{other}?apiKey={main}")).fault(400)["message"]
        assert (await send(worker, f"{PATH}/{other}?apiKey={other}")).status == 200


@on_uvloop
async def test_changed_permission_holds_at_once_on_open_connections() -> None:
    async with Scripted() as upstream, running_worker(upstream.url) as worker:
        key = worker.add_key("open", allow_in_url=True)
        asked = request("POST", f"{PATH}/{worker.keys['open']}", CALL)
        async with await worker.connect() as client:
            for _ in range(3):
                assert (await client.send(asked)).status == 200
            key.invalidate()
            worker.app.keyring.remove(key)
            worker.keys.pop("open")
            worker.add_key("open")
            (await client.send(asked)).fault(403)


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("GET", "/v1/chains?apiKey={key}", 200),
        ("GET", "/v1/wallets?limit=ten&apiKey={key}", 400),
        ("POST", f"/v1/rpc/{LIVE}/{{key}}x", 401),
        ("POST", f"/v1/rpc/{LIVE}/svc_live_{{key}}", 401),
        ("POST", "/v1/rpc/atlantis/mainnet/{key}", 404),
        ("POST", f"/v1/rpc/{LIVE}/{{key}}/", 404),
        ("POST", f"/v1/rpc/{LIVE}/{{key}}/more", 404),
        ("GET", f"/v1/rpc/{LIVE}/{{key}}", 405),
        ("POST", f"http://x/v1/rpc/{LIVE}/{{key}}", 200),
        ("POST", f"http://x/v1/rpc/{LIVE}?apiKey={{key}}", 200),
        ("POST", f"/v1/rpc/{LIVE}/%73vc{{rest}}", 200),
        ("POST", f"/v1/rpc/{LIVE}/{{key}}?nope=1", 200),
        ("POST", f"/v1/rpc/{LIVE}/{{key}}#x", 400),
    ],
)
@on_uvloop
async def test_keys_in_urls_reach_every_path(method: str, target: str, status: int) -> None:
    async with Scripted() as upstream, running_worker(upstream.url) as worker:
        worker.add_key("open", allow_in_url=True)
        key = worker.keys["open"]
        body = CALL if method == "POST" else b""
        reply = await send(worker, target.format(key=key, rest=key[3:]), body, method=method)
        assert reply.status == status, reply
        assert key.encode() not in reply.body
        assert key not in repr(reply.headers)


@on_uvloop
async def test_socket_takes_every_key_in_the_query_and_allowed_ones_in_the_path() -> None:
    async with Scripted() as upstream, running_worker(upstream.url) as worker, aiohttp.ClientSession() as session:
        worker.add_key("open", allow_in_url=True)
        main, other = worker.keys["main"], worker.keys["open"]
        base = f"http://127.0.0.1:{worker.port}/v1/ws/{LIVE}"
        good: list[tuple[str, dict[str, Any]]] = [
            (f"{base}?apiKey={main}", {}),
            (f"{base}/{other}", {}),
            (f"{base}/{other}?apiKey={other}", {}),
            (f"{base}/{main}", {"X-API-Key": main}),
            (base, {"Authorization": basic(f"x:{main}")}),
        ]
        for url, headers in good:
            async with session.ws_connect(url, headers=headers) as ws:
                await ws.send_json({"jsonrpc": "2.0", "id": 1, "method": "eth_gasPrice"})
                assert "result" in await ws.receive_json()
        for url, status in ((f"{base}/{main}", 403), (f"{base}/{other}?apiKey={main}", 400), (f"{base}/x", 401)):
            with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
                await session.ws_connect(url)
            assert caught.value.status == status


@on_uvloop
async def test_page_of_an_allowed_origin_uses_a_key_in_the_url() -> None:
    """A browser sends no preflight for a key in the URL, other than for the content type of JSON."""
    async with Scripted() as upstream, running_worker(upstream.url) as worker:
        page = worker.add_key("page", allow_in_url=True)
        worker.app.keyring.remove(page)
        page.restrictions, page.needs_full_checks, page.alive = KeyRestrictions((), (APP,)), True, True
        worker.app.keyring.add(page)
        for form in FORMS:
            target = form.format(key=worker.keys["page"])
            asked = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "content-type"}
            allowed = await send(worker, target, b"", method="OPTIONS", Origin=APP, **asked)
            assert (allowed.status, allowed.headers["access-control-allow-methods"]) == (204, "POST")
            reply = await send(worker, target, Origin=APP)
            assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, APP)
            (await send(worker, target, Origin="https://elsewhere.example")).fault(403)
            (await send(worker, target)).fault(403)


@on_uvloop
async def test_hot_path_serves_aliases() -> None:
    async with Scripted() as upstream, running_worker(upstream.url, aliases={"alchemy": True, "erpc": True}) as worker:
        worker.add_key("open", allow_in_url=True)
        key = worker.keys["open"]
        good: list[tuple[str, dict[str, str]]] = [
            (f"/alchemy/eth-mainnet/v2/{key}", {}),
            (f"/v2/{key}", {"Host": "eth-mainnet.example.com"}),
            (f"/main/evm/1?secret={key}", {}),
            ("/main/evm/1", {"X_API_Key": key}),
        ]
        for target, headers in good:
            async with await worker.connect() as client:
                for _ in range(3):
                    assert (await client.send(request("POST", target, CALL, key=None, **headers))).status == 200, target
                assert isinstance(worker.only_connection, FrontConnection)
        # Another host names another network.
        other = await send(worker, f"/v2/{key}", CALL, Host="base-mainnet.example.com")
        assert "base/mainnet" in other.fault(404)["message"]
        for target in (f"/infura/mainnet/v3/{key}", f"/v2/{key}", "/alchemy/eth-mainnet/v2/"):
            assert (await send(worker, target)).status == 404
        assert (await send(worker, f"/alchemy/eth-mainnet/v2/{worker.keys['main']}")).fault(403)["reason"] == "url"
        assert (await send(worker, "/alchemy/eth-mainnet/v2/abc")).fault(401)
        assert (await send(worker, f"/alchemy/eth-mainnet/v2/{key}", b"", method="GET")).status == 426


@on_uvloop
async def test_socket_opens_at_an_alias() -> None:
    async with (
        Scripted() as upstream,
        running_worker(upstream.url, aliases={"infura": True}) as worker,
        aiohttp.ClientSession() as session,
    ):
        worker.add_key("open", allow_in_url=True)
        url = f"http://127.0.0.1:{worker.port}/infura/mainnet/ws/v3/{worker.keys['open']}"
        async with session.ws_connect(url) as ws:
            await ws.send_json({"jsonrpc": "2.0", "id": 1, "method": "eth_gasPrice"})
            assert "result" in await ws.receive_json()
