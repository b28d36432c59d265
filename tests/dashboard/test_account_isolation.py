"""What is somebody else's is not there: every operation on one thing of an account, by the holder of another."""

from __future__ import annotations

from typing import Any

from tests.dashboard.service import CONTRACT, Desk, Person
from tests.database import connected

WEBHOOK = {
    "url": "https://hooks.example.com/a",
    "chain": "ethereum-sepolia",
    "event_type": "NEW_BLOCK",
    "config": {},
}
POLICY = {"name": "Free", "chain": "ethereum-sepolia", "rules": {"max_gas_usd": "1"}}
# Each with a body that its owner could send.
OPERATIONS: dict[str, Any] = {
    "read_key": None,
    "update_key": {"name": "mine now"},
    "revoke_key": None,
    "rotate_key": {},
    "account_read_webhook": None,
    "account_update_webhook": {"status": "paused"},
    "account_delete_webhook": None,
    "account_resume_webhook": {},
    "account_rotate_webhook_secret": {},
    "account_list_deliveries": None,
    "account_redeliver_event": {},
    "account_redeliver_since": {"since": "2026-01-01T00:00:00Z"},
    "account_test_webhook": {},
    "account_read_gas_policy": None,
    "account_update_gas_policy": {"status": "paused"},
    "account_delete_gas_policy": None,
    "account_read_gas_spend": None,
    "account_list_gas_refusals": None,
}


async def things_of(holder: Person) -> dict[str, Any]:
    """One of each kind, by where it is found."""
    found = {"/account/keys": await holder.new_key()}
    for path, body in (("/account/webhooks", WEBHOOK), ("/account/gas/policies", POLICY)):
        made = await holder.post(path, body)
        assert made.status == 201, made
        found[path] = made.data
    return found


def test_no_operation_on_one_thing_is_left_out() -> None:
    operations = CONTRACT.operations.items()
    assert set(OPERATIONS) == {
        name for name, each in operations if each.path.startswith("/account/") and "{" in each.path
    }


async def test_somebody_elses_is_as_absent_as_what_never_was(desk: Desk) -> None:
    owner, stranger = await desk.holder(), await desk.holder()
    things = await things_of(owner)
    event = (await owner.post(f"/account/webhooks/{things['/account/webhooks']['id']}/test", {})).data["event_id"]
    before = {path: (await owner.get(f"{path}/{each['id']}")).data for path, each in things.items()}
    for name, body in OPERATIONS.items():
        operation = CONTRACT.operations[name]
        kind = operation.path.partition("/{")[0]
        path = operation.path.replace("{id}", things[kind]["id"]).replace("{event_id}", event)
        reply = await stranger.ask(operation.method, path, body)
        assert reply.status == 404, (name, reply)
    assert {path: (await owner.get(f"{path}/{each['id']}")).data for path, each in things.items()} == before
    # To its owner it is there, until it is deleted.
    webhook = things["/account/webhooks"]["id"]
    assert (await owner.ask("DELETE", f"/account/webhooks/{webhook}")).status == 200
    async with connected(desk.database) as connection:  # nobody delivers here, and others look at what waits
        await connection.execute("delete from deliveries where webhook_id = $1", webhook)
