"""Webhooks over HTTP, as their owners see them. What is told to receivers is in test_webhook_events and test_deliveries."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from tests.flows.test_gas_policies import ask
from tests.service import Service
from tests.shapes import conforms

URL = "https://hooks.example.com/penstock"
ADDRESS = "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed"
OTHER = "0xfB6916095ca1df60bB79Ce92cE3Ea74c37c5d359"
_chance = random.Random(8)


async def make(service: Service, event_type: str = "address_activity", *, key: str = "enterprise", **more: Any) -> Any:
    body = {"url": URL, "chain": "dev", "event_type": event_type, "config": {"addresses": [ADDRESS]}, **more}
    status, made = await ask(service, "POST", "/webhooks", body, key=key)
    assert status == 201, made
    return made


@pytest.fixture
async def webhook(service: Service) -> AsyncIterator[Any]:
    made = await make(service)
    yield made
    await ask(service, "DELETE", f"/webhooks/{made['id']}")


async def test_created_webhook_has_the_fields_of_the_contract(service: Service, webhook: Any) -> None:
    conforms(webhook, "CreatedWebhook")
    assert set(webhook) == {
        "id", "url", "chain", "event_type", "config", "signing_secret", "status", "created_at",
    }  # fmt: skip
    assert webhook["id"].startswith("wh_")
    assert (webhook["chain"], webhook["status"], webhook["config"]) == ("dev", "active", {"addresses": [ADDRESS]})
    assert len(base64.b64decode(webhook["signing_secret"].removeprefix("whsec_"))) >= 24


async def test_secret_is_shown_once(service: Service, webhook: Any) -> None:
    path = f"/webhooks/{webhook['id']}"
    answers = [
        await ask(service, "GET", path),
        await ask(service, "GET", "/webhooks"),
        await ask(service, "PATCH", path, {"status": "paused"}),
    ]
    assert not [said for _, said in answers if "whsec_" in str(said) or "secret" in str(said)]


async def test_webhook_is_read_with_its_whole_filter(service: Service) -> None:
    config = {"addresses": [ADDRESS], "direction": "incoming", "min_value": "10", "confirmations": 2}
    made = await make(service, config=config)
    status, said = await ask(service, "GET", f"/webhooks/{made['id']}")
    assert status == 200
    conforms(said, "Webhook")
    assert said["config"] == config
    assert said["status_reason"] is None


async def test_webhooks_are_listed_by_page_and_status(service: Service) -> None:
    account = await service.new_account("growth")
    key = (await service.new_key(account["id"], "--name", "one", "--mode", "live"))["key"]
    made = [await make(service, key=key) for _ in range(3)]
    await ask(service, "PATCH", f"/webhooks/{made[1]['id']}", {"status": "paused"}, key=key)
    status, said = await ask(service, "GET", "/webhooks?limit=2", key=key)
    assert status == 200
    conforms(said, "WebhookList")
    assert (said["total"], said["page"]) == (3, 1)
    assert [each["id"] for each in said["webhooks"]] == [made[2]["id"], made[1]["id"]]
    assert set(said["webhooks"][0]) == {"id", "url", "chain", "event_type", "status", "created_at"}
    _, paused = await ask(service, "GET", "/webhooks?status=paused", key=key)
    assert [each["id"] for each in paused["webhooks"]] == [made[1]["id"]]
    _, disabled = await ask(service, "GET", "/webhooks?status=disabled", key=key)
    assert disabled == {"webhooks": [], "page": 1, "total": 0}


async def test_webhook_is_changed_and_the_rest_stays(service: Service, webhook: Any) -> None:
    path = f"/webhooks/{webhook['id']}"
    status, said = await ask(service, "PATCH", path, {"url": "https://hooks.example.com/other"})
    assert status == 200
    conforms(said, "UpdatedWebhook")
    assert set(said) == {"id", "url", "chain", "event_type", "status", "updated_at"}
    await ask(service, "PATCH", path, {"config": {"addresses": [OTHER], "direction": "outgoing"}})
    await ask(service, "PATCH", path, {"status": "paused"})
    _, found = await ask(service, "GET", path)
    assert found["url"] == "https://hooks.example.com/other"
    assert found["config"] == {"addresses": [OTHER], "direction": "outgoing"}
    assert (found["status"], found["status_reason"]) == ("paused", "owner")
    status, said = await ask(service, "PATCH", path, {"status": "active"})
    assert (status, said["status"]) == (200, "active")


async def test_addresses_are_added_and_removed_by_delta(service: Service, webhook: Any) -> None:
    path = f"/webhooks/{webhook['id']}"
    change = {"add_addresses": [OTHER, OTHER.lower(), ADDRESS], "remove_addresses": ["0x" + "99" * 20]}
    status, _ = await ask(service, "PATCH", path, change)
    assert status == 200
    _, found = await ask(service, "GET", path)
    assert {*found["config"]["addresses"]} == {ADDRESS, OTHER}
    await ask(service, "PATCH", path, {"remove_addresses": [ADDRESS]})
    _, found = await ask(service, "GET", path)
    assert found["config"]["addresses"] == [OTHER]


async def test_a_hundred_thousand_addresses_are_taken_and_a_few_more_are_not(service: Service) -> None:
    many = ["0x" + _chance.randbytes(20).hex() for _ in range(100_000)]
    body = {"url": URL, "chain": "dev", "event_type": "address_activity", "config": {"addresses": many}}
    headers = {"X-API-Key": service.keys["enterprise"], "Content-Type": "application/json"}
    large = io.BytesIO(orjson.dumps(body))
    async with service.session.post(f"{service.base}/webhooks", data=large, headers=headers) as response:
        made = orjson.loads(await response.read())
        assert response.status == 201
    path = f"/webhooks/{made['id']}"
    assert len(made["config"]["addresses"]) == 100_000
    status, said = await ask(service, "PATCH", path, {"add_addresses": [ADDRESS]})
    assert status == 400
    assert "add_addresses" in said["error"]["message"]
    status, _ = await ask(service, "PATCH", path, {"add_addresses": [ADDRESS], "remove_addresses": many[:1]})
    assert status == 200
    _, found = await ask(service, "GET", path)
    assert {each.lower() for each in found["config"]["addresses"]} == {*many[1:], ADDRESS.lower()}
    assert (await ask(service, "DELETE", path))[0] == 200


async def test_deleted_webhook_is_gone(service: Service, webhook: Any) -> None:
    path = f"/webhooks/{webhook['id']}"
    assert await ask(service, "DELETE", path) == (200, {"id": webhook["id"], "deleted": True})
    for method, body in (("GET", None), ("PATCH", {"status": "paused"}), ("DELETE", None)):
        status, said = await ask(service, method, path, body)
        assert (status, said["error"]["code"]) == (404, "not_found")


async def test_somebody_elses_webhook_is_as_one_that_is_not_there(service: Service, webhook: Any) -> None:
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
        theirs = await ask(service, method, f"/webhooks/{webhook['id']}{tail}", body, key="growth")
        nobodys = await ask(service, method, f"/webhooks/{absent}{tail}", body, key="growth")
        assert theirs[0] == nobodys[0] == 404, (method, tail)
        assert str(theirs[1]).replace(webhook["id"], "") == str(nobodys[1]).replace(absent, "")
    assert (await ask(service, "GET", f"/webhooks/{webhook['id']}"))[1]["status"] == "active"


async def test_test_key_reaches_no_webhook_of_a_live_network(service: Service) -> None:
    made = await make(service, key="growth")
    status, said = await ask(service, "GET", f"/webhooks/{made['id']}", key="test")
    assert status == 403, said
    _, listed = await ask(service, "GET", "/webhooks", key="test")
    assert made["id"] not in [each["id"] for each in listed["webhooks"]]
    own = await make(service, key="test")
    assert own["chain"] == "dev"
    assert (await ask(service, "GET", f"/webhooks/{own['id']}", key="growth"))[1]["chain"] == "dev-testnet"
    for each in (made, own):
        await ask(service, "DELETE", f"/webhooks/{each['id']}", key="growth")


async def test_key_without_the_scope_is_refused(service: Service) -> None:
    account = await service.new_account("growth")
    key = (await service.new_key(account["id"], "--name", "r", "--mode", "live", "--scope", "rpc:read"))["key"]
    assert (await ask(service, "GET", "/webhooks", key=key))[0] == 403


async def test_plan_limits_the_number_of_webhooks(service: Service) -> None:
    account = await service.new_account("free")
    key = (await service.new_key(account["id"], "--name", "f", "--mode", "live"))["key"]
    made = [await make(service, key=key) for _ in range(5)]
    body = {"url": URL, "chain": "dev", "event_type": "NEW_BLOCK"}
    status, said = await ask(service, "POST", "/webhooks", body, key=key)
    assert status == 403
    assert "5 webhooks" in said["error"]["message"]
    await ask(service, "DELETE", f"/webhooks/{made[0]['id']}", key=key)
    assert (await ask(service, "POST", "/webhooks", body, key=key))[0] == 201


async def test_rotation_gives_a_new_secret_and_says_until_when_the_old_one_signs(
    service: Service, webhook: Any
) -> None:
    status, said = await ask(service, "POST", f"/webhooks/{webhook['id']}/rotate")
    assert status == 200
    conforms(said, "RotatedSecret")
    assert said["signing_secret"] != webhook["signing_secret"]


async def test_paused_webhook_is_resumed(service: Service, webhook: Any) -> None:
    path = f"/webhooks/{webhook['id']}"
    await ask(service, "PATCH", path, {"status": "paused"})
    status, said = await ask(service, "POST", f"{path}/resume")
    assert (status, said["status"]) == (200, "active")
    assert (await ask(service, "GET", path))[1]["status_reason"] is None


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
        ({"config": {}}, "config.addresses"),
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
async def test_refusal_names_what_is_wrong(service: Service, change: dict[str, Any], names: str) -> None:
    body = {"url": URL, "chain": "dev", "event_type": "address_activity", "config": {"addresses": [ADDRESS]}, **change}
    status, said = await ask(service, "POST", "/webhooks", body)
    if names == "chain":  # without an upstream it is not even found
        assert status in (400, 404)
        return
    assert (status, said["error"]["code"]) == (400, "invalid_request"), said
    assert names in said["error"]["message"]


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
    _, before = await ask(service, "GET", path)
    status, said = await ask(service, "PATCH", path, change)
    assert status == 400, said
    assert names in said["error"]["message"]
    assert (await ask(service, "GET", path))[1] == before


async def test_machine_itself_is_reached_over_plain_http_while_developing(service: Service) -> None:
    for url in ("http://127.0.0.1:9/x", "http://localhost:9/x", "http://[::1]:9/x"):
        made = await make(service, url=url)
        assert made["url"] == url
        await ask(service, "DELETE", f"/webhooks/{made['id']}")


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"from_block": 5, "to_block": 4}, "to_block"),
        ({"from_block": 0, "to_block": 10**6}, "to_block"),
        ({"event_type": "PENDING_TRANSACTION"}, "event_type"),
        ({"config": {"contracts": ["x"]}}, "config.contracts.0"),
    ],
)
async def test_back_test_that_makes_no_sense_is_refused(service: Service, change: dict[str, Any], names: str) -> None:
    body = {
        "chain": "dev",
        "event_type": "token_transfer",
        "config": {"contracts": [ADDRESS]},
        "from_block": 0,
        "to_block": 1,
        **change,
    }
    status, said = await ask(service, "POST", "/webhooks/backtest", body)
    assert status == 400, said
    assert names in said["error"]["message"]
