"""The banner's promise: a key from the ready file and a call that works."""

from __future__ import annotations

from tests.service import Service


async def test_banner_key_reads_the_dev_chain(service: Service) -> None:
    response = await service.rpc("eth_chainId", key="free")
    assert response.status == 200
    assert await response.json() == {"jsonrpc": "2.0", "id": 1, "result": "0x7a69"}
    assert response.headers["X-RateLimit-Limit"] == "10"


async def test_call_without_a_key_is_unauthorized(service: Service) -> None:
    response = await service.post("/rpc/dev/mainnet", {}, key=None)
    assert response.status == 401
    assert (await response.json())["error"]["code"] == "unauthorized"
