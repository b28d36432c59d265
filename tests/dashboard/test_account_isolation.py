"""Account isolation: every operation on a resource of another account returns 404."""

from __future__ import annotations

from typing import Any

from tests.dashboard.service import API_SPEC, Client, DashboardService
from tests.dashboard.test_members import address, invite, member_of
from tests.database import connected

WEBHOOK = {
    "url": "https://hooks.example.com/a",
    "chain": "ethereum-sepolia",
    "event_type": "NEW_BLOCK",
    "config": {},
}
POLICY = {"name": "Free", "chain": "ethereum-sepolia", "rules": {"max_gas_usd": "1"}}
# Every operation on a single resource, with a body that its owner could send.
OPERATIONS: dict[str, Any] = {
    "read_key": None,
    "update_key": {"name": "mine now"},
    "revoke_key": None,
    "rotate_key": {},
    "create_sandbox_token": {},
    "account_read_webhook": None,
    "account_update_webhook": {"status": "paused"},
    "account_delete_webhook": None,
    "account_resume_webhook": {},
    "account_rotate_webhook_secret": {},
    "account_list_deliveries": None,
    "account_read_delivery": None,
    "account_redeliver_event": {},
    "account_redeliver_since": {"since": "2026-01-01T00:00:00Z"},
    "account_test_webhook": {},
    "account_read_gas_policy": None,
    "account_update_gas_policy": {"status": "paused"},
    "account_delete_gas_policy": None,
    "account_read_gas_spend": None,
    "account_list_gas_refusals": None,
    "account_read_request": None,
    "end_session": None,
    "update_member": {"role": "owner"},
    "remove_member": None,
    "revoke_invitation": None,
}


async def create_resources(holder: Client) -> dict[str, Any]:
    """One resource of each kind, by the path of its collection."""
    found = {"/account/keys": await holder.new_key()}
    for path, body in (("/account/webhooks", WEBHOOK), ("/account/gas/policies", POLICY)):
        reply = await holder.post(path, body)
        assert reply.status == 201, reply
        found[path] = reply.data
    return found


def test_every_operation_on_a_single_resource_is_covered() -> None:
    operations = API_SPEC.operations.items()
    assert set(OPERATIONS) == {
        name for name, each in operations if each.path.startswith("/account/") and "{" in each.path
    }


async def test_resource_of_another_account_is_not_found(service: DashboardService) -> None:
    owner, other = await service.holder(), await service.holder()
    resources = await create_resources(owner)
    event = (await owner.post(f"/account/webhooks/{resources['/account/webhooks']['id']}/test", {})).data["event_id"]
    resources["/account/requests"] = {"id": event}
    before = {path: (await owner.get(f"{path}/{each['id']}")).data for path, each in resources.items()}
    session = (await owner.get("/account/sessions")).data["sessions"][0]["id"]
    member = (await member_of(service, owner)).account["person"]["id"]
    invitation = (await invite(owner, address())).data["id"]
    people = {"session_id": session, "member_id": member, "invitation_id": invitation}
    for name, body in OPERATIONS.items():
        operation = API_SPEC.operations[name]
        kind = operation.path.partition("/{")[0]
        ids = {"id": resources[kind]["id"] if kind in resources else "", "event_id": event, **people}
        path = operation.path.format_map(ids)
        reply = await other.request(operation.method, path, body)
        assert reply.status == 404, (name, reply)
    assert {path: (await owner.get(f"{path}/{each['id']}")).data for path, each in resources.items()} == before
    # Its owner can still delete it.
    webhook = resources["/account/webhooks"]["id"]
    assert (await owner.request("DELETE", f"/account/webhooks/{webhook}")).status == 200
    async with connected(service.database) as connection:  # no worker delivers here, and other tests read the queue
        await connection.execute("delete from deliveries where webhook_id = $1", webhook)
