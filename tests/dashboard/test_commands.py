"""Commands for admin tokens, passwords, sign-in links, accounts and keys."""

from __future__ import annotations

import asyncio
import subprocess
from typing import Any

import orjson

from proxy import __version__
from proxy.commands.fleet import FLEET_COLUMNS
from proxy.store.postgres.fleet import FleetStore
from tests.dashboard.service import NETWORK, PASSWORD, Client, DashboardService, call
from tests.service import command_here, until


async def run(service: DashboardService, *arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    config = str(service.running.config)
    return await asyncio.to_thread(command_here, *arguments, "--config", config, typed=typed)


async def run_json(service: DashboardService, *arguments: str, typed: str = "") -> Any:
    done = await run(service, *arguments, "--json", typed=typed)
    assert done.returncode == 0, done.stderr
    return orjson.loads(done.stdout)


async def test_admin_token_is_created_listed_and_revoked(service: DashboardService) -> None:
    made = await run_json(service, "admin", "token", "create", "--name", "day shift")
    operator = Client(service)
    assert (await operator.post("/admin/sign-in", {"token": made["token"]})).status == 200
    listed = await run_json(service, "admin", "token", "list")
    assert [(each["name"], each["revoked_at"]) for each in listed if each["id"] == made["id"]] == [("day shift", None)]
    assert made["token"] not in str(listed)
    assert (await run_json(service, "admin", "token", "revoke", made["id"]))["revoked_at"]
    (await operator.get("/admin/session")).fault(401)
    missing = await run(service, "admin", "token", "revoke", "admt_0")
    assert missing.returncode == 1
    assert "admt_0" in missing.stderr


async def test_password_is_set_from_standard_input_and_ends_all_sessions(service: DashboardService) -> None:
    holder = await service.holder()
    account = holder.account["id"]
    done = await run_json(service, "accounts", "password", account, "--stdin", typed="another long password\n")
    assert done == {"id": account, "password": "set"}
    (await holder.get("/account/session")).fault(401)
    body = {"email": holder.account["email"], "password": "another long password"}
    assert (await Client(service).post("/account/sign-in", body)).status == 200
    (await Client(service).post("/account/sign-in", {**body, "password": PASSWORD})).fault(401)
    short = await run(service, "accounts", "password", account, "--stdin", typed="short\n")
    assert short.returncode == 1
    assert "12" in short.stderr
    assert (
        await run(service, "accounts", "password", "acct_0", "--stdin", typed="long enough for it\n")
    ).returncode == 1


async def test_link_from_the_command_line_signs_in_once(service: DashboardService) -> None:
    account = await service.account(password=None)
    made = await run_json(service, "accounts", "link", account["id"])
    assert made["url"].startswith("https://dashboard.example.com/#token=")
    body = {"token": made["url"].partition("#token=")[2]}
    assert (await Client(service).post("/account/sign-in/redeem", body)).status == 200
    (await Client(service).post("/account/sign-in/redeem", body)).fault(401)


async def test_key_is_restricted_and_account_disabled_from_the_command_line(service: DashboardService) -> None:
    account = await service.account()
    options = ("--account", account["id"], "--mode", "test", "--allow-ip", "203.0.113.9/24")
    made = await run_json(service, "keys", "create", *options, "--allow-origin", "https://app.example.com")
    assert (made["allowed_ips"], made["allowed_origins"]) == (["203.0.113.0/24"], ["https://app.example.com"])

    async def status() -> int:
        return (await call(service, made["key"])).status

    async def has_status(expected: int) -> bool:
        return {await status() for _ in range(6)} == {expected}

    await until(lambda: has_status(403))
    assert (await run_json(service, "keys", "set", made["id"], "--from-anywhere"))["allowed_ips"] == []
    await until(lambda: has_status(200))
    assert (await run_json(service, "accounts", "disable", account["id"]))["disabled"] is True
    await until(lambda: has_status(403))
    head, *rows = (await run(service, "accounts", "list")).stdout.splitlines()
    assert [row[head.index("disabled") :].split()[0] for row in rows if account["id"] in row] == ["yes"]
    assert (await run_json(service, "accounts", "enable", account["id"]))["disabled"] is False
    await until(lambda: has_status(200))
    granted = await run_json(service, "keys", "set", made["id"], "--directive", "upstream", "--directive", "retry")
    assert granted["directives"] == ["upstream", "retry"]
    assert (await run_json(service, "keys", "set", made["id"], "--usual-directives"))["directives"] is None
    wrong = await run(service, "keys", "set", made["id"], "--allow-ip", "somewhere")
    assert wrong.returncode == 1
    assert "allowed_ips" in wrong.stderr


async def test_uses_expiry_owner_and_note_of_a_key_are_set_from_the_command_line(service: DashboardService) -> None:
    account = await service.account()
    contract = "0x" + "aB" * 20
    uses = ("--allow-network", "ethereum/sepolia", "--allow-method", "eth_call", "--allow-contract", contract)
    about = ("--owner", "payments", "--note", "nightly job", "--expires-at", "2090-01-31T00:00:00Z")
    made = await run_json(service, "keys", "create", "--account", account["id"], "--mode", "test", *uses, *about)
    shown = await run_json(service, "keys", "show", made["id"])
    for row in (made, shown):
        assert (row["allowed_networks"], row["allowed_methods"]) == (["ethereum/sepolia"], ["eth_call"])
        assert (row["allowed_contracts"], row["owner"], row["note"]) == ([contract], "payments", "nightly job")
        assert row["expires_at"].startswith("2090-01-31T00:00:00")
    changed = await run_json(
        service, "keys", "set", made["id"], "--for-anything", "--expires-at", "never", "--note", ""
    )
    assert (changed["allowed_networks"], changed["allowed_methods"], changed["allowed_contracts"]) == ([], [], [])
    assert (changed["owner"], changed["note"], changed["expires_at"]) == ("payments", "", None)
    wrong = await run(service, "keys", "set", made["id"], "--expires-at", "tomorrow")
    assert (wrong.returncode, "2026-01-15T09:30:00Z" in wrong.stderr) == (1, True)
    wrong = await run(
        service, "keys", "set", made["id"], "--allow-network", "ethereum/mainet", "--allow-method", "eth_cal"
    )
    assert wrong.returncode == 1
    assert "did you mean ethereum/mainnet?" in wrong.stderr
    assert "did you mean eth_call?" in wrong.stderr


async def test_request_is_explained_from_the_command_line(service: DashboardService) -> None:
    holder = await service.holder()
    made = await holder.new_key()

    async def known() -> bool:
        return (await call(service, made["key"])).status == 200

    await until(known)
    request_id = (await call(service, made["key"], "eth_nothing", **{"X-Request-Id": "explained-1"})).headers[
        "X-Request-Id"
    ]

    async def is_written() -> bool:
        return (await holder.get(f"/account/requests/{request_id}")).status == 200

    await until(is_written)
    text = (await run(service, "explain", request_id)).stdout
    assert text.startswith(f"eth_nothing on {NETWORK}: status 200")
    assert "(caused by the call itself)" in text
    assert "none was asked" in text
    assert (await run_json(service, "explain", request_id))["client_id"] == request_id
    assert (await run(service, "explain", "absent")).returncode == 1
    tail = (await run(service, "logs", "tail", "--once", "--failed", "--key", made["id"])).stdout
    (line,) = tail.splitlines()
    assert "req_" in line
    assert "eth_nothing" in line.split()
    (shown,) = (
        await run(service, "logs", "tail", "--once", "--failed", "--json", "--key", made["id"])
    ).stdout.splitlines()
    assert orjson.loads(shown)["client_id"] == request_id
    listed = (await holder.get("/account/requests?reason=failed")).data
    assert [each["client_id"] for each in listed["requests"]] == [request_id]
    changed = await holder.request("PATCH", "/account", {"record_params": True})
    assert changed.data["account"]["record_params"] is True


async def test_explanation_has_the_whole_story_of_a_call(service: DashboardService) -> None:
    holder = await service.holder()
    made = await holder.new_key()

    async def is_known() -> bool:
        return (await call(service, made["key"])).status == 200

    async def is_recorded() -> bool:
        return (await holder.get("/account/requests/explained-2")).status == 200

    await until(is_known, every_s=0.2)
    explained = {"X-Request-Id": "explained-2", "X-Explain": "1"}

    async def is_answered() -> bool:
        return (await call(service, made["key"], **explained)).status == 200

    # The key may be new to the other worker.
    await until(is_answered, every_s=0.2)
    await until(is_recorded)
    record = (await holder.get("/account/requests/explained-2")).data
    assert (await run_json(service, "explain", "explained-2"))["price"] == record["price"] > 0
    first, *lines = (await run(service, "explain", "explained-2")).stdout.splitlines()
    assert first.startswith(f"eth_gasPrice on {NETWORK}: status 200 after ")
    facts = dict(line.strip().split(":", 1) for line in lines)
    assert {*facts} >= {"id", "time", "account", "key", "price", "charged", "cache", "reply"}
    assert (record["price"], record["units"]) == (1, 1)
    assert (facts["price"].strip(), facts["charged"].strip()) == ("1 unit", "1 unit")
    assert facts["key"].strip() == made["id"]


async def test_fleet_lists_every_process_with_its_version_and_role(service: DashboardService) -> None:
    store = FleetStore(service.pool)

    async def are_listed() -> bool:
        return {*service.running.worker_pids()} <= {each["pid"] for each in await store.processes()}

    await until(are_listed)
    found = [each for each in await run_json(service, "fleet") if each["role"] == "gateway"]
    assert {each["version"] for each in found} == {__version__}
    assert {each["pid"] for each in found} >= {*service.running.worker_pids()}
    shown = await run(service, "fleet")
    assert shown.stdout.splitlines()[0].split() == [*FLEET_COLUMNS]


async def test_changes_by_commands_are_in_the_audit_log(service: DashboardService) -> None:
    made = await run_json(service, "accounts", "create", "--name", "Audited", "--email", "audited@example.com")
    await run_json(service, "accounts", "set", made["id"], "--plan", "growth")
    key = await run_json(service, "keys", "create", "--account", made["id"], "--mode", "test")
    found = await run_json(service, "audit", "list", "--account", made["id"])
    assert [each["action"] for each in found] == ["create_key", "admin_update_account", "admin_create_account"]
    assert {(each["by"], each["name"]) for each in found} == {("operator", "command line")}
    assert (found[1]["before"], found[1]["after"]) == ({"plan": "free"}, {"plan": "growth"})
    assert key["key"] not in str(found)
    done = await run(service, "audit", "list", "--account", made["id"], "--operation", "admin_update_account")
    assert "plan free → growth" in done.stdout
    first = await run(service, "audit", "list", "--account", made["id"], "--limit", "1")
    assert "continue with --cursor" in first.stdout


async def test_last_upstream_is_cordoned_only_on_demand(service: DashboardService) -> None:
    async def labels() -> list[str]:
        return [each["label"] for each in await run_json(service, "upstreams", "list") if each["kind"] == "upstream"]

    one, other = await labels()
    await run_json(service, "upstreams", "cordon", one)
    try:
        refused = await run(service, "upstreams", "cordon", other)
        assert refused.returncode == 1
        assert f"{other} is the last upstream of {NETWORK}" in refused.stderr
        assert "--last" in refused.stderr
        assert (await run_json(service, "upstreams", "cordon", other, "--last"))["cordoned"]
        await run_json(service, "upstreams", "uncordon", other)
    finally:
        await run_json(service, "upstreams", "uncordon", one)
