"""Very many verified calls of one account leave room for those of others."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import orjson

from proxy.services.rpc import verifier
from tests.http_client import rpc
from tests.service import until
from tests.web.worker import LIVE, on_uvloop, running_worker
from tests.wire.upstreams import Scripted, held, stub

QUORUM = {"X_Verify": "quorum 2/3"}
BATCH = 1000


def calls(first: int) -> bytes:
    return b"[" + b",".join(rpc("eth_getBalance", [f"0x{first + n:040x}", "0x1"], id=n) for n in range(BATCH)) + b"]"


@on_uvloop
async def test_account_with_too_many_verified_calls_is_refused_and_others_are_not() -> None:
    gate = asyncio.Event()
    async with AsyncExitStack() as stack:
        script = held(gate, stub({"eth_getBalance": "0x1"}))
        upstreams = [await stack.enter_async_context(Scripted(script)) for _ in range(3)]
        worker = await stack.enter_async_context(running_worker({LIVE: [each.url for each in upstreams]}))
        worker.add_key("attacker")
        async with asyncio.TaskGroup() as group:
            floods = [
                group.create_task(worker.send(calls(number * BATCH), key="attacker", **QUORUM))
                for number in range(verifier.MOST_KNOWN // BATCH + 1)
            ]
            known = worker.app.plane.verifier.known
            await until(lambda: known("acc_2") == verifier.MOST_KNOWN_OF_ACCOUNT)
            good = group.create_task(worker.send(rpc("eth_getBalance", ["0x" + "7" * 40, "0x1"]), **QUORUM))
            await until(lambda: known("acc_1") or good.done())
            gate.set()
        assert good.result().json["result"] == "0x1"
        items = [item for flood in floods for item in orjson.loads(flood.result().body)]
        codes = {item["error"]["code"] for item in items if "error" in item}
        assert codes == {-32005}
        assert sum("result" in item for item in items) >= verifier.MOST_KNOWN_OF_ACCOUNT
