"""The holder's keys: made, changed, rotated, revoked, and used from where they may be."""

from __future__ import annotations

import aiohttp
import pytest

from tests.dashboard.service import NETWORK, Desk, Person, call
from tests.flows.talk import Talk, post, rpc
from tests.service import until


async def works(desk: Desk, key: str, **headers: str) -> None:
    """Both workers know a new key within a second; here it is waited for."""

    async def is_good() -> bool:
        return (await call(desk, key, **headers)).status == 200

    for _ in range(4):
        await until(is_good)


async def test_key_is_made_shown_once_and_used(desk: Desk) -> None:
    holder = await desk.holder()
    made = await holder.new_key(name="backend", scopes=["rpc:read"], requests_per_second=7)
    assert made["key"].startswith("svc_test_")
    assert (made["scopes"], made["requests_per_second"], made["status"]) == (["rpc:read"], 7, "active")
    await works(desk, made["key"])
    assert (await call(desk, made["key"])).headers["X-RateLimit-Limit"] == "7"
    shown = (await holder.get("/account/keys")).data["keys"]
    assert [key["id"] for key in shown] == [made["id"]]
    assert "key" not in shown[0]
    assert made["key"] not in (await holder.get(f"/account/keys/{made['id']}")).body.decode()


async def test_last_use_of_a_key_is_told(desk: Desk) -> None:
    holder = await desk.holder()
    made = await holder.new_key()
    assert made["last_used_at"] is None
    await works(desk, made["key"])

    async def is_told() -> bool:
        return (await holder.get(f"/account/keys/{made['id']}")).data["last_used_at"] is not None

    await until(is_told)


async def test_limits_of_a_key_stay_within_the_accounts(desk: Desk) -> None:
    holder = await desk.holder(await desk.account(plan="free"))
    for name, most in (("requests_per_second", 10), ("units_per_second", 200)):
        reply = await holder.post("/account/keys", {"name": "greedy", "mode": "test", name: most + 1})
        assert name in reply.fault(400)
        made = await holder.new_key(**{name: most})
        path = f"/account/keys/{made['id']}"
        assert name in (await holder.ask("PATCH", path, {name: most + 1})).fault(400)
        assert (await holder.ask("PATCH", path, {name: None})).data[name] is None


async def test_key_is_changed_member_by_member(desk: Desk) -> None:
    holder = await desk.holder()
    made = await holder.new_key(scopes=["rpc:read"], allowed_ips=["10.0.0.0/8"])
    path = f"/account/keys/{made['id']}"
    changed = (await holder.ask("PATCH", path, {"name": "renamed"})).data
    assert (changed["name"], changed["scopes"], changed["allowed_ips"]) == ("renamed", ["rpc:read"], ["10.0.0.0/8"])
    changed = (await holder.ask("PATCH", path, {"status": "disabled", "allowed_ips": []})).data
    assert (changed["status"], changed["allowed_ips"]) == ("disabled", [])
    assert (await holder.ask("PATCH", path, {"status": "active"})).data["status"] == "active"
    # No scope at all is not all of them.
    assert "scopes" in (await holder.ask("PATCH", path, {"scopes": []})).fault(400)
    assert (await holder.get(path)).data["scopes"] == ["rpc:read"]


async def test_rotated_key_works_on_for_its_overlap_beside_its_successor(desk: Desk) -> None:
    holder = await desk.holder()
    old = await holder.new_key(allowed_ips=["203.0.113.0/24"], requests_per_second=9)
    reply = await holder.post(f"/account/keys/{old['id']}/rotate", {"overlap_s": 3600})
    new = reply.data
    assert reply.status == 201
    assert (new["lineage_id"], new["allowed_ips"], new["requests_per_second"]) == (old["id"], ["203.0.113.0/24"], 9)
    for key in (old["key"], new["key"]):
        await works(desk, key, **{"X-Forwarded-For": "203.0.113.7"})
    assert (await holder.get(f"/account/keys/{old['id']}")).data["expires_at"] is not None


async def test_revoked_key_is_refused_by_every_worker(desk: Desk) -> None:
    holder = await desk.holder()
    made = await holder.new_key()
    await works(desk, made["key"])
    reply = await holder.ask("DELETE", f"/account/keys/{made['id']}")
    assert reply.data == {"id": made["id"], "revoked": True}

    async def is_refused() -> bool:
        return {(await call(desk, made["key"])).status for _ in range(8)} == {401}

    await until(is_refused)
    assert (await holder.get(f"/account/keys/{made['id']}")).data["status"] == "revoked"


async def test_somebody_elses_key_is_as_absent_as_one_that_never_was(desk: Desk) -> None:
    holder, stranger = await desk.holder(), await desk.holder()
    theirs = (await stranger.new_key())["id"]
    for key_id in (theirs, "key_000000000000000000000000"):
        path = f"/account/keys/{key_id}"
        said = [
            await holder.get(path),
            await holder.ask("PATCH", path, {"name": "mine now"}),
            await holder.post(f"{path}/rotate", {}),
            await holder.ask("DELETE", path),
        ]
        assert {reply.fault(404) for reply in said} == {f"there is no key {key_id}"}
    assert (await stranger.get(f"/account/keys/{theirs}")).data["status"] == "active"
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
        ({"owner": "me"}, "owner"),
    ],
)
async def test_wrong_member_of_a_new_key_is_named(desk: Desk, members: dict[str, object], named: str) -> None:
    holder = await desk.holder()
    assert named in (await holder.post("/account/keys", {"name": "a key", "mode": "test", **members})).fault(400)


# From where a key may be used


async def test_key_works_only_from_the_addresses_that_it_is_for(desk: Desk) -> None:
    holder = await desk.holder()
    made = await holder.new_key(allowed_ips=["203.0.113.5/24", "2001:db8::/32"])
    assert made["allowed_ips"] == ["203.0.113.0/24", "2001:db8::/32"]
    for address in ("203.0.113.200", "2001:db8::7"):
        await works(desk, made["key"], **{"X-Forwarded-For": address})
    for address in ("203.0.114.1", "2001:db9::1", "unknown", "203.0.113.1, 198.51.100.1"):
        reply = await call(desk, made["key"], **{"X-Forwarded-For": address})
        assert "this address" in reply.fault(403)


async def test_key_works_only_from_pages_of_its_origins(desk: Desk) -> None:
    holder = await desk.holder()
    made = await holder.new_key(allowed_origins=["https://app.example.com", "https://*.Example.org"])
    for origin in ("https://app.example.com", "https://a.b.example.org"):
        await works(desk, made["key"], Origin=origin)
    for origin in ("https://app.example.com.evil.net", "https://example.org", "http://app.example.com", "null", ""):
        reply = await call(desk, made["key"], **({"Origin": origin} if origin else {}))
        assert "this origin" in reply.fault(403)


async def test_fence_that_is_put_up_holds_on_connections_that_are_open(desk: Desk) -> None:
    """On the hot path a connection's head is remembered: a changed key is another key."""
    holder = await desk.holder()
    made = await holder.new_key()
    await works(desk, made["key"])
    request = post(rpc("eth_gasPrice"), key=made["key"], network=NETWORK)
    async with await Talk.open(desk.running.port) as talk:
        for _ in range(3):
            assert (await talk.ask(request)).status == 200
        path = f"/account/keys/{made['id']}"
        await holder.ask("PATCH", path, {"allowed_ips": ["203.0.113.0/24"]})

        async def is_refused() -> bool:
            return (await talk.ask(request)).status == 403

        await until(is_refused)
        await holder.ask("PATCH", path, {"allowed_ips": []})

        async def is_back() -> bool:
            return (await talk.ask(request)).status == 200

        await until(is_back)


async def test_fence_holds_for_sockets_too(desk: Desk) -> None:
    holder = await desk.holder()
    made = await holder.new_key(allowed_ips=["203.0.113.0/24"])
    url = f"{desk.base.replace('http', 'ws')}/ws/{NETWORK}?apiKey={made['key']}"
    await works(desk, made["key"], **{"X-Forwarded-For": "203.0.113.1"})
    async with aiohttp.ClientSession() as session:
        async with session.ws_connect(url, headers={"X-Forwarded-For": "203.0.113.1"}) as socket:
            await socket.send_str('{"jsonrpc":"2.0","id":1,"method":"eth_gasPrice","params":[]}')
            assert (await socket.receive_json(timeout=30))["result"] == "eth_gasPrice"
            path = f"/account/keys/{made['id']}"
            await holder.ask("PATCH", path, {"allowed_ips": ["192.0.2.0/24"]})
            closed = await socket.receive(timeout=30)
            assert closed.type == aiohttp.WSMsgType.CLOSE

        async def is_refused() -> bool:
            try:
                async with session.ws_connect(url, headers={"X-Forwarded-For": "203.0.113.1"}):
                    return False
            except aiohttp.WSServerHandshakeError as refused:
                return refused.status == 403

        await until(is_refused)


async def test_keys_of_a_disabled_account_are_refused(desk: Desk) -> None:
    holder, operator = await desk.holder(), await desk.operator()
    made = await holder.new_key()
    await works(desk, made["key"])
    path = f"/admin/accounts/{holder.account['id']}"
    await operator.ask("PATCH", path, {"disabled": True})

    async def is_refused() -> bool:
        return {(await call(desk, made["key"])).status for _ in range(8)} == {403}

    await until(is_refused)
    await operator.ask("PATCH", path, {"disabled": False})
    await works(desk, made["key"])


# What keys do for their account, its holder does as well


async def test_holder_has_the_policies_and_webhooks_that_the_accounts_keys_have(desk: Desk) -> None:
    holder, stranger = await desk.holder(), await desk.holder()
    body = {"name": "Free", "chain": "ethereum-sepolia", "rules": {"max_gas_usd": "1"}}
    made = await holder.post("/account/gas/policies", body)
    assert made.status == 201, made
    path = f"/account/gas/policies/{made.data['id']}"
    assert (await holder.get("/account/gas/policies")).data["total"] == 1
    assert (await holder.ask("PATCH", path, {"status": "paused"})).data["status"] == "paused"
    assert (await stranger.get("/account/gas/policies")).data["total"] == 0
    (await stranger.get(path)).fault(404)
    (await Person(desk).get("/account/gas/policies")).fault(401)
    assert (await holder.get("/account/webhooks")).data["total"] == 0
