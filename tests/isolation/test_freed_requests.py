"""What a refused request held is freed with its reply: nothing waits for the garbage collector, which runs rarely."""

from __future__ import annotations

import gc
from collections import Counter
from types import FrameType

from proxy.web.front.handler_connection import MAX_UNWANTED_BYTES
from tests.http_client import Closed
from tests.rpc_harness import rpc_harness
from tests.web.worker import LIVE, Worker, on_uvloop

MIB = 1 << 20
RPC, WALLETS = f"/v1/rpc/{LIVE}", "/v1/wallets/create"
# Path, body, type of its content, and whether a key is sent.
REFUSED = (
    (WALLETS, b'{"owner":"x","unknown":[%b]}' % b",".join([b"[]"] * 200_000), "application/json", True),
    (WALLETS, b'{"owner":', "application/json", True),
    (WALLETS, b'{"owner":"\xff"}', "application/json", True),
    (WALLETS, b'{"owner":"%b"}' % (b"x" * 9 * MIB), "application/json", True),
    (WALLETS, b"<owner/>", "text/xml", True),
    (WALLETS, b"{}", "application/json", False),
    ("/v1/nowhere", b"{}" * 2 * MAX_UNWANTED_BYTES, "application/json", True),
    (RPC, b"<call/>", "text/xml", True),
    (RPC, b"[%b]" % b",".join([b"[]"] * 200_000), "application/json", True),
    (RPC, b'{"method":"eth_call","params":[%b]}' % (b"[" * 2000), "application/json", True),
    ("/v1/paymaster/ethereum/mainnet", b'{"jsonrpc":"2.0","id":1,"method":"pm_nothing"}', "application/json", True),
)


@on_uvloop
async def test_refused_requests_leave_nothing_to_the_garbage_collector() -> None:
    async with rpc_harness(1) as harness:
        worker = harness.worker
        await _send_all(worker)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            await _send_all(worker)
            gc.collect()
            frames = Counter(map(_place, filter(_is_of_the_service, gc.garbage)))
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert not frames, [*frames.items()]


def _is_of_the_service(found: object) -> bool:
    return isinstance(found, FrameType) and any(each in _place(found) for each in ("/proxy/", "/aiohttp/"))


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


async def _send_all(worker: Worker) -> None:
    for path, body, content_type, has_key in REFUSED:
        key = f"X-API-Key: {worker.keys['main']}\r\n" if has_key else ""
        headers = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {content_type}\r\n{key}Content-Length: {len(body)}"
        async with await worker.connect() as client:
            try:
                reply = await client.send(headers.encode() + b"\r\n\r\n" + body)
                assert reply.status >= 400 or b"error" in reply.body
            except (Closed, ConnectionError):
                pass  # It ended before all of the body was read.
