"""The webhook API for owners. test_webhook_events and test_deliveries cover the deliveries."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from proxy.chains.evm.watch_index import KINDS
from tests.service import Service
from tests.shapes import conforms

URL = "https://hooks.example.com/penstock"
ADDRESS = "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed"
OTHER = "0xfB6916095ca1df60bB79Ce92cE3Ea74c37c5d359"
_rng = random.Random(8)


async def make(service: Service, event_type: str = "address_activity", *, key: str = "enterprise", **more: Any) -> Any:
    body = {"url": URL, "chain": "dev", "event_type": event_type, "config": {"addresses": [ADDRESS]}, **more}
    status, made = await service.send("POST", "/webhooks", body, key=key)
    assert status == 201, made
    return made


@pytest.fixture
async def webhook(service: Service) -> AsyncIterator[Any]:
    made = await make(service)
    yield made
    await service.send("DELETE", f"/webhooks/{made['id']}")


async def test_created_webhook_has_the_specified_fields(service: Service, webhook: Any) -> None:
    conforms(webhook, "CreatedWebhook")
    assert set(webhook) == {
        "id", "url", "chain", "event_type", "config", "signing_secret", "status", "created_at",
    }  # fmt: skip
    assert webhook["id"].startswith("wh_")
    assert (webhook["chain"], webhook["status"], webhook["config"]) == ("dev", "active", {"addresses": [ADDRESS]})
    assert len(base64.b64decode(webhook["signing_secret"].removeprefix("whsec_"))) >= 24


@pytest.mark.parametrize("event_type", KINDS)
async def test_config_is_optional(service: Service, event_type: str) -> None:
    status, made = await service.send("POST", "/webhooks", {"url": URL, "chain": "dev", "event_type": event_type})
    # On a busy machine it can take a while until the mempool is watched.
    started = ("active", "starting") if event_type == "PENDING_TRANSACTION" else ("active",)
    assert (status, made["status"] in started) == (201, True)
    conforms(made, "CreatedWebhook")
    await service.send("DELETE", f"/webhooks/{made['id']}")


async def test_secret_is_shown_once(service: Service, webhook: Any) -> None:
    path = f"/webhooks/{webhook['id']}"
    answers = [
        await service.send("GET", path),
        await service.send("GET", "/webhooks"),
        await service.send("PATCH", path, {"status": "paused"}),
    ]
    assert not [reply for _, reply in answers if "whsec_" in str(reply) or "secret" in str(reply)]


async def test_webhook_is_read_with_its_full_config(service: Service) -> None:
    config = {"addresses": [ADDRESS], "direction": "incoming", "min_value": "10", "confirmations": 2}
    made = await make(service, config=config)
    status, reply = await service.send("GET", f"/webhooks/{made['id']}")
    assert status == 200
    conforms(reply, "Webhook")
    assert reply["config"] == config
    assert reply["status_reason"] is None


async def test_webhooks_are_listed_by_page_and_status(service: Service) -> None:
    account = await service.new_account("growth")
    key = (await service.new_key(account["id"], "--name", "one", "--mode", "live"))["key"]
    made = [await make(service, key=key) for _ in range(3)]
    await service.send("PATCH", f"/webhooks/{made[1]['id']}", {"status": "paused"}, key=key)
    status, reply = await service.send("GET", "/webhooks?limit=2", key=key)
    assert status == 200
    conforms(reply, "WebhookList")
    assert (reply["total"], reply["page"]) == (3, 1)
    assert [each["id"] for each in reply["webhooks"]] == [made[2]["id"], made[1]["id"]]
    assert set(reply["webhooks"][0]) == {"id", "url", "chain", "event_type", "status", "created_at", "health"}
    _, paused = await service.send("GET", "/webhooks?status=paused", key=key)
    assert [each["id"] for each in paused["webhooks"]] == [made[1]["id"]]
    _, disabled = await service.send("GET", "/webhooks?status=disabled", key=key)
    assert disabled == {"webhooks": [], "page": 1, "total": 0}


async def test_change_of_a_webhook_leaves_other_members_unchanged(service: Service, webhook: Any) -> None:
    path = f"/webhooks/{webhook['id']}"
    status, reply = await service.send("PATCH", path, {"url": "https://hooks.example.com/other"})
    assert status == 200
    conforms(reply, "UpdatedWebhook")
    assert set(reply) == {"id", "url", "chain", "event_type", "status", "updated_at"}
    await service.send("PATCH", path, {"config": {"addresses": [OTHER], "direction": "outgoing"}})
    await service.send("PATCH", path, {"status": "paused"})
    _, found = await service.send("GET", path)
    assert found["url"] == "https://hooks.example.com/other"
    assert found["config"] == {"addresses": [OTHER], "direction": "outgoing"}
    assert (found["status"], found["status_reason"]) == ("paused", "owner")
    status, reply = await service.send("PATCH", path, {"status": "active"})
    assert (status, reply["status"]) == (200, "active")


async def test_only_webhooks_of_test_keys_have_a_fault_plan(service: Service, webhook: Any) -> None:
    status, reply = await service.send("PATCH", f"/webhooks/{webhook['id']}", {"fault": "duplicate=1"})
    assert (status, "test key" in reply["error"]["message"]) == (400, True)
    body = {"url": URL, "chain": "dev", "event_type": "NEW_BLOCK", "fault": "delay=2s, p=0.5"}
    status, reply = await service.send("POST", "/webhooks", body)
    assert (status, "test key" in reply["error"]["message"]) == (400, True)
    status, made = await service.send("POST", "/webhooks", body, key="test")
    assert (status, made["fault"]) == (201, "delay=2s, p=0.5")
    conforms(made, "CreatedWebhook")
    path = f"/webhooks/{made['id']}"
    for plan in ("status=503", "explode", "p=0.5", "duplicate=9", "x" * 200, "\x01"):
        status, reply = await service.send("PATCH", path, {"fault": plan}, key="test")
        assert (status, "fault" in reply["error"]["message"]) == (400, True), reply
    for plan, shown in (("correction", "correction"), ("", None)):
        status, reply = await service.send("PATCH", path, {"fault": plan}, key="test")
        assert (status, reply["fault"]) == (200, shown)
        conforms(reply, "UpdatedWebhook")
        _, found = await service.send("GET", path, key="test")
        assert conforms(found, "Webhook")["fault"] == shown
    await service.send("DELETE", path, key="test")


async def test_addresses_are_added_and_removed(service: Service, webhook: Any) -> None:
    path = f"/webhooks/{webhook['id']}"
    change = {"add_addresses": [OTHER, OTHER.lower(), ADDRESS], "remove_addresses": ["0x" + "99" * 20]}
    status, _ = await service.send("PATCH", path, change)
    assert status == 200
    _, found = await service.send("GET", path)
    assert {*found["config"]["addresses"]} == {ADDRESS, OTHER}
    await service.send("PATCH", path, {"remove_addresses": [ADDRESS]})
    _, found = await service.send("GET", path)
    assert found["config"]["addresses"] == [OTHER]


async def test_a_hundred_thousand_addresses_are_accepted_and_more_are_refused(service: Service) -> None:
    many = ["0x" + _rng.randbytes(20).hex() for _ in range(100_000)]
    body = {"url": URL, "chain": "dev", "event_type": "address_activity", "config": {"addresses": many}}
    headers = {"X-API-Key": service.keys["enterprise"], "Content-Type": "application/json"}
    large = io.BytesIO(orjson.dumps(body))
    async with service.session.post(f"{service.base}/webhooks", data=large, headers=headers) as response:
        made = orjson.loads(await response.read())
        assert response.status == 201
    path = f"/webhooks/{made['id']}"
    assert len(made["config"]["addresses"]) == 100_000
    status, reply = await service.send("PATCH", path, {"add_addresses": [ADDRESS]})
    assert status == 400
    assert "add_addresses" in reply["error"]["message"]
    status, _ = await service.send("PATCH", path, {"add_addresses": [ADDRESS], "remove_addresses": many[:1]})
    assert status == 200
    _, found = await service.send("GET", path)
    assert {each.lower() for each in found["config"]["addresses"]} == {*many[1:], ADDRESS.lower()}
    assert (await service.send("DELETE", path))[0] == 200


async def test_long_filters_cost_what_they_write_and_look_up(service: Service) -> None:
    """A unit for 100 addresses, and for each transaction that is new two calls at their price."""

    async def cost(method: str, path: str, body: Any) -> tuple[int, Any]:
        headers = {"X-API-Key": service.keys["enterprise"], "Content-Type": "application/json"}
        async with service.session.request(
            method, service.base + path, data=orjson.dumps(body), headers=headers
        ) as got:
            assert got.status in (200, 201), await got.text()
            return int(got.headers["X-Compute-Units"]), orjson.loads(await got.read())

    body = {"url": URL, "chain": "dev", "event_type": "address_activity"}
    many = ["0x" + _rng.randbytes(20).hex() for _ in range(1_250)]
    units, made = await cost("POST", "/webhooks", {**body, "config": {"addresses": many}})
    assert units == 12
    path = f"/webhooks/{made['id']}"
    assert (await cost("PATCH", path, {"remove_addresses": many[:500]}))[0] == 5
    assert (await cost("PATCH", path, {"url": URL}))[0] == 1
    more = ["0x" + _rng.randbytes(20).hex() for _ in range(12_000)]
    assert (await cost("PATCH", path, {"add_addresses": more}))[0] == 120
    hashes = ["0x" + _rng.randbytes(32).hex() for _ in range(30)]
    body["event_type"] = "mined_transaction"
    units, made = await cost("POST", "/webhooks", {**body, "config": {"tx_hashes": hashes[:20]}})
    assert units == 20 * 2 * 2
    assert (await cost("PATCH", f"/webhooks/{made['id']}", {"config": {"tx_hashes": hashes}}))[0] == 10 * 2 * 2


async def test_large_body_costs_its_size_whatever_becomes_of_it(service: Service) -> None:
    headers = {"X-API-Key": service.keys["enterprise"], "Content-Type": "application/json"}
    body = b'{"config":{"a":[' + b"[]," * 300_000 + b"0]}}"
    async with service.session.post(f"{service.base}/webhooks", data=body, headers=headers) as got:
        assert got.status == 400
        assert int(got.headers["X-Compute-Units"]) > 100


async def test_deleted_webhook_is_not_found(service: Service, webhook: Any) -> None:
    path = f"/webhooks/{webhook['id']}"
    assert await service.send("DELETE", path) == (200, {"id": webhook["id"], "deleted": True})
    for method, body in (("GET", None), ("PATCH", {"status": "paused"}), ("DELETE", None)):
        status, reply = await service.send(method, path, body)
        assert (status, reply["error"]["code"]) == (404, "not_found")


async def test_webhook_of_another_account_is_not_found(service: Service, webhook: Any) -> None:
    absent = "wh_" + "0" * 24
    calls: list[tuple[str, str, Any]] = [
        ("GET", "", None),
        ("PATCH", "", {"status": "paused"}),
        ("PATCH", "", {"add_addresses": [OTHER]}),
        ("DELETE", "", None),
        ("POST", "/resume", None),
        ("POST", "/rotate", None),
    ]
    for method, tail, body in calls:
        theirs = await service.send(method, f"/webhooks/{webhook['id']}{tail}", body, key="growth")
        missing = await service.send(method, f"/webhooks/{absent}{tail}", body, key="growth")
        assert theirs[0] == missing[0] == 404, (method, tail)
        assert str(theirs[1]).replace(webhook["id"], "") == str(missing[1]).replace(absent, "")
    assert (await service.send("GET", f"/webhooks/{webhook['id']}"))[1]["status"] == "active"


async def test_test_key_cannot_access_webhooks_of_a_live_network(service: Service) -> None:
    made = await make(service, key="growth")
    status, reply = await service.send("GET", f"/webhooks/{made['id']}", key="test")
    assert status == 403, reply
    _, listed = await service.send("GET", "/webhooks", key="test")
    assert made["id"] not in [each["id"] for each in listed["webhooks"]]
    own = await make(service, key="test")
    assert own["chain"] == "dev"
    assert (await service.send("GET", f"/webhooks/{own['id']}", key="growth"))[1]["chain"] == "dev-testnet"
    for each in (made, own):
        await service.send("DELETE", f"/webhooks/{each['id']}", key="growth")


async def test_key_without_the_scope_is_refused(service: Service) -> None:
    account = await service.new_account("growth")
    key = (await service.new_key(account["id"], "--name", "r", "--mode", "live", "--scope", "rpc:read"))["key"]
    assert (await service.send("GET", "/webhooks", key=key))[0] == 403


async def test_plan_limits_the_number_of_webhooks(service: Service) -> None:
    account = await service.new_account("free")
    key = (await service.new_key(account["id"], "--name", "f", "--mode", "live"))["key"]
    made = [await make(service, key=key) for _ in range(5)]
    body = {"url": URL, "chain": "dev", "event_type": "NEW_BLOCK"}
    status, reply = await service.send("POST", "/webhooks", body, key=key)
    assert status == 403
    assert "5 webhooks" in reply["error"]["message"]
    await service.send("DELETE", f"/webhooks/{made[0]['id']}", key=key)
    assert (await service.send("POST", "/webhooks", body, key=key))[0] == 201


async def test_rotation_returns_a_new_secret_and_the_expiry_of_the_old_one(service: Service, webhook: Any) -> None:
    status, reply = await service.send("POST", f"/webhooks/{webhook['id']}/rotate")
    assert status == 200
    conforms(reply, "RotatedSecret")
    assert reply["signing_secret"] != webhook["signing_secret"]


async def test_paused_webhook_is_resumed(service: Service, webhook: Any) -> None:
    path = f"/webhooks/{webhook['id']}"
    await service.send("PATCH", path, {"status": "paused"})
    status, reply = await service.send("POST", f"{path}/resume")
    assert (status, reply["status"]) == (200, "active")
    assert (await service.send("GET", path))[1]["status_reason"] is None


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"url": "http://hooks.example.com/"}, "url"),
        ({"url": "https://user:pass@hooks.example.com/"}, "url"),
        ({"url": "https://10.0.0.1/"}, "url"),
        ({"url": "https://0x7f.1/"}, "url"),
        ({"url": "https://metadata.internal/"}, "url"),
        ({"url": "ftp://hooks.example.com/"}, "url"),
        ({"chain": "solana"}, "chain"),
        ({"event_type": "nothing"}, "event_type"),
        ({"config": {"direction": "incoming"}}, "config.addresses"),
        ({"config": {"addresses": []}}, "config.addresses"),
        ({"config": {"addresses": ["0x12"]}}, "config.addresses.0"),
        ({"config": {"addresses": [ADDRESS, ADDRESS.replace("a", "A", 1)]}}, "config.addresses.1"),
        ({"config": {"addresses": [ADDRESS], "nothing": 1}}, "config.nothing"),
        ({"config": {"addresses": [ADDRESS], "direction": "up"}}, "config.direction"),
        ({"config": {"addresses": [ADDRESS], "min_value": 5}}, "config.min_value"),
        ({"config": {"addresses": [ADDRESS], "finality": "soon"}}, "config.finality"),
        ({"config": {"addresses": [ADDRESS], "confirmations": 0}}, "config.confirmations"),
        ({"config": {"addresses": [ADDRESS], "confirmations": True}}, "config.confirmations"),
        ({"config": {"addresses": [ADDRESS], "finality": "safe", "confirmations": 2}}, "config.confirmations"),
        ({"config": "all"}, "config"),
        ({"unknown": 1}, "unknown"),
    ],
)
async def test_error_names_the_invalid_member(service: Service, change: dict[str, Any], names: str) -> None:
    body = {"url": URL, "chain": "dev", "event_type": "address_activity", "config": {"addresses": [ADDRESS]}, **change}
    status, reply = await service.send("POST", "/webhooks", body)
    if names == "chain":  # without an upstream it is not found
        assert status in (400, 404)
        return
    assert (status, reply["error"]["code"]) == (400, "invalid_request"), reply
    assert names in reply["error"]["message"]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"status": "disabled"}, "status"),
        ({"url": "https://127.0.0.1./"}, "url"),
        ({"config": {"addresses": [OTHER]}, "add_addresses": [ADDRESS]}, "config"),
        ({"add_addresses": ["nothing"]}, "add_addresses.0"),
        ({"config": {"topics": []}}, "config"),
    ],
)
async def test_refused_change_changes_nothing(
    service: Service, webhook: Any, change: dict[str, Any], names: str
) -> None:
    path = f"/webhooks/{webhook['id']}"
    _, before = await service.send("GET", path)
    status, reply = await service.send("PATCH", path, change)
    assert status == 400, reply
    assert names in reply["error"]["message"]
    assert (await service.send("GET", path))[1] == before


async def test_development_service_allows_local_http_urls(service: Service) -> None:
    for url in ("http://127.0.0.1:9/x", "http://localhost:9/x", "http://[::1]:9/x"):
        made = await make(service, url=url)
        assert made["url"] == url
        await service.send("DELETE", f"/webhooks/{made['id']}")


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"from_block": 5, "to_block": 4}, "to_block"),
        ({"from_block": 0, "to_block": 10**6}, "to_block"),
        ({"event_type": "PENDING_TRANSACTION"}, "event_type"),
        ({"config": {"contracts": ["x"]}}, "config.contracts.0"),
    ],
)
async def test_invalid_back_test_is_refused(service: Service, change: dict[str, Any], names: str) -> None:
    body = {
        "chain": "dev",
        "event_type": "token_transfer",
        "config": {"contracts": [ADDRESS]},
        "from_block": 0,
        "to_block": 1,
        **change,
    }
    status, reply = await service.send("POST", "/webhooks/backtest", body)
    assert status == 400, reply
    assert names in reply["error"]["message"]
