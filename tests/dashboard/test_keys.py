"""The account holder's API keys: creation, changes, rotation, revocation, and IP and origin restrictions."""

from __future__ import annotations

import datetime
from typing import Any

import aiohttp
import pytest

from proxy.core.directives import USUAL
from tests.dashboard.service import NETWORK, Client, DashboardService, Reply, call, wait_until_known
from tests.http_client import HttpClient, post, rpc
from tests.service import until


async def test_new_key_works_and_is_shown_once(service: DashboardService) -> None:
    holder = await service.holder()
    made = await holder.new_key(name="backend", scopes=["rpc:read"], requests_per_second=7)
    assert made["key"].startswith("svc_test_")
    assert (made["scopes"], made["requests_per_second"], made["status"]) == (["rpc:read"], 7, "active")
    await wait_until_known(service, made["key"])
    assert (await call(service, made["key"])).headers["X-RateLimit-Limit"] == "7"
    shown = (await holder.get("/account/keys")).data["keys"]
    assert [key["id"] for key in shown] == [made["id"]]
    assert "key" not in shown[0]
    assert made["key"] not in (await holder.get(f"/account/keys/{made['id']}")).body.decode()


async def test_last_use_of_a_key_is_recorded(service: DashboardService) -> None:
    holder = await service.holder()
    made = await holder.new_key()
    assert made["last_used_at"] is None
    await wait_until_known(service, made["key"])

    async def is_recorded() -> bool:
        return (await holder.get(f"/account/keys/{made['id']}")).data["last_used_at"] is not None

    await until(is_recorded)


async def test_key_limits_cannot_exceed_the_account_limits(service: DashboardService) -> None:
    holder = await service.holder(await service.account(plan="free"))
    for name, most in (("requests_per_second", 10), ("units_per_second", 200)):
        reply = await holder.post("/account/keys", {"name": "greedy", "mode": "test", name: most + 1})
        assert name in reply.fault(400)
        made = await holder.new_key(**{name: most})
        path = f"/account/keys/{made['id']}"
        assert name in (await holder.request("PATCH", path, {name: most + 1})).fault(400)
        assert (await holder.request("PATCH", path, {name: None})).data[name] is None


async def test_account_has_at_most_the_keys_of_its_plan(service: DashboardService) -> None:
    holder = await service.holder(await service.account(plan="free"))
    made = [await holder.new_key() for _ in range(10)]
    assert "plan allows 10 API keys" in (await holder.post("/account/keys", {"name": "x", "mode": "test"})).fault(403)
    await holder.request("DELETE", f"/account/keys/{made[0]['id']}")
    assert await holder.new_key()


async def test_update_changes_only_the_given_members(service: DashboardService) -> None:
    holder = await service.holder()
    made = await holder.new_key(scopes=["rpc:read"], allowed_ips=["10.0.0.0/8"])
    path = f"/account/keys/{made['id']}"
    changed = (await holder.request("PATCH", path, {"name": "renamed"})).data
    assert (changed["name"], changed["scopes"], changed["allowed_ips"]) == ("renamed", ["rpc:read"], ["10.0.0.0/8"])
    changed = (await holder.request("PATCH", path, {"status": "disabled", "allowed_ips": []})).data
    assert (changed["status"], changed["allowed_ips"]) == ("disabled", [])
    assert (await holder.request("PATCH", path, {"status": "active"})).data["status"] == "active"
    # An empty list does not mean all scopes.
    assert "scopes" in (await holder.request("PATCH", path, {"scopes": []})).fault(400)
    assert (await holder.get(path)).data["scopes"] == ["rpc:read"]


async def test_key_is_limited_to_networks_and_methods(service: DashboardService) -> None:
    holder = await service.holder()
    uses = {"allowed_networks": [NETWORK], "allowed_methods": ["eth_gasPrice"]}
    made = await holder.new_key(**uses)
    assert {name: made[name] for name in uses} == uses
    await wait_until_known(service, made["key"])
    key, path = made["key"], f"/account/keys/{made['id']}"
    assert (await call(service, key)).status == 200
    refused = await call(service, key, "eth_blockNumber")
    remedy = "on the dashboard's page API keys, or with PATCH /v1/account/keys/{id}"
    words = f"this API key may not call eth_blockNumber: change its allowed_methods {remedy}"
    assert (refused.status, refused.data["error"]["message"]) == (403, words)
    async with await HttpClient.open(service.running.port) as client:
        batch = f"[{rpc('eth_gasPrice').decode()},{rpc('eth_blockNumber').decode()}]".encode()
        replies = (await client.send(post(batch, key=key, network=NETWORK))).json
    assert ["error" in each for each in replies] == [False, True]
    await holder.request("PATCH", path, {"allowed_networks": ["ethereum/mainnet"]})

    async def is_elsewhere() -> bool:
        return (await call(service, key)).status == 403

    await until(is_elsewhere)
    fault = (await call(service, key)).data["error"]
    words = f"this API key may not be used on {NETWORK}: change its allowed_networks {remedy}"
    assert (fault["message"], fault["reason"]) == (words, "network")
    assert (await holder.request("PATCH", path, {"allowed_networks": [], "allowed_methods": []})).status == 200

    async def is_free() -> bool:
        return (await call(service, key, "eth_blockNumber")).status == 200

    await until(is_free)
    for wrong in ({"allowed_networks": ["ethereum"]}, {"allowed_methods": ["eth call"]}):
        (name,) = wrong
        assert name in (await holder.request("PATCH", path, wrong)).fault(400)
    for written, meant in (("ethereum/mainet", "did you mean ethereum/mainnet?"), ("nowhere/at-all", "GET /v1/chains")):
        assert meant in (await holder.request("PATCH", path, {"allowed_networks": [written]})).fault(400)


async def test_key_is_allowed_in_urls_only_if_its_holder_says_so(service: DashboardService) -> None:
    holder = await service.holder()
    plain, made = await holder.new_key(), await holder.new_key(allow_in_url=True)
    assert (plain["allow_in_url"], made["allow_in_url"]) == (False, True)
    path = f"/account/keys/{made['id']}"
    rotated = (await holder.post(f"{path}/rotate", {"overlap_s": 60})).data
    assert rotated["allow_in_url"] is True
    assert (await holder.request("PATCH", path, {"name": "other"})).data["allow_in_url"] is True
    assert (await holder.request("PATCH", path, {"allow_in_url": False})).data["allow_in_url"] is False
    assert "allow_in_url" in (await holder.request("PATCH", path, {"allow_in_url": "yes"})).fault(400)


async def test_key_that_sends_private_transactions_keeps_that_until_it_is_changed(service: DashboardService) -> None:
    holder = await service.holder()
    plain, made = await holder.new_key(), await holder.new_key(private_transactions=True)
    assert (plain["private_transactions"], made["private_transactions"]) == (False, True)
    path = f"/account/keys/{made['id']}"
    rotated = (await holder.post(f"{path}/rotate", {"overlap_s": 60})).data
    assert rotated["private_transactions"] is True
    assert (await holder.request("PATCH", path, {"name": "other"})).data["private_transactions"] is True
    assert (await holder.request("PATCH", path, {"private_transactions": False})).data["private_transactions"] is False
    assert "private_transactions" in (await holder.request("PATCH", path, {"private_transactions": 1})).fault(400)


async def test_key_cannot_be_limited_to_methods_that_do_not_exist(service: DashboardService) -> None:
    holder = await service.holder()
    known = ["eth_call", "getSlot", "eth_sendUserOperation", "pm_getPaymasterData", "bor_getAuthor"]
    path = f"/account/keys/{(await holder.new_key(allowed_methods=known))['id']}"
    for written, meant in (("eth_cal", "eth_call"), ("eth_getlogs", "eth_getLogs"), ("getslot", "getSlot")):
        words = (await holder.request("PATCH", path, {"allowed_methods": [written]})).fault(400)
        assert words == f"allowed_methods: there is no method {written}; did you mean {meant}?"
    wrong = {"allowed_methods": ["eth_cal", "nothing", "eth_everything"], "allowed_networks": ["ethereum/mainet"]}
    reply = await holder.post("/account/keys", {"name": "x", "mode": "test", **wrong})
    found = reply.data["error"]["errors"]
    assert [each["param"] for each in found] == ["allowed_networks", *["allowed_methods"] * 3]
    assert "written in full" in found[2]["message"]
    assert (await holder.get(path)).data["allowed_methods"] == known


async def test_key_is_limited_to_contracts(service: DashboardService) -> None:
    holder = await service.holder()
    contract, other = "0x" + "aB" * 20, "0x" + "cd" * 20
    made = await holder.new_key(allowed_contracts=[contract])
    path = f"/account/keys/{made['id']}"
    assert (await holder.get(path)).data["allowed_contracts"] == [contract]  # as it was written
    await wait_until_known(service, made["key"])
    for to, status in ((contract, 200), (contract.lower(), 200), (other, 403)):
        assert (await call(service, made["key"], "eth_call", [{"to": to}, "latest"])).status == status
    rotated = (await holder.post(f"{path}/rotate", {"overlap_s": 60})).data
    assert rotated["allowed_contracts"] == [contract]
    for rest in (
        f"/tokens/ethereum/metadata/{other}",
        f"/tokens/ethereum/balances/{other}",
        f"/nfts/ethereum/owned/{other}",
    ):
        refused = await service.rest("GET", rest, key=made["key"])
        assert (refused.status, refused.data["error"]["reason"]) == (403, "contract"), refused
    hook = {"url": "https://example.com/", "chain": "ethereum", "event_type": "NEW_BLOCK", "config": {}}
    assert (await service.rest("POST", "/webhooks", hook, key=made["key"])).data["error"]["reason"] == "contract"
    assert "allowed_contracts" in (await holder.request("PATCH", path, {"allowed_contracts": ["0x12"]})).fault(400)
    assert (await holder.request("PATCH", path, {"allowed_contracts": []})).data["allowed_contracts"] == []


async def test_limited_key_sees_only_its_networks_and_calls_no_other_paymaster_method(
    service: DashboardService,
) -> None:
    holder = await service.holder()
    made = await holder.new_key(allowed_networks=["ethereum/mainnet"])
    single = await holder.new_key(allowed_methods=["pm_getPaymasterData"])

    async def seen() -> Reply | None:
        reply = await service.rest("GET", "/chains", key=made["key"])
        return reply if reply.status == 200 else None

    assert (await until(seen)).data["networks"] == []
    assert "did you mean" not in (await service.rest("GET", "/gas/etherium/prices", key=made["key"])).fault(404)
    body = {"jsonrpc": "2.0", "id": 1, "method": "pm_getPaymasterStubData", "params": []}

    async def refusal() -> dict[str, Any] | None:
        reply = await service.rest("POST", f"/paymaster/{NETWORK}", body, key=single["key"])
        return dict(reply.data["error"]) if reply.status == 403 else None

    assert (await until(refusal))["message"].startswith("this API key may not call pm_getPaymasterStubData: ")


async def test_lists_of_a_limited_key_have_only_its_networks(service: DashboardService) -> None:
    holder = await service.holder()
    hook = {"url": "https://example.com/", "chain": "ethereum-sepolia", "event_type": "NEW_BLOCK", "config": {}}
    assert (await holder.post("/account/webhooks", hook)).status == 201
    policy = {"name": "Free", "chain": "ethereum-sepolia", "rules": {"max_gas_usd": "0.50"}}
    assert (await holder.post("/account/gas/policies", policy)).status == 201
    for networks, total in ((["ethereum/mainnet"], 0), ([NETWORK, "ethereum/mainnet"], 1), ([], 1)):
        made = await holder.new_key(mode="live", allowed_networks=networks)
        for path, name in (("/webhooks", "webhooks"), ("/gas/policies", "policies")):

            async def listed(path: str = path, key: str = made["key"]) -> dict[str, Any] | None:
                reply = await service.rest("GET", path, key=key)
                return dict(reply.data) if reply.status == 200 else None

            found = await until(listed)
            assert (len(found[name]), found["total"]) == (total, total), (networks, path)


async def test_key_has_an_owner_a_note_and_an_expiry(service: DashboardService) -> None:
    holder = await service.holder()
    end = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)).replace(microsecond=0)
    details = {"owner": "payments", "note": "nightly job", "expires_at": f"{end:%Y-%m-%dT%H:%M:%SZ}"}
    made = await holder.new_key(**details)
    path = f"/account/keys/{made['id']}"
    shown = (await holder.get(path)).data
    assert {name: shown[name] for name in details} == details
    renewed = (await holder.post(f"{path}/rotate", {"overlap_s": 60})).data
    assert {name: renewed[name] for name in details} == details
    again = (await holder.post(f"{path}/rotate", {"overlap_s": 60})).data  # its own end is that of the overlap
    assert again["expires_at"] is None
    path = f"/account/keys/{renewed['id']}"
    assert (await holder.request("PATCH", path, {"expires_at": None})).data["expires_at"] is None
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=1.5)
    assert (await holder.request("PATCH", path, {"expires_at": soon.isoformat()})).status == 200

    async def has_expired() -> bool:
        return (await call(service, renewed["key"])).status == 401

    await until(has_expired)
    assert "expires_at" in (await holder.request("PATCH", path, {"expires_at": "2020-01-01T00:00:00Z"})).fault(400)


async def test_key_that_expires_counts_as_one_of_the_plan(service: DashboardService) -> None:
    holder = await service.holder(await service.account(plan="free"))
    for _ in range(10):
        await holder.new_key(expires_at="2090-01-01T00:00:00Z")
    assert "plan allows 10 API keys" in (await holder.post("/account/keys", {"name": "x", "mode": "test"})).fault(403)


async def test_rotated_key_works_beside_its_successor_during_the_overlap(service: DashboardService) -> None:
    holder = await service.holder()
    old = await holder.new_key(allowed_ips=["203.0.113.0/24"], requests_per_second=9)
    reply = await holder.post(f"/account/keys/{old['id']}/rotate", {"overlap_s": 3600})
    new = reply.data
    assert reply.status == 201
    assert (new["lineage_id"], new["allowed_ips"], new["requests_per_second"]) == (old["id"], ["203.0.113.0/24"], 9)
    for key in (old["key"], new["key"]):
        await wait_until_known(service, key, **{"X-Forwarded-For": "203.0.113.7"})
    assert (await holder.get(f"/account/keys/{old['id']}")).data["expires_at"] is not None


async def test_revoked_key_is_rejected_by_every_worker(service: DashboardService) -> None:
    holder = await service.holder()
    made = await holder.new_key()
    await wait_until_known(service, made["key"])
    reply = await holder.request("DELETE", f"/account/keys/{made['id']}")
    assert reply.data == {"id": made["id"], "revoked": True}

    async def is_rejected() -> bool:
        return {(await call(service, made["key"])).status for _ in range(8)} == {401}

    await until(is_rejected)
    assert (await holder.get(f"/account/keys/{made['id']}")).data["status"] == "revoked"


async def test_key_of_another_account_and_unknown_key_get_the_same_404(service: DashboardService) -> None:
    holder, other = await service.holder(), await service.holder()
    theirs = (await other.new_key())["id"]
    for key_id in (theirs, "key_000000000000000000000000"):
        path = f"/account/keys/{key_id}"
        replies = [
            await holder.get(path),
            await holder.request("PATCH", path, {"name": "mine now"}),
            await holder.post(f"{path}/rotate", {}),
            await holder.request("DELETE", path),
        ]
        assert {reply.fault(404) for reply in replies} == {f"there is no key {key_id}"}
    assert (await other.get(f"/account/keys/{theirs}")).data["status"] == "active"
    chart = (await holder.get(f"/account/usage?key={theirs}")).data
    assert chart["totals"]["requests"] == 0


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"allowed_ips": ["300.1.1.1"]}, "allowed_ips"),
        ({"allowed_origins": ["app.example.com"]}, "allowed_origins"),
        ({"allowed_origins": ["https://*.example.com/path"]}, "allowed_origins"),
        ({"scopes": ["rpc:everything"]}, "scopes"),
        ({"scopes": []}, "scopes"),
        ({"name": "a\0b"}, "name"),
        ({"mode": "both"}, "mode"),
        ({"requests_per_second": 0}, "requests_per_second"),
        ({"name": ""}, "name"),
        ({"colour": "red"}, "colour"),
    ],
)
async def test_error_for_a_new_key_names_the_invalid_member(
    service: DashboardService, members: dict[str, object], named: str
) -> None:
    holder = await service.holder()
    assert named in (await holder.post("/account/keys", {"name": "a key", "mode": "test", **members})).fault(400)


async def test_key_lists_the_directives_that_its_requests_may_use(service: DashboardService) -> None:
    holder = await service.holder()
    made = await holder.new_key(directives=["retry"])
    path = f"/account/keys/{made['id']}"
    assert made["directives"] == ["retry"]
    assert "operator" in (await holder.request("PATCH", path, {"directives": ["upstream"]})).fault(403)
    assert "directives" in (await holder.request("PATCH", path, {"directives": ["teleport"]})).fault(400)
    assert (await holder.request("PATCH", path, {"name": "same directives"})).data["directives"] == ["retry"]

    async def replies_with(status: int, **headers: str) -> bool:
        return (await call(service, made["key"], **headers)).status == status

    # Seldom: a key that is not known yet counts as a failed authentication, of which there may be only so many.
    await until(lambda: replies_with(403, **{"X-Timeout-Ms": "5000"}), every_s=0.5)
    await until(lambda: replies_with(200, **{"X-Retry": "0"}))
    assert (await holder.request("PATCH", path, {"directives": None})).data["directives"] == sorted(USUAL)
    await until(lambda: replies_with(200, **{"X-Timeout-Ms": "5000"}))
    rotated = await holder.post(f"{path}/rotate", {"overlap_s": 0})
    assert rotated.data["directives"] == sorted(USUAL)


async def test_test_key_has_a_saved_fault_plan(service: DashboardService) -> None:
    holder = await service.holder()
    live, made = await holder.new_key(mode="live"), await holder.new_key()
    assert "test keys" in (await holder.request("PATCH", f"/account/keys/{live['id']}", {"fault": "empty"})).fault(400)
    path = f"/account/keys/{made['id']}"
    assert "explode" in (await holder.request("PATCH", path, {"fault": "explode"})).fault(400)
    assert (await holder.request("PATCH", path, {"fault": "status=503"})).data["fault"] == "status=503"

    async def replies_with(status: int) -> bool:
        return {(await call(service, made["key"])).status for _ in range(4)} == {status}

    # Seldom: the calls are charged.
    await until(lambda: replies_with(503), every_s=1.0)
    assert (await holder.request("PATCH", path, {"fault": ""})).data["fault"] is None
    await until(lambda: replies_with(200), every_s=1.0)


async def test_webhook_of_a_test_key_inherits_the_plan_of_the_key(service: DashboardService) -> None:
    holder = await service.holder()
    made = await holder.new_key()
    await wait_until_known(service, made["key"])
    saved = {"fault": "delay=2s, duplicate=1, stale=5, p=0.5"}
    assert (await holder.request("PATCH", f"/account/keys/{made['id']}", saved)).status == 200
    headers = {"X-API-Key": made["key"]}
    body = {"url": "https://hooks.example.com/", "chain": "ethereum-sepolia", "event_type": "NEW_BLOCK"}

    async def new_webhook(**members: str) -> dict[str, Any]:
        async with aiohttp.ClientSession(headers=headers) as session:
            async with session.post(f"{service.base}/webhooks", json={**body, **members}) as reply:
                found: dict[str, Any] = await reply.json()
                assert reply.status == 201, found
            async with session.delete(f"{service.base}/webhooks/{found['id']}") as reply:
                assert reply.status == 200
        return found

    async def inherits() -> bool:
        return bool((await new_webhook())["fault"] == "delay=2000ms, duplicate=1, p=0.5")

    # Seldom: the requests are charged.
    await until(inherits, every_s=1.0)
    assert (await new_webhook(fault="correction"))["fault"] == "correction"
    assert (await new_webhook(fault=""))["fault"] is None


# IP and origin restrictions


async def test_key_works_only_from_allowed_ip_addresses(service: DashboardService) -> None:
    holder = await service.holder()
    made = await holder.new_key(allowed_ips=["203.0.113.5/24", "2001:db8::/32"])
    assert made["allowed_ips"] == ["203.0.113.0/24", "2001:db8::/32"]
    for address in ("203.0.113.200", "2001:db8::7"):
        await wait_until_known(service, made["key"], **{"X-Forwarded-For": address})
    for address in ("203.0.114.1", "2001:db9::1", "203.0.113.1, 198.51.100.1"):
        reply = await call(service, made["key"], **{"X-Forwarded-For": address})
        assert f"from the address {address.split()[-1]}: change its allowed_ips" in reply.fault(403)
    reply = await call(service, made["key"], **{"X-Forwarded-For": "unknown"})
    assert "is not known" in reply.fault(403)


async def test_key_works_only_from_allowed_origins(service: DashboardService) -> None:
    holder = await service.holder()
    made = await holder.new_key(allowed_origins=["https://app.example.com", "https://*.Example.org"])
    for origin in ("https://app.example.com", "https://a.b.example.org"):
        await wait_until_known(service, made["key"], Origin=origin)
    for origin in ("https://app.example.com.evil.net", "https://example.org", "http://app.example.com", "null", ""):
        reply = await call(service, made["key"], **({"Origin": origin} if origin else {}))
        assert "origin" in reply.fault(403).lower()


async def test_new_restriction_applies_to_open_connections(service: DashboardService) -> None:
    """The hot path caches parsed request heads; changing a key must invalidate them."""
    holder = await service.holder()
    made = await holder.new_key()
    await wait_until_known(service, made["key"])
    request = post(rpc("eth_gasPrice"), key=made["key"], network=NETWORK)
    async with await HttpClient.open(service.running.port) as client:
        for _ in range(3):
            assert (await client.send(request)).status == 200
        path = f"/account/keys/{made['id']}"
        await holder.request("PATCH", path, {"allowed_ips": ["203.0.113.0/24"]})

        async def is_rejected() -> bool:
            return (await client.send(request)).status == 403

        await until(is_rejected)
        await holder.request("PATCH", path, {"allowed_ips": []})

        async def is_back() -> bool:
            return (await client.send(request)).status == 200

        await until(is_back)


async def test_restrictions_apply_to_sockets(service: DashboardService) -> None:
    holder = await service.holder()
    made = await holder.new_key(allowed_ips=["203.0.113.0/24"])
    url = f"{service.base.replace('http', 'ws')}/ws/{NETWORK}?apiKey={made['key']}"
    await wait_until_known(service, made["key"], **{"X-Forwarded-For": "203.0.113.1"})
    async with aiohttp.ClientSession() as session:
        async with session.ws_connect(url, headers={"X-Forwarded-For": "203.0.113.1"}) as socket:
            await socket.send_str('{"jsonrpc":"2.0","id":1,"method":"eth_gasPrice","params":[]}')
            assert (await socket.receive_json(timeout=30))["result"] == "eth_gasPrice"
            path = f"/account/keys/{made['id']}"
            await holder.request("PATCH", path, {"allowed_ips": ["192.0.2.0/24"]})
            closed = await socket.receive(timeout=30)
            assert closed.type == aiohttp.WSMsgType.CLOSE

        async def is_rejected() -> bool:
            try:
                async with session.ws_connect(url, headers={"X-Forwarded-For": "203.0.113.1"}):
                    return False
            except aiohttp.WSServerHandshakeError as refused:
                return refused.status == 403

        await until(is_rejected)


async def test_keys_of_a_disabled_account_are_rejected(service: DashboardService) -> None:
    holder, operator = await service.holder(), await service.operator()
    made = await holder.new_key()
    await wait_until_known(service, made["key"])
    path = f"/admin/accounts/{holder.account['id']}"
    await operator.request("PATCH", path, {"disabled": True})

    async def is_rejected() -> bool:
        return {(await call(service, made["key"])).status for _ in range(8)} == {403}

    await until(is_rejected)
    await operator.request("PATCH", path, {"disabled": False})
    await wait_until_known(service, made["key"])


# Resources shared with the account's keys


async def test_holder_manages_the_policies_and_webhooks_of_the_account(service: DashboardService) -> None:
    holder, other = await service.holder(), await service.holder()
    body = {"name": "Free", "chain": "ethereum-sepolia", "rules": {"max_gas_usd": "1"}}
    made = await holder.post("/account/gas/policies", body)
    assert made.status == 201, made
    path = f"/account/gas/policies/{made.data['id']}"
    assert (await holder.get("/account/gas/policies")).data["total"] == 1
    assert (await holder.request("PATCH", path, {"status": "paused"})).data["status"] == "paused"
    assert (await other.get("/account/gas/policies")).data["total"] == 0
    (await other.get(path)).fault(404)
    (await Client(service).get("/account/gas/policies")).fault(401)
    assert (await holder.get("/account/webhooks")).data["total"] == 0
