"""A page of another origin calls the API with a key, in a real browser."""

from __future__ import annotations

from typing import Any

from playwright.async_api import Page

from proxy.core import access
from tests.browser.visitor import Site

CALL = """async ([url, key]) => {
  const call = { jsonrpc: "2.0", id: 1, method: "eth_chainId", params: [] };
  const headers = { "Content-Type": "application/json", "X-API-Key": key };
  try {
    const reply = await fetch(url, { method: "POST", headers, body: JSON.stringify(call) });
    const names = ["X-RateLimit-Limit", "X-Request-Id"];
    return { status: reply.status, body: await reply.json(), headers: names.map((name) => reply.headers.get(name)) };
  } catch (fault) {
    return { blocked: fault.message };
  }
}"""


async def test_page_calls_with_a_key_that_allows_its_origin(site: Site, page: Page) -> None:
    service = site.service
    # The same server under another name is another origin.
    origin = f"http://localhost:{service.port}"
    await page.goto(f"{origin}/healthz")
    account = (await service.new_account("growth"))["id"]
    allowed = await service.new_key(account, "--allow-origin", origin)
    other = await service.new_key(account, "--allow-origin", "https://elsewhere.example")
    plain = await service.new_key(account)

    async def call(key: str) -> Any:
        return await page.evaluate(CALL, [f"{service.base}/rpc/ethereum/sepolia", key])

    found = await call(allowed["key"])
    assert found["status"] == 200
    assert "result" in found["body"]
    assert found["headers"][0] == "100"
    assert found["headers"][1]
    unknown = await call(access.mint("live", bytes(32)))
    assert (unknown["status"], unknown["body"]["error"]["code"]) == (401, "unauthorized")
    assert "blocked" in await call(other["key"])
    assert "blocked" in await call(plain["key"])
