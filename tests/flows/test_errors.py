"""Every error, from any layer, has the specified JSON body and reveals no internals."""

from __future__ import annotations

import asyncio
import gzip
import re
from typing import Any

import pytest
from aiohttp import web

from tests.flows.upstream import PASSWORD, SECRET_PATH, USER, Upstream, reply
from tests.http_client import Closed, HttpClient, Reply, fresh_call, post, request, rpc, send_once
from tests.service import Service

CAP = 1_048_576
READ = rpc("eth_chainId")
SEPOLIA, HOODI = "ethereum/sepolia", "ethereum/hoodi"


@pytest.fixture
def key(service: Service) -> str:
    return service.keys["enterprise"]


# The router


@pytest.mark.parametrize(
    "target",
    ["/v1", "/v1/", "/v2/rpc/dev/mainnet", "/v1/nope", "/v1/rpc/dev", "/v1/rpc/dev/mainnet//", "//", "/%2e%2e/"],
)  # fmt: skip
async def test_unknown_path_is_not_found(service: Service, key: str, target: str) -> None:
    (await send_once(service, request("POST", target, READ, key=key))).fault(404)


@pytest.mark.parametrize("target", ["/v1/gas/ethereum/prices", "/docs/nope.js", "/docs/../proxy/app.py", "/metrics"])
async def test_unserved_paths_are_not_found(service: Service, key: str, target: str) -> None:
    """An unconfigured network, a missing page, a file outside the pages, the metrics path."""
    (await send_once(service, request("GET", target, key=key))).fault(404)


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
async def test_wrong_method_names_the_allowed_ones(service: Service, key: str, method: str) -> None:
    reply = await send_once(service, request(method, "/v1/rpc/dev/mainnet", key=key))
    reply.fault(405)
    assert reply.headers["allow"] == "POST"


async def test_head_of_a_page_has_no_body(service: Service) -> None:
    async with await HttpClient.open(service.port) as client:
        await client.write(b"HEAD /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        raw = await client.reader.read()
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert body == b""


@pytest.mark.parametrize("network", ["dev/%zz", "dev/%", "dev/%f", "%ff%fe/mainnet", "dev/main%00net", "dev/..%2fx"])
async def test_invalid_percent_encoding_in_a_path_is_a_client_error(service: Service, key: str, network: str) -> None:
    reply = await send_once(service, post(READ, key=key, network=network))
    assert reply.status in (400, 404)
    reply.fault(reply.status)


async def test_encoded_path_finds_the_same_network(service: Service, key: str) -> None:
    assert (await send_once(service, post(READ, key=key, network="de%76/mainnet"))).status == 200


@pytest.mark.parametrize(
    ("method", "target", "message"),
    [
        ("POST", "/v1/rpc/ethereum/sepola", "there is no network ethereum/sepola; did you mean ethereum/sepolia?"),
        ("POST", "/v1/rpc/def/mainnet", "there is no network def/mainnet; did you mean dev/mainnet?"),
        ("POST", "/v1/rpc/etherium/sepolia", "there is no network etherium/sepolia; did you mean ethereum/sepolia?"),
        (
            *("POST", "/v1/rpc/etherium/mainnet"),
            "there is no network etherium/mainnet; GET /v1/chains lists those that this key can use",
        ),
        (
            "GET",
            "/v1/gas/etherum-sepolia/prices",
            "there is no network etherum-sepolia; did you mean ethereum-sepolia?",
        ),
        (
            *("GET", "/v1/gas/foo/prices"),
            "there is no network foo; GET /v1/chains lists those that this key can use",
        ),
    ],
)
async def test_unknown_network_names_the_nearest(
    service: Service, key: str, method: str, target: str, message: str
) -> None:
    body = READ if method == "POST" else b""
    assert (await send_once(service, request(method, target, body, key=key))).fault(404)["message"] == message


async def test_chains_lists_the_networks_of_the_key(service: Service) -> None:
    status, live = await service.send("GET", "/chains", key="free")
    assert status == 200
    found = {f"{each['chain']}/{each['network']}": each for each in live["networks"]}
    assert found.keys() == {"dev/mainnet", "dev/testnet", "ethereum/sepolia", "ethereum/hoodi"}
    assert found["ethereum/sepolia"]["explorers"] == ["https://sepolia.etherscan.io"]
    assert found["ethereum/sepolia"]["chain_id"] == 11155111
    assert found["dev/mainnet"]["native"] == {"symbol": "ETH", "decimals": 18}
    assert {"rpc", "archive", "webhooks", "tokens", "sponsorship"} <= set(found["dev/mainnet"]["features"])
    assert "webhooks" not in found["ethereum/sepolia"]["features"]
    status, test = await service.send("GET", "/chains", key="test")
    assert {each["class"] for each in test["networks"]} == {"test"}


async def test_key_with_any_scope_lists_chains(service: Service) -> None:
    account = await service.new_account()
    made = await service.new_key(account["id"], "--mode", "test", "--scope", "data:read")
    assert (await service.send("GET", "/chains", key=made["key"]))[0] == 200


async def test_unknown_network_and_network_without_upstream_differ(service: Service, key: str) -> None:
    unknown = await send_once(service, post(READ, key=key, network="atlantis/mainnet"))
    known = await send_once(service, post(READ, key=key, network="polygon/mainnet"))
    assert "atlantis" in unknown.fault(404)["message"]
    assert "no upstream" in known.fault(404)["message"]


# The parser

MALFORMED = {
    "no request line": b"hello\r\n\r\n",
    "no version": b"POST /v1/rpc/dev/mainnet\r\nHost: x\r\n\r\n",
    "unknown version": b"POST /v1/rpc/dev/mainnet HTTP/9.9\r\nHost: x\r\n\r\n",
    "bad method": b"P OST /v1/rpc/dev/mainnet HTTP/1.1\r\nHost: x\r\n\r\n",
    "space in the target": b"GET /v1/a b HTTP/1.1\r\nHost: x\r\n\r\n",
    "header without colon": b"GET /healthz HTTP/1.1\r\nHost: x\r\nnonsense\r\n\r\n",
    "space before the colon": b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-A : 1\r\n\r\n",
    "folded header": b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-A: 1\r\n 2\r\n\r\n",
    "NUL in a header": b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-A: \0\r\n\r\n",
    "NUL in the target": b"GET /health\0z HTTP/1.1\r\nHost: x\r\n\r\n",
    "NULs only": b"\0" * 64 + b"\r\n\r\n",
    "two lengths": b"POST /v1/rpc/dev/mainnet HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "length that is no number": b"POST /v1/rpc/dev/mainnet HTTP/1.1\r\nHost: x\r\nContent-Length: +2\r\n\r\n{}",
    "length and chunks": b"POST /v1/rpc/dev/mainnet HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "unknown transfer coding": b"POST /v1/rpc/dev/mainnet HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: cow\r\n\r\n{}",
    "TLS": bytes.fromhex("16030100c8010000c40303") + b"\x00" * 64 + b"\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "too many headers": b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"X-A: 1\r\n" * 1000 + b"\r\n",
    "huge header": b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 100_000 + b"\r\n\r\n",
    "huge target": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_invalid_http_gets_an_error_body_and_is_closed(service: Service, name: str) -> None:
    async with await HttpClient.open(service.port) as client:
        reply = await client.send(MALFORMED[name])
        assert 400 <= reply.status < 500
        reply.fault(reply.status)
        assert await client.is_closed()


async def test_invalid_chunked_body_is_a_client_error(service: Service, key: str) -> None:
    head = post(b"", key=key, Transfer_Encoding="chunked").replace(b"Content-Length: 0\r\n", b"")
    async with await HttpClient.open(service.port) as client:
        reply = await client.send(head + b"zz\r\n{}\r\n0\r\n\r\n")
    reply.fault(400)


async def test_malformed_request_does_not_affect_other_connections(service: Service, key: str) -> None:
    async with await HttpClient.open(service.port) as good:
        assert (await good.call(key=key)).status == 200
        for data in MALFORMED.values():
            async with await HttpClient.open(service.port) as bad:
                await bad.write(data)
                async with asyncio.timeout(30):
                    await bad.reader.read(1)
        assert (await good.call(key=key)).status == 200


# The body


async def test_body_over_the_limit_is_refused_by_its_content_length(service: Service, key: str) -> None:
    head = post(b"", key=key, Content_Length=str(CAP + 1))
    async with await HttpClient.open(service.port) as client:
        reply = await client.send(head)
    assert str(CAP) in reply.fault(413)["message"]
    assert reply.closes


async def test_chunked_body_over_the_limit_is_refused_while_it_arrives(service: Service, key: str) -> None:
    head = post(b"", key=key, Transfer_Encoding="chunked").replace(b"Content-Length: 0\r\n", b"")
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    async with await HttpClient.open(service.port) as client:
        reply = await client.send(head + chunk * 40)
        reply.fault(413)


async def test_body_of_exactly_the_limit_is_read(service: Service, key: str) -> None:
    body = READ + b" " * (CAP - len(READ))
    assert (await send_once(service, post(body, key=key))).json["result"] == "0x7a69"


async def test_chunked_body_is_read(service: Service, key: str) -> None:
    head = post(b"", key=key, Transfer_Encoding="chunked").replace(b"Content-Length: 0\r\n", b"")
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in READ)
    assert (await send_once(service, head + chunks + b"0\r\n\r\n")).json["result"] == "0x7a69"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""])
async def test_wrong_content_type_is_unsupported(service: Service, key: str, kind: str) -> None:
    (await send_once(service, post(READ, key=key, Content_Type=kind))).fault(415)


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
async def test_common_spellings_of_the_json_content_type_are_accepted(service: Service, key: str, kind: str) -> None:
    assert (await send_once(service, post(READ, key=key, Content_Type=kind))).status == 200


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "gzip, identity"])
async def test_compressed_body_is_unsupported(service: Service, key: str, coding: str) -> None:
    bomb = gzip.compress(b" " * 1_000_000)
    (await send_once(service, post(bomb, key=key, Content_Encoding=coding))).fault(415)


NO_CALLS: dict[str, tuple[bytes, int]] = {
    "empty": (b"", -32700),
    "no JSON": (b"{", -32700),
    "not UTF-8": (b'{"jsonrpc":"2.0","id":1,"method":"\xff"}', 0),
    "NULs": (b"\0\0\0", -32700),
    "a number": (b"7", -32600),
    "a string": (b'"x"', -32600),
    "null": (b"null", -32600),
    "an empty object": (b"{}", -32600),
    "an empty batch": (b"[]", -32600),
    "no method": (b'{"jsonrpc":"2.0","id":1}', -32600),
    "no version": (b'{"id":1,"method":"eth_chainId"}', -32600),
    "another version": (b'{"jsonrpc":"1.0","id":1,"method":"eth_chainId"}', -32600),
    "method of a wrong type": (b'{"jsonrpc":"2.0","id":1,"method":7}', -32600),
    "params of a wrong type": (b'{"jsonrpc":"2.0","id":1,"method":"eth_chainId","params":7}', -32600),
    "id of a wrong type": (b'{"jsonrpc":"2.0","id":{},"method":"eth_chainId"}', -32600),
    "a member too many": (b'{"jsonrpc":"2.0","id":1,"method":"eth_chainId","METHOD":"eth_sendRawTransaction"}', -32600),
    "nested too deeply": (b"[" * 100_000 + b"]" * 100_000, -32700),
    "nested params": (b'{"jsonrpc":"2.0","id":1,"method":"eth_call","params":' + b"[" * 50_000 + b"]" * 50_000 + b"}", 0),
    "1001 items": (b"[" + b",".join([READ] * 1001) + b"]", -32600),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_CALLS)
async def test_body_that_is_not_a_call_is_a_bad_request_with_its_rpc_code(
    service: Service, key: str, name: str
) -> None:
    body, code = NO_CALLS[name]
    error = (await send_once(service, post(body, key=key))).fault(400)
    assert error["details"]["rpc_code"] == code or not code


async def test_unknown_method_is_a_json_rpc_error_under_the_callers_id(service: Service, key: str) -> None:
    for method in ("eth_nope", "personal_sign", "admin_peers", "eth_sendTransaction", "ETH_CHAINID", "eth_chainId\n"):
        reply = await send_once(service, post(rpc(method, id="mine"), key=key))
        assert (reply.status, reply.json["id"], reply.json["error"]["code"]) == (200, "mine", -32601)


# HTTP features that clients use


async def test_http_1_0_is_answered_and_closed(service: Service, key: str) -> None:
    data = post(READ, key=key).replace(b"HTTP/1.1", b"HTTP/1.0")
    async with await HttpClient.open(service.port) as client:
        assert (await client.send(data)).json["result"] == "0x7a69"
        assert await client.is_closed()


async def test_expect_continue_is_answered_before_the_body_is_sent(service: Service, key: str) -> None:
    data = post(READ, key=key, Expect="100-continue")
    head, body = data[: -len(READ)], data[-len(READ) :]
    async with await HttpClient.open(service.port) as client:
        await client.write(head)
        async with asyncio.timeout(30):
            assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        assert (await client.send(body)).json["result"] == "0x7a69"


@pytest.mark.parametrize(
    ("method", "target"), [("POST", "/v1/rpc/dev/mainnet"), ("GET", "/v1/wallets"), ("GET", "/healthz"), ("GET", "/no")]
)
async def test_unknown_expectation_gets_an_error_body(service: Service, key: str, method: str, target: str) -> None:
    (await send_once(service, request(method, target, READ, key=key, Expect="the-unexpected"))).fault(417)


async def test_unknown_expectation_is_answered_as_every_other_error(service: Service, key: str) -> None:
    async with await HttpClient.open(service.port) as client:
        said = await client.send(post(READ, key=key, Expect="the-unexpected"))
        assert "Expect" in said.fault(417)["message"]
        assert said.headers["x-request-id"]
        assert said.headers["x-ratelimit-limit"]
        assert (await client.call(key=key)).status == 200


async def test_absolute_target_is_the_same_path(service: Service, key: str) -> None:
    target = f"http://127.0.0.1:{service.port}/v1/rpc/dev/mainnet"
    assert (await send_once(service, request("POST", target, READ, key=key))).json["result"] == "0x7a69"


async def test_pipelined_requests_are_answered_in_order(service: Service, key: str) -> None:
    async with await HttpClient.open(service.port) as client:
        await client.write(b"".join(post(rpc("eth_chainId", id=index), key=key) for index in range(20)))
        assert [(await client.reply()).json["id"] for _ in range(20)] == list(range(20))


async def test_request_sent_byte_by_byte_is_read(service: Service, key: str) -> None:
    async with await HttpClient.open(service.port) as client:
        for byte in post(READ, key=key):
            await client.write(bytes([byte]))
            await asyncio.sleep(0)
        assert (await client.reply()).json["result"] == "0x7a69"


@pytest.mark.parametrize("given", ["a", "req-1_Z", "x" * 64])
async def test_well_formed_request_id_is_echoed(service: Service, key: str, given: str) -> None:
    for data in (post(READ, key=key, X_Request_Id=given), request("GET", "/v1/nope", X_Request_Id=given)):
        assert (await send_once(service, data)).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "x" * 65, "a b", "a\u560a", "<script>", "a%0d%0aX: 1", "ä", "a;b"])
async def test_malformed_request_id_is_replaced(service: Service, key: str, given: str) -> None:
    said = (await send_once(service, post(READ, key=key, X_Request_Id=given))).headers["x-request-id"]
    assert re.fullmatch(r"[A-Za-z0-9_-]{8,64}", said)
    assert said != given


async def test_every_reply_has_its_own_request_id(service: Service, key: str) -> None:
    async with await HttpClient.open(service.port) as client:
        said = [(await client.send(post(READ, key=key))).headers["x-request-id"] for _ in range(50)]
    assert len(set(said)) == 50


# Upstreams that fail


async def _hang_up(_call: dict[str, Any]) -> web.StreamResponse:
    raise ConnectionResetError


async def _error_page(_call: dict[str, Any]) -> web.StreamResponse:
    return web.Response(status=500, text=f"<html>Traceback {USER}:{PASSWORD} /{SECRET_PATH}</html>")


async def _unauthorized(_call: dict[str, Any]) -> web.StreamResponse:
    return web.Response(status=401, text=f'{{"error":"bad key {PASSWORD}"}}', content_type="application/json")


async def _no_json(_call: dict[str, Any]) -> web.StreamResponse:
    return web.Response(text=f"{PASSWORD}", content_type="application/json")


async def _another_id(call: dict[str, Any]) -> web.StreamResponse:
    return reply({**call, "id": 999_999_999}, result="0x1")


async def _redirect(_call: dict[str, Any]) -> web.StreamResponse:
    return web.Response(status=302, headers={"Location": f"http://{USER}:{PASSWORD}@127.0.0.1:1/{SECRET_PATH}"})


def hides_the_upstream(reply: Reply, upstream: Upstream) -> None:
    text = reply.body.decode() + repr(reply.headers)
    for secret in (USER + ":", PASSWORD, SECRET_PATH, str(upstream.port), "127.0.0.1", "html", "Traceback"):
        assert secret not in text, (secret, text)


@pytest.mark.parametrize("act", [_hang_up, _error_page, _unauthorized, _no_json, _another_id, _redirect])
async def test_failing_upstream_is_an_internal_error_without_its_address(
    service: Service, faulty: Upstream, key: str, act: Any
) -> None:
    faulty.act = act
    reply = await send_once(service, post(fresh_call(), key=key, network=HOODI))
    assert reply.status in (500, 503)
    reply.fault(reply.status)
    hides_the_upstream(reply, faulty)


async def test_unreachable_upstream_is_an_internal_error_without_its_address(
    service: Service, faulty: Upstream, key: str
) -> None:
    """The call costs nothing, because the failure is the service's."""
    await faulty.close()
    try:
        reply = await send_once(service, post(fresh_call(), key=key, network=HOODI))
        assert reply.status in (500, 503)
        reply.fault(reply.status)
        hides_the_upstream(reply, faulty)
        assert reply.headers["x-ratelimit-remaining"] == reply.headers["x-ratelimit-limit"]
    finally:
        await faulty.open()


async def test_upstream_error_passes_through_with_its_code_and_data(
    service: Service, upstream: Upstream, key: str
) -> None:
    async def revert(call: dict[str, Any]) -> web.StreamResponse:
        return reply(call, error={"code": 3, "message": "execution reverted", "data": "0x08c379a0"})

    upstream.act = revert
    call = rpc("eth_call", [{}, "latest"], id="mine")
    answer = await send_once(service, post(call, key=key, network=SEPOLIA, Cache_Control="no-cache"))
    assert answer.status == 200
    assert answer.json == {
        "jsonrpc": "2.0",
        "id": "mine",
        "error": {"code": 3, "message": "execution reverted", "data": "0x08c379a0"},
    }


async def test_failed_item_of_a_batch_has_its_own_error(service: Service, upstream: Upstream, key: str) -> None:
    async def some(call: dict[str, Any]) -> web.StreamResponse:
        return await _another_id(call) if call["method"] == "eth_gasPrice" else reply(call, result="0x1")

    upstream.act = some
    body = b"[" + rpc("eth_maxPriorityFeePerGas", id=1) + b"," + rpc("eth_gasPrice", id=2) + b"]"
    answer = await send_once(service, post(body, key=key, network=SEPOLIA, Cache_Control="no-cache"))
    assert [item.get("result") for item in answer.json] == ["0x1", None]
    assert answer.json[1]["error"]["code"] == -32603
    hides_the_upstream(answer, upstream)


async def test_client_that_disconnects_midway_affects_no_other_client(
    service: Service, upstream: Upstream, key: str
) -> None:
    data = post(fresh_call(), key=key, network=SEPOLIA)
    for cut in (1, 20, len(data) // 2, len(data)):
        for _ in range(5):
            client = await HttpClient.open(service.port)
            await client.write(data[:cut])
            client.writer.transport.abort()
            with pytest.raises(Closed):
                await client.reply()
    assert (await send_once(service, data)).status == 200
