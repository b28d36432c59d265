"""Two-factor sign-in: on, asked for by password and link, off, and recovery."""

from __future__ import annotations

import asyncio
import base64
import time
from dataclasses import dataclass
from typing import Any

from proxy.core.one_time_codes import STEP_S, code_at, shown_secret
from proxy.services.accounts.second_factor import app_link
from tests.dashboard.service import PASSWORD, Client, DashboardService, Reply
from tests.dashboard.test_commands import run


@dataclass
class App:
    """An authenticator app. Every code works once, so each is of a later step; the service accepts one step ahead."""

    secret: bytes
    last: int = 0

    def code(self) -> str:
        self.last = max(self.last + 1, int(time.time()) // STEP_S)
        return code_at(self.secret, self.last)


async def protected(service: DashboardService) -> tuple[Client, App, list[str]]:
    """A holder with two-factor sign-in, the app and the recovery codes."""
    holder = await service.holder()
    begun = (await holder.post("/account/second-factor", {"current_password": PASSWORD})).data
    assert len(begun["qr_code"]) == len(begun["qr_code"][0]) > 20
    app = App(base64.b32decode(begun["secret"]))
    reply = await holder.post("/account/second-factor/confirm", {"code": app.code()})
    assert reply.status == 200, reply
    return holder, app, reply.data["recovery_codes"]


async def sign_in(service: DashboardService, holder: Client, **more: str) -> Reply:
    return await Client(service).post(
        "/account/sign-in", {"email": holder.account["email"], "password": PASSWORD, **more}
    )


def refusal(reply: Reply) -> Any:
    reply.fault(401)
    return reply.data["error"].get("details")


async def test_sign_in_asks_for_a_code_that_works_once(service: DashboardService) -> None:
    holder, app, _ = await protected(service)
    assert (await holder.get("/account")).data["account"]["has_second_factor"] is True
    assert refusal(await sign_in(service, holder)) == {"second_factor": "required"}
    assert refusal(await sign_in(service, holder, code="000000")) == {"second_factor": "wrong"}
    code = app.code()
    assert (await sign_in(service, holder, code=f" {code[:3]} {code[3:]}")).status == 200
    assert refusal(await sign_in(service, holder, code=code)) == {"second_factor": "wrong"}
    wrong = await Client(service).post(
        "/account/sign-in", {"email": holder.account["email"], "password": "not the password", "code": code}
    )
    assert refusal(wrong) is None


async def test_code_used_twice_at_the_same_moment_signs_in_once(service: DashboardService) -> None:
    holder, app, recovery = await protected(service)
    for code in (app.code(), recovery[0]):
        replies = await asyncio.gather(*(sign_in(service, holder, code=code) for _ in range(3)))
        assert sorted(reply.status for reply in replies) == [200, 401, 401]


async def test_it_is_off_until_a_code_confirms_it(service: DashboardService) -> None:
    holder = await service.holder()
    (await holder.post("/account/second-factor/confirm", {"code": "000000"})).fault(400)
    await holder.post("/account/second-factor", {"current_password": PASSWORD})
    (await holder.post("/account/second-factor/confirm", {"code": "nothing"})).fault(400)
    assert (await sign_in(service, holder)).status == 200
    (await holder.post("/account/second-factor/remove", {"code": "000000"})).fault(400)


async def test_setting_up_takes_the_password(service: DashboardService) -> None:
    holder = await service.holder()
    for body in ({}, {"current_password": "not the password"}):
        assert (await holder.post("/account/second-factor", body)).fault(400) == "current_password: is wrong"


async def test_other_sessions_end_when_it_is_turned_on(service: DashboardService) -> None:
    account = await service.account()
    other = await service.holder(account)
    holder = await service.holder(account)
    app = App(
        base64.b32decode((await holder.post("/account/second-factor", {"current_password": PASSWORD})).data["secret"])
    )
    assert (await holder.post("/account/second-factor/confirm", {"code": app.code()})).status == 200
    (await other.get("/account/session")).fault(401)
    (await holder.post("/account/second-factor", {"current_password": PASSWORD})).fault(400)


async def test_recovery_code_replaces_the_app_once(service: DashboardService) -> None:
    holder, _, recovery = await protected(service)
    assert len(set(recovery)) == 10
    shown = "-".join(recovery[0][at : at + 4] for at in range(0, 16, 4)).upper()
    assert (await sign_in(service, holder, code=shown)).status == 200
    assert refusal(await sign_in(service, holder, code=recovery[0])) == {"second_factor": "wrong"}
    assert (await holder.post("/account/second-factor/remove", {"code": recovery[1]})).data == {"removed": True}
    assert (await sign_in(service, holder)).status == 200


async def test_recovery_codes_of_another_account_are_worthless(service: DashboardService) -> None:
    holder, _, _ = await protected(service)
    _, _, others = await protected(service)
    assert refusal(await sign_in(service, holder, code=others[0])) == {"second_factor": "wrong"}


async def test_link_needs_the_code_too_and_is_not_used_up_without_it(service: DashboardService) -> None:
    holder, app, _ = await protected(service)
    operator = await service.operator()
    link = (await operator.post(f"/admin/accounts/{holder.account['id']}/link")).data["url"]
    token = link.partition("#token=")[2]
    assert refusal(await Client(service).post("/account/sign-in/redeem", {"token": token})) == {
        "second_factor": "required"
    }
    reply = await Client(service).post("/account/sign-in/redeem", {"token": token, "code": app.code()})
    assert reply.status == 200, reply


async def test_secret_is_encrypted_at_rest(service: DashboardService) -> None:
    holder, app, _ = await protected(service)
    async with service.pool.connection() as connection:
        sealed = await connection.fetchval(
            "select sealed from account_second_factors where account_id = $1", holder.account["id"]
        )
    assert app.secret not in sealed


async def test_operator_turns_it_off_on_the_command_line(service: DashboardService) -> None:
    holder, _, _ = await protected(service)
    words = ("accounts", "second-factor-off", holder.account["id"])
    assert (await run(service, *words)).returncode == 0
    assert (await sign_in(service, holder)).status == 200
    again = await run(service, *words)
    assert (again.returncode, "has no two-factor sign-in" in again.stderr) == (1, True)


def test_link_for_apps_escapes_the_name() -> None:
    secret = b"12345678901234567890"
    assert app_link(secret, issuer="A B", name="a&b@example.com") == (
        f"otpauth://totp/A%20B%3Aa%26b%40example.com?secret={shown_secret(secret)}&issuer=A%20B"
    )
