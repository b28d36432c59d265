"""The banner's examples: a key from the ready file and a call that works."""

from __future__ import annotations

from tests.service import Service

NAMES = {
    *("base_url", "ws_url", "dashboard_url", "metrics_url", "upstream_url", "bundler_url"),
    *("keys", "funded_account", "entry_points", "factories", "paymasters", "tokens", "nfts", "admin_token"),
}


async def test_ready_file_has_the_documented_members(service: Service) -> None:
    assert set(service.ready) >= NAMES
    assert service.base.endswith("/v1")
    assert set(service.keys) == {"free", "growth", "enterprise", "test"}
    assert set(service.ready["funded_account"]) == {"address", "private_key"}


async def test_operator_token_of_the_ready_file_opens_the_admin_api(service: Service) -> None:
    response = await service.get("/v1/admin/networks", Authorization=f"Bearer {service.ready['admin_token']}")
    assert response.status == 200


async def test_key_of_the_banner_reads_the_dev_chain(service: Service) -> None:
    response = await service.rpc("eth_chainId", key="free")
    assert response.status == 200
    assert await response.json() == {"jsonrpc": "2.0", "id": 1, "result": "0x7a69"}
    assert response.headers["X-RateLimit-Limit"] == "10"


async def test_call_without_a_key_is_unauthorized(service: Service) -> None:
    response = await service.post("/rpc/dev/mainnet", {}, key=None)
    assert response.status == 401
    assert (await response.json())["error"]["code"] == "unauthorized"
