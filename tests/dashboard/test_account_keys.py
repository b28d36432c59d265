"""Keys that act for their account: what each scope opens, that no key gives more than it has, and the log."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from proxy.core.access import ACCOUNT_SCOPES, SCOPES, USUAL_SCOPES
from proxy.core.key_powers import SCOPE_PERMISSIONS
from proxy.core.roles import PERMISSIONS
from tests.dashboard.service import API_SPEC, Client, DashboardService, Reply
from tests.dashboard.test_account_isolation import OPERATIONS as ON_ONE_RESOURCE
from tests.dashboard.test_account_isolation import POLICY, WEBHOOK
from tests.dashboard.test_members import accept, address, invite, member_of, token_of
from tests.service import until

OF_ACCOUNT = {name: each for name, each in API_SPEC.operations.items() if each.session == "account"}
OPEN = {name: each for name, each in OF_ACCOUNT.items() if each.scope}


class KeyClient:
    """A program with a key, and no cookies."""

    def __init__(self, service: DashboardService, row: dict[str, Any]) -> None:
        self.service, self.id, self.key = service, row["id"], row["key"]

    async def request(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        return await self.service.rest(method, path, body, key=self.key, **headers)

    async def get(self, path: str) -> Reply:
        return await self.request("GET", path)

    async def post(self, path: str, body: Any = None) -> Reply:
        return await self.request("POST", path, body)


async def acting(service: DashboardService, holder: Client, *scopes: str, **members: Any) -> KeyClient:
    """A key with these scopes, known to both workers."""
    made = await holder.new_key(**{"scopes": scopes, "mode": "live", **members})
    found = KeyClient(service, made)

    async def is_known() -> bool:
        return (await found.get("/chains")).status in (200, 403)

    for _ in range(4):
        await until(is_known)
    return found


# Scopes


def test_usual_keys_have_no_scope_of_the_account() -> None:
    assert not set(USUAL_SCOPES) & set(ACCOUNT_SCOPES)
    assert {each.scope for each in OPEN.values()} >= set(ACCOUNT_SCOPES)


def test_no_key_reaches_sessions_passwords_second_factors_or_the_end_of_the_account() -> None:
    closed = set(OF_ACCOUNT) - set(OPEN)
    assert closed >= {name for name, each in OF_ACCOUNT.items() if each.permission == "profile"}
    assert closed >= {"delete_account", "create_sandbox_token", "account_session", "account_sign_out", "read_parts"}


@pytest.mark.parametrize("name", [name for name in OPEN if OPEN[name].scope in ACCOUNT_SCOPES])
def test_scope_needs_the_permission_of_its_operations(name: str) -> None:
    """A person who can give the scope could call the operation."""
    needed = SCOPE_PERMISSIONS[OPEN[name].scope]
    for role, permissions in PERMISSIONS.items():
        if needed in permissions and "manage" in permissions:
            assert OPEN[name].permission in permissions, role


async def test_each_operation_needs_its_scope(service: DashboardService) -> None:
    holder = await service.holder()
    usual = await acting(service, holder, *USUAL_SCOPES)
    every = await acting(service, holder, *SCOPES)
    for name, operation in OF_ACCOUNT.items():
        if operation.method != "GET" or "{" in operation.path or name == "read_parts":
            continue
        status = (await every.get(operation.path)).status
        assert status == (200 if name in OPEN else 403), name
        if operation.scope in ACCOUNT_SCOPES:
            refused = await usual.get(operation.path)
            assert operation.scope in refused.fault(403), name
            assert refused.data["error"]["reason"] == "scope"


async def test_requests_are_charged_like_others_and_not_cached(service: DashboardService) -> None:
    key = await acting(service, await service.holder(), "keys:manage", "usage:read")
    reply = await key.get("/account/keys")
    assert (reply.headers["X-Compute-Units"], reply.headers["Cache-Control"]) == ("2", "no-store")
    assert "X-RateLimit-Limit" in reply.headers
    table = await key.get("/account/usage/csv")
    assert table.headers["Content-Type"].startswith("text/csv")
    assert table.headers["X-Compute-Units"] == "10"


async def test_key_is_used_instead_of_a_session_and_needs_no_csrf_token(service: DashboardService) -> None:
    holder, stranger = await service.holder(), await service.holder()
    key = await acting(service, stranger, "keys:manage")
    shown = (await holder.get("/account/keys", X_API_Key=key.key)).data["keys"]
    assert [each["id"] for each in shown] == [key.id]  # of the key's account, not of the cookie's
    holder.csrf = ""
    (await holder.post("/account/keys", {"name": "x", "mode": "test"})).fault(403)
    assert (await key.post("/account/keys", {"name": "x", "mode": "test", "scopes": ["keys:manage"]})).status == 201
    bearer = Client(service)
    assert (await bearer.get("/account/keys", Authorization=f"Bearer {key.key}")).status == 200
    assert (await bearer.get("/account/keys", X_API_Key="svc_live_nonsense")).status == 401
    assert (await bearer.get("/account/keys")).status == 401


async def test_sandbox_token_does_not_act_for_the_account(service: DashboardService) -> None:
    """A developer could otherwise use a key of an owner."""
    owner = await service.holder()
    key = await acting(service, owner, *SCOPES)
    developer = await member_of(service, owner)
    token = (await developer.post(f"/account/keys/{key.id}/sandbox", {})).data["token"]
    body = {"email": address(), "role": "owner"}
    refused = await developer.post("/account/invitations", body, X_API_Key=token)
    assert "your role (developer)" in refused.fault(403)


# Management


async def test_program_creates_reads_changes_rotates_and_revokes_keys(service: DashboardService) -> None:
    holder = await service.holder()
    key = await acting(service, holder, "keys:manage", "rpc:read", "data:read")
    wanted = {
        "name": "from Terraform",
        "mode": "live",
        "scopes": ["rpc:read"],
        "requests_per_second": 7,
        "units_per_second": 90,
        "allowed_ips": ["203.0.113.0/24"],
        "allowed_origins": ["https://app.example.com"],
        "allowed_networks": ["ethereum/sepolia"],
        "allowed_methods": ["eth_call"],
        "allowed_contracts": ["0x" + "aB" * 20],
        "owner": "payments",
        "note": "nightly",
        "directives": ["retry"],
        "expires_at": "2090-01-31T00:00:00Z",
    }
    made = await key.post("/account/keys", wanted)
    assert made.status == 201, made
    path = f"/account/keys/{made.data['id']}"
    shown = (await key.get(path)).data
    assert {name: shown[name] for name in wanted} == wanted
    assert "key" not in shown
    same = {name: value for name, value in wanted.items() if name != "mode"}
    assert (await key.request("PATCH", path, same)).data == shown  # an unchanged resource stays as it is
    assert (await key.request("PATCH", path, {"scopes": ["data:read"]})).data["scopes"] == ["data:read"]
    rotated = await key.post(f"{path}/rotate", {"overlap_s": 0})
    assert (rotated.status, rotated.data["note"]) == (201, "nightly")
    for _ in range(2):  # a repeated delete changes nothing
        assert (await key.request("DELETE", path)).data == {"id": made.data["id"], "revoked": True}
    entries = (await holder.get("/account/actions?limit=100")).data["actions"]
    mine = [(each["action"], each["subject"]) for each in entries if (each["by"], each["name"]) == ("key", key.id)]
    own = made.data["id"]
    assert mine == [
        ("revoke_key", own),
        ("revoke_key", own),
        ("rotate_key", own),
        ("update_key", own),
        ("update_key", own),
        ("create_key", own),
    ]


async def test_program_manages_webhooks_policies_and_alerts_of_the_account(service: DashboardService) -> None:
    holder = await service.holder()
    key = await acting(service, holder, "webhooks:manage", "gas:manage")
    for path, body in (("/account/webhooks", WEBHOOK), ("/account/gas/policies", POLICY)):
        made = await key.post(path, body)
        assert made.status == 201, made
        assert (await holder.get(f"{path}/{made.data['id']}")).status == 200
        assert (await key.request("DELETE", f"{path}/{made.data['id']}")).status == 200
    assert (await key.get("/account/alerts")).data == (await holder.get("/account/alerts")).data


async def test_program_manages_members_up_to_its_own_powers(service: DashboardService) -> None:
    owner = await service.holder()
    weak = await acting(service, owner, "members:manage")
    reader = await acting(service, owner, "members:manage", "usage:read", "activity:read", "requests:read")
    strong = await acting(service, owner, *SCOPES)
    for key, role, status in (
        (weak, "read-only", 403),
        (reader, "read-only", 201),
        (reader, "developer", 403),
        (strong, "developer", 201),
        (strong, "owner", 403),
    ):
        sent = await key.post("/account/invitations", {"email": address(), "role": role})
        assert sent.status == status, (role, sent)
    narrow = await acting(service, owner, *SCOPES, allowed_networks=["ethereum/sepolia"])
    (await narrow.post("/account/invitations", {"email": address(), "role": "developer"})).fault(403)
    developer = await member_of(service, owner)
    person = developer.account["person"]["id"]
    (await reader.request("PATCH", f"/account/members/{person}", {"role": "owner"})).fault(403)
    assert (await reader.request("PATCH", f"/account/members/{person}", {"role": "read-only"})).status == 200
    second = (await member_of(service, owner, "owner")).account["person"]["id"]
    for change in ("PATCH", "DELETE"):
        body = {"role": "read-only"} if change == "PATCH" else None
        (await strong.request(change, f"/account/members/{second}", body)).fault(403)
    assert (await reader.request("DELETE", f"/account/members/{person}")).status == 200


async def test_invitations_of_a_key_end_with_it(service: DashboardService) -> None:
    owner = await service.holder()
    key = await acting(service, owner, *SCOPES)
    sent = (await key.post("/account/invitations", {"email": address(), "role": "developer"})).data
    listed = (await owner.get("/account/members")).data["invitations"]
    assert [each["invited_by"] for each in listed] == ["API key a key"]
    await owner.request("DELETE", f"/account/keys/{key.id}")
    assert (await owner.get("/account/members")).data["invitations"] == []
    (await accept(service, token_of(sent["url"])))[1].fault(401)


# Attacks


LIMITS: dict[str, tuple[Any, Any]] = {
    "allowed_networks": (["ethereum/sepolia"], []),
    "allowed_methods": (["eth_call"], ["eth_call", "eth_getLogs"]),
    "allowed_contracts": (["0x" + "ab" * 20], ["0x" + "cd" * 20]),
    "allowed_ips": (["198.51.0.0/16", "127.0.0.1/32"], ["0.0.0.0/0"]),
    "requests_per_second": (50, 60),
    "units_per_second": (500, 600),
    "expires_at": ("2090-01-01T00:00:00Z", "2091-01-01T00:00:00Z"),
    "directives": (["retry"], ["retry", "verify"]),
    "scopes": (["rpc:read", "keys:manage"], ["rpc:read", "rpc:write", "keys:manage"]),
}


@pytest.mark.parametrize("field", LIMITS)
async def test_key_gives_neither_itself_nor_others_more_than_it_has(service: DashboardService, field: str) -> None:
    has, more = LIMITS[field]
    holder = await service.holder()
    base: dict[str, Any] = {"scopes": ["keys:manage", "rpc:read"], field: has}
    made = await holder.new_key(**{**base, "mode": "live"})
    key = KeyClient(service, made)

    async def is_known() -> bool:
        return (await key.get("/account/keys")).status == 200

    for _ in range(4):
        await until(is_known)
    # A new key: with more, or without the limit.
    new = {"name": "x", "mode": "live", **base}
    assert field in (await key.post("/account/keys", {**new, field: more})).fault(403)
    without = {name: value for name, value in new.items() if name != field}
    assert field in (await key.post("/account/keys", without)).fault(403)
    child = (await key.post("/account/keys", new)).data
    # A key that it made, itself, and one that has more.
    for target in (child["id"], key.id):
        assert field in (await key.request("PATCH", f"/account/keys/{target}", {field: more})).fault(403)
    wider = await holder.new_key(**{**base, field: more, "mode": "live"})
    assert field in (await key.post(f"/account/keys/{wider['id']}/rotate", {})).fault(403)
    # That one may be described and narrowed, but not widened in another way, nor enabled again.
    path = f"/account/keys/{wider['id']}"
    assert (await key.request("PATCH", path, {"note": "seen", "status": "disabled"})).status == 200
    assert field in (await key.request("PATCH", path, {"status": "active"})).fault(403)
    listed = {each["id"]: each for each in (await holder.get("/account/keys")).data["keys"]}
    assert set(listed) == {key.id, child["id"], wider["id"]}
    assert listed[key.id][field] == has


async def test_test_key_makes_no_live_key_and_leaves_live_keys_alone(service: DashboardService) -> None:
    holder = await service.holder()
    key = await acting(service, holder, "keys:manage", "rpc:read", mode="test")
    live = await holder.new_key(mode="live", scopes=["rpc:read"])
    assert "mode" in (await key.post("/account/keys", {"name": "x", "mode": "live", "scopes": ["rpc:read"]})).fault(403)
    path = f"/account/keys/{live['id']}"
    for method, body in (("PATCH", {"note": "x"}), ("DELETE", None)):
        assert "test keys" in (await key.request(method, path, body)).fault(403)
    assert "test keys" in (await key.post(f"{path}/rotate", {})).fault(403)


async def test_expiring_key_does_not_outlive_itself_by_rotation(service: DashboardService) -> None:
    holder = await service.holder()
    key = await acting(service, holder, "keys:manage")
    successor = (await key.post(f"/account/keys/{key.id}/rotate", {"overlap_s": 3600})).data
    assert successor["expires_at"] is None
    for target in (key.id, successor["id"]):
        assert "expires_at" in (await key.post(f"/account/keys/{target}/rotate", {})).fault(403)
    assert "expires_at" in (await key.request("PATCH", f"/account/keys/{key.id}", {"expires_at": None})).fault(403)


async def test_developer_gives_and_takes_no_scope_of_an_owner(service: DashboardService) -> None:
    owner = await service.holder()
    developer = await member_of(service, owner)
    made = await owner.new_key(scopes=["members:manage", "usage:read"])
    path = f"/account/keys/{made['id']}"
    new = {"name": "x", "mode": "test", "scopes": ["members:manage"]}
    assert "scopes" in (await developer.post("/account/keys", new)).fault(403)
    assert "scopes" in (await developer.post(f"{path}/rotate", {})).fault(403)
    assert (await developer.request("PATCH", path, {"note": "of the owner"})).status == 200
    assert (await developer.post("/account/keys", {**new, "scopes": ["keys:manage"]})).status == 201
    usual = (await developer.post("/account/keys", {"name": "x", "mode": "test"})).data
    assert usual["scopes"] == list(USUAL_SCOPES)
    change = {"scopes": ["rpc:read", "account:manage"]}
    assert "scopes" in (await developer.request("PATCH", f"/account/keys/{usual['id']}", change)).fault(403)


async def test_key_reaches_nothing_of_another_account(service: DashboardService) -> None:
    owner, other = await service.holder(), await service.holder()
    key = await acting(service, other, *SCOPES)
    invitation = (await invite(owner, address())).data["id"]
    member = (await member_of(service, owner)).account["person"]["id"]
    theirs = (await owner.new_key())["id"]
    webhook = (await owner.post("/account/webhooks", WEBHOOK)).data["id"]
    policy = (await owner.post("/account/gas/policies", POLICY)).data["id"]
    ids = {"keys": theirs, "webhooks": webhook, "gas": policy}
    for name, body in ON_ONE_RESOURCE.items():
        operation = API_SPEC.operations[name]
        if not operation.scope:
            continue
        named = {"id": ids.get(operation.path.split("/")[2], "req_1"), "event_id": "evt_1"}
        path = operation.path.format_map(named | {"member_id": member, "invitation_id": invitation})
        reply = await key.request(operation.method, path, body)
        assert reply.status == 404, (name, reply)


async def test_limits_of_the_key_hold_for_the_account_too(service: DashboardService) -> None:
    holder = await service.holder()
    for limits, headers, reason in (
        ({"allowed_ips": ["203.0.113.0/24"]}, {"X-Forwarded-For": "192.0.2.1"}, "ip"),
        ({"allowed_origins": ["https://app.example.com"]}, {"Origin": "https://evil.example.com"}, "origin"),
    ):
        key = await acting(service, holder, "keys:manage", **limits)
        refused = await key.request("GET", "/account/keys", **headers)
        assert (refused.status, refused.data["error"]["reason"]) == (403, reason)
        assert "Access-Control-Allow-Origin" not in refused.headers


async def test_revoked_disabled_and_expired_keys_do_nothing(service: DashboardService) -> None:
    holder = await service.holder()
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=3)
    revoked = await acting(service, holder, "keys:manage")
    disabled = await acting(service, holder, "keys:manage")
    expired = await acting(service, holder, "keys:manage", expires_at=end.isoformat())
    await holder.request("DELETE", f"/account/keys/{revoked.id}")
    await holder.request("PATCH", f"/account/keys/{disabled.id}", {"status": "disabled"})
    for key, status in ((revoked, 401), (disabled, 403), (expired, 401)):

        async def is_refused(key: KeyClient = key, status: int = status) -> bool:
            return {(await key.get("/account/keys")).status for _ in range(6)} == {status}

        await until(is_refused)
