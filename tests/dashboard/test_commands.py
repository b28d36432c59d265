"""What operators do on the command line for people who sign in."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import orjson

from tests.dashboard.service import PASSWORD, Desk, Person, call
from tests.service import ROOT, until


async def run(desk: Desk, *words: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "proxy", *words, "--config", str(desk.running.config)],
        cwd=ROOT,
        input=typed,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


async def said(desk: Desk, *words: str, typed: str = "") -> Any:
    done = await run(desk, *words, "--json", typed=typed)
    assert done.returncode == 0, done.stderr
    return orjson.loads(done.stdout)


async def test_admin_token_is_made_listed_and_revoked(desk: Desk) -> None:
    made = await said(desk, "admin", "token", "create", "--name", "day shift")
    operator = Person(desk)
    assert (await operator.post("/admin/sign-in", {"token": made["token"]})).status == 200
    listed = await said(desk, "admin", "token", "list")
    assert [(each["name"], each["revoked_at"]) for each in listed if each["id"] == made["id"]] == [("day shift", None)]
    assert made["token"] not in str(listed)
    assert (await said(desk, "admin", "token", "revoke", made["id"]))["revoked_at"]
    (await operator.get("/admin/session")).fault(401)
    missing = await run(desk, "admin", "token", "revoke", "admt_0")
    assert missing.returncode == 1
    assert "admt_0" in missing.stderr


async def test_password_is_set_from_standard_input_and_ends_all_sessions(desk: Desk) -> None:
    holder = await desk.holder()
    account = holder.account["id"]
    done = await said(desk, "accounts", "password", account, "--stdin", typed="another long password\n")
    assert done == {"id": account, "password": "set"}
    (await holder.get("/account/session")).fault(401)
    body = {"email": holder.account["email"], "password": "another long password"}
    assert (await Person(desk).post("/account/sign-in", body)).status == 200
    (await Person(desk).post("/account/sign-in", {**body, "password": PASSWORD})).fault(401)
    short = await run(desk, "accounts", "password", account, "--stdin", typed="short\n")
    assert short.returncode == 1
    assert "12" in short.stderr
    assert (await run(desk, "accounts", "password", "acct_0", "--stdin", typed="long enough for it\n")).returncode == 1


async def test_link_of_the_command_line_signs_in_once(desk: Desk) -> None:
    account = await desk.account(password=None)
    made = await said(desk, "accounts", "link", account["id"])
    assert made["url"].startswith("https://desk.example.com/#token=")
    body = {"token": made["url"].partition("#token=")[2]}
    assert (await Person(desk).post("/account/sign-in/redeem", body)).status == 200
    (await Person(desk).post("/account/sign-in/redeem", body)).fault(401)


async def test_account_and_key_are_fenced_and_disabled_from_the_command_line(desk: Desk) -> None:
    account = await desk.account()
    words = ("--account", account["id"], "--mode", "test", "--allow-ip", "203.0.113.9/24")
    made = await said(desk, "keys", "create", *words, "--allow-origin", "https://app.example.com")
    assert (made["allowed_ips"], made["allowed_origins"]) == (["203.0.113.0/24"], ["https://app.example.com"])

    async def status() -> int:
        return (await call(desk, made["key"])).status

    async def is_(wanted: int) -> bool:
        return {await status() for _ in range(6)} == {wanted}

    await until(lambda: is_(403))
    assert (await said(desk, "keys", "set", made["id"], "--from-anywhere"))["allowed_ips"] == []
    await until(lambda: is_(200))
    assert (await said(desk, "accounts", "disable", account["id"]))["disabled"] is True
    await until(lambda: is_(403))
    head, *rows = (await run(desk, "accounts", "list")).stdout.splitlines()
    assert [row[head.index("disabled") :].split()[0] for row in rows if account["id"] in row] == ["True"]
    assert (await said(desk, "accounts", "enable", account["id"]))["disabled"] is False
    await until(lambda: is_(200))
    wrong = await run(desk, "keys", "set", made["id"], "--allow-ip", "somewhere")
    assert wrong.returncode == 1
    assert "allowed_ips" in wrong.stderr
