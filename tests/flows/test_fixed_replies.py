"""Replies of the settings to calls with given params."""

from __future__ import annotations

import pytest

from proxy.core.fixed_replies import FixedReplies
from tests.rpc_harness import rpc_harness
from tests.web.worker import LIVE, on_uvloop

ADDRESS = "0x" + 40 * "a"
REPLIES = [
    {"network": LIVE, "method": "eth_getCode", "params": f'["{ADDRESS}", "latest"]', "result": '"0x60"'},
    {
        "network": LIVE,
        "method": "eth_getCode",
        "params": f'["{ADDRESS}", "0x1"]',
        "error": '{"code":-32000,"message":"no"}',
    },
    {"network": LIVE, "method": "eth_gasPrice", "result": "null"},
]


@pytest.mark.parametrize("count", [1, 2])
@on_uvloop
async def test_call_with_these_params_reaches_no_upstream(count: int) -> None:
    async with rpc_harness(count, replies=REPLIES, cache={"enabled": False}) as harness:
        reply = await harness.call("eth_getCode", [ADDRESS, "latest"])
        assert (reply.json["result"], int(reply.headers["x-compute-units"]) > 0) == ("0x60", True)
        assert (await harness.call("eth_getCode", [ADDRESS, "0x1"])).json["error"] == {"code": -32000, "message": "no"}
        assert (await harness.call("eth_gasPrice")).json["result"] is None
        batch = await harness.batch(("eth_getCode", [ADDRESS, "latest"]), ("eth_getBalance", [ADDRESS, "latest"]))
        assert batch.json[0]["result"] == "0x60"
        assert harness.count("eth_getCode") == harness.count("eth_gasPrice") == 0
        assert await harness.result("eth_getCode", [ADDRESS.upper().replace("X", "x"), "latest"]) != "0x60"
        assert harness.count("eth_getCode") == 1


def test_spaces_and_the_order_of_members_do_not_matter() -> None:
    found = FixedReplies([('[{"to":"0x1","data":"0x2"},"latest"]', "1", "")])
    assert found.find(b'[ {"data":"0x2", "to":"0x1"}, "latest" ]') == (b"1", b"")
    assert found.find(b'[{"to":"0x1","data":"0x3"},"latest"]') is None
    assert found.find(b"") is None
    assert found.find(b"[" + b" " * 1000 + b"]") is None
