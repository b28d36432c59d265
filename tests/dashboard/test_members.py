"""Members of an account: invitations, roles, removal; and operators who look at an account."""

from __future__ import annotations

import asyncio
import base64
import itertools
import re
from typing import Any

import pytest

from proxy.core.roles import PERMISSIONS
from proxy.core.sessions import SAFE
from proxy.errors import Forbidden
from proxy.services.accounts.account_mails import AccountMails
from proxy.services.accounts.sign_in import MOST_MAILS, SignInPlace, hash_password
from proxy.services.accounts.team import MOST_BY_ACCOUNT, MOST_TO_ADDRESS, Team
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.members import MemberStore
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.sessions import SessionStore
from proxy.tasks import Tasks
from tests.dashboard.service import API_SPEC, PASSWORD, Client, DashboardService, Reply
from tests.dashboard.test_commands import run_json
from tests.dashboard.test_second_factor import App
from tests.dashboard.test_sign_in_links import PEPPER, SETTINGS, sign_in_of
from tests.delivery.test_mails import MailServer, mail_server
from tests.service import until

__all__ = ("mail_server",)

OWN_PASSWORD = "the member's own password"
# Changes that everyone who is signed in may make, and those of their own profile.
_OPEN = {"account_sign_out"}
_serial = itertools.count(1)


def address() -> str:
    return f"member{next(_serial)}@example.com"


async def invite(owner: Client, email: str, role: str = "developer") -> Reply:
    return await owner.post("/account/invitations", {"email": email, "role": role})


def token_of(url: str) -> str:
    return url.partition("#invitation=")[2]


async def accept(service: DashboardService, token: str, password: str = OWN_PASSWORD) -> tuple[Client, Reply]:
    client = Client(service)
    reply = await client.post("/account/sign-in/invitation/accept", {"token": token, "password": password})
    if reply.status == 200:
        client.csrf = reply.data["csrf_token"]
        client.account = reply.data
    return client, reply


async def member_of(service: DashboardService, owner: Client, role: str = "developer") -> Client:
    sent = await invite(owner, address(), role)
    assert sent.status == 201, sent
    client, reply = await accept(service, token_of(sent.data["url"]))
    assert reply.status == 200, reply
    return client


async def people(owner: Client) -> dict[str, dict[str, Any]]:
    return {each["email"]: each for each in (await owner.get("/account/members")).data["members"]}


async def test_invited_person_joins_with_an_own_password(service: DashboardService) -> None:
    owner, email = await service.holder(), address()
    sent = (await invite(owner, email)).data
    assert sent["url"].startswith("https://dashboard.example.com/#invitation=")
    assert [each["email"] for each in (await owner.get("/account/members")).data["invitations"]] == [email]

    token = token_of(sent["url"])
    read = await Client(service).post("/account/sign-in/invitation", {"token": token})
    assert read.data == {"account": "Holder", "email": email, "role": "developer"}
    member, reply = await accept(service, token)
    assert reply.data["account"]["id"] == owner.account["id"]
    assert reply.data["person"]["permissions"] == sorted(PERMISSIONS["developer"])
    (await accept(service, token))[1].fault(401)

    again = Client(service)
    signed = await again.post("/account/sign-in", {"email": email.upper(), "password": OWN_PASSWORD})
    assert signed.data["person"] == reply.data["person"]
    (await Client(service).post("/account/sign-in", {"email": email, "password": PASSWORD})).fault(401)
    assert (await member.get("/account")).data["account"]["email"] == owner.account["email"]
    listed = (await owner.get("/account/members")).data
    assert [(each["email"], each["role"], each["is_first_owner"]) for each in listed["members"]] == [
        (owner.account["email"], "owner", True),
        (email, "developer", False),
    ]
    assert listed["invitations"] == []


async def test_member_has_an_own_second_factor_and_own_sessions(service: DashboardService) -> None:
    owner = await service.holder()
    member = await member_of(service, owner)
    begun = (await member.post("/account/second-factor", {"current_password": OWN_PASSWORD})).data
    app = App(base64.b32decode(begun["secret"]))
    assert (await member.post("/account/second-factor/confirm", {"code": app.code()})).status == 200
    email = member.account["person"]["email"]
    given = {"email": email, "password": OWN_PASSWORD}
    (await Client(service).post("/account/sign-in", given)).fault(401)
    assert (await Client(service).post("/account/sign-in", {**given, "code": app.code()})).status == 200
    await service.holder(owner.account)
    assert {each["has_second_factor"] for each in (await people(owner)).values()} == {True, False}
    assert len((await member.get("/account/sessions")).data["sessions"]) == 2
    await member.request("DELETE", "/account/sessions")
    assert (await owner.get("/account/session")).status == 200
    new = {"current_password": OWN_PASSWORD, "new_password": "another long password"}
    assert (await member.request("PUT", "/account/password", new)).status == 200
    assert (await service.holder(owner.account)).csrf


@pytest.mark.parametrize("role", ["developer", "read-only", "visitor"])
async def test_every_operation_is_open_only_to_the_roles_that_have_its_permission(
    service: DashboardService, role: str
) -> None:
    """Roles are checked before path and body, so that a request without either is enough."""
    owner = await service.holder()
    client = await visit(service, owner) if role == "visitor" else await member_of(service, owner, role)
    allowed = PERMISSIONS[role]  # type: ignore[index]
    refused = []
    for operation in API_SPEC.operations.values():
        if operation.session != "account" or operation.id in _OPEN:
            continue
        assert operation.permission is not None
        if operation.permission in allowed:
            continue
        path = re.sub(r"\{[a-z_]+\}", "nothing", operation.path)
        words = (await client.request(operation.method, path)).fault(403)
        assert "role" in words or "only look" in words, operation.id
        refused.append(operation.id)
    assert {"create_key", "account_create_webhook", "remove_member", "delete_account"} & set(refused)
    assert (await client.get("/account/keys")).status == 200
    assert (await client.get("/account/members")).status == 200


def test_operations_that_change_an_account_need_more_than_a_look() -> None:
    changes = {
        operation.id
        for operation in API_SPEC.operations.values()
        if operation.session == "account" and operation.method not in SAFE and operation.permission == "view"
    }
    assert changes == _OPEN
    assert PERMISSIONS["visitor"] < PERMISSIONS["read-only"] < PERMISSIONS["developer"] < PERMISSIONS["owner"]


async def test_developer_manages_keys_and_the_log_names_each_person(service: DashboardService) -> None:
    owner = await service.holder()
    member = await member_of(service, owner)
    key = (await member.new_key())["id"]
    email = member.account["person"]["email"]
    (await member.post("/account/delete", {"email": owner.account["email"]})).fault(403)
    (await invite(member, address())).fault(403)
    log = [
        (each["name"], each["action"], each["subject"])
        for each in (await owner.get("/account/actions")).data["actions"]
    ]
    assert log == [
        (email, "create_key", key),
        (email, "account_accept_invitation", ""),
        (owner.account["email"], "invite_member", email),
        (owner.account["email"], "account_sign_in", ""),
    ]


async def test_removed_member_is_out_at_once_and_cannot_sign_in(service: DashboardService) -> None:
    owner, stranger = await service.holder(), await service.holder()
    member = await member_of(service, owner, "owner")
    person = member.account["person"]
    await invite(member, address())
    (await stranger.request("DELETE", f"/account/members/{person['id']}")).fault(404)
    removals = [owner.request("DELETE", f"/account/members/{person['id']}") for _ in range(2)]
    assert sorted(reply.status for reply in await asyncio.gather(*removals)) == [200, 404]
    for _ in range(6):  # of both workers
        (await member.get("/account/keys")).fault(401)
    given = {"email": person["email"], "password": OWN_PASSWORD}
    (await Client(service).post("/account/sign-in", given)).fault(401)
    listed = (await owner.get("/account/members")).data
    assert (len(listed["members"]), listed["invitations"]) == (1, [])
    assert (await member_of(service, owner)).csrf


async def test_role_changes_with_the_next_request(service: DashboardService) -> None:
    owner = await service.holder()
    member = await member_of(service, owner, "owner")
    path = f"/account/members/{member.account['person']['id']}"
    assert (await invite(member, address())).status == 201
    changed = await owner.request("PATCH", path, {"role": "read-only"})
    assert changed.data["role"] == "read-only"
    (await member.post("/account/keys", {"name": "x", "mode": "test"})).fault(403)
    (await member.request("PATCH", path, {"role": "owner"})).fault(403)
    assert (await owner.get("/account/members")).data["invitations"] == []
    (await owner.request("PATCH", path, {"role": "visitor"})).fault(400)


async def test_first_owner_stays(service: DashboardService) -> None:
    owner = await service.holder()
    member = await member_of(service, owner, "owner")
    path = f"/account/members/{owner.account['id']}"
    for client in (owner, member):
        assert "first owner" in (await client.request("DELETE", path)).fault(400)
        assert "first owner" in (await client.request("PATCH", path, {"role": "developer"})).fault(400)
    assert (await owner.get("/account/session")).status == 200


async def test_owners_who_remove_each_other_leave_the_first(service: DashboardService) -> None:
    owner = await service.holder()
    members = [await member_of(service, owner, "owner") for _ in range(2)]
    paths = [f"/account/members/{each.account['person']['id']}" for each in members]
    replies = await asyncio.gather(members[0].request("DELETE", paths[1]), members[1].request("DELETE", paths[0]))
    done, late = sorted(reply.status for reply in replies)
    assert done == 200
    assert late in (401, 403)
    assert len(await people(owner)) == 2


async def test_invitation_is_revoked_replaced_and_works_once_at_the_same_moment(service: DashboardService) -> None:
    owner, stranger, email = await service.holder(), await service.holder(), address()
    first = (await invite(owner, email)).data
    second = (await invite(owner, email, "read-only")).data
    (await accept(service, token_of(first["url"])))[1].fault(401)
    (await stranger.request("DELETE", f"/account/invitations/{second['id']}")).fault(404)
    assert (await owner.request("DELETE", f"/account/invitations/{second['id']}")).data["revoked"] is True
    (await accept(service, token_of(second["url"])))[1].fault(401)

    third = token_of((await invite(owner, email)).data["url"])
    (await accept(service, third, "short"))[1].fault(400)
    replies = [reply for _, reply in await asyncio.gather(*(accept(service, third) for _ in range(3)))]
    assert sorted(reply.status for reply in replies) == [200, 401, 401]
    async with service.pool.connection() as connection:
        await connection.execute("update invitations set expires_at = now()")
    for token in ("", "x" * 43, "\0", token_of((await invite(owner, address())).data["url"])[:-1]):
        assert (await Client(service).post("/account/sign-in/invitation", {"token": token})).status in (400, 401)


async def test_invitation_does_not_reveal_whether_an_address_has_an_account(service: DashboardService) -> None:
    owner, other = await service.holder(), await service.holder()
    known, unknown = await invite(owner, other.account["email"]), await invite(owner, address())
    assert known.status == unknown.status == 201
    assert set(known.data) == set(unknown.data)
    token = token_of(known.data["url"])
    assert "already signs in to another account" in (await accept(service, token))[1].fault(400)
    assert (await Client(service).post("/account/sign-in/invitation", {"token": token})).status == 200
    assert "already a member" in (await invite(owner, owner.account["email"].upper())).fault(400)
    # And an operator cannot create an account for a member's address.
    member = await member_of(service, owner)
    operator = await service.operator()
    body = {"name": "a", "email": member.account["person"]["email"]}
    assert "already signs in" in (await operator.post("/admin/accounts", body)).fault(400)


async def test_operator_learns_how_to_release_the_address_of_a_member(service: DashboardService) -> None:
    """Without mail, an account can take an address that is not its own."""
    owner, operator, other = await service.holder(), await service.operator(), await service.holder()
    person = (await member_of(service, owner)).account["person"]
    release = f"remove-member {owner.account['id']} {person['id']}"
    assert release in (await operator.post("/admin/accounts", {"name": "a", "email": person["email"]})).fault(400)
    path = f"/admin/accounts/{other.account['id']}"
    assert release in (await operator.request("PATCH", path, {"email": person["email"]})).fault(400)
    await run_json(service, "accounts", *release.split())
    assert (await operator.post("/admin/accounts", {"name": "a", "email": person["email"]})).status == 201


async def test_invitations_are_bounded_by_account_and_by_address(service: DashboardService) -> None:
    email, owner = address(), await service.holder()
    for _ in range(MOST_TO_ADDRESS):
        assert (await invite(owner, email)).status == 201
    (await invite(owner, email)).fault(429)
    for _ in range(MOST_BY_ACCOUNT - MOST_TO_ADDRESS - 1):
        assert (await invite(owner, address())).status == 201
    (await invite(owner, address())).fault(429)
    # The account does not use up the invitations of others, though there is a limit for all of them.
    others = [await service.holder() for _ in range(MOST_MAILS // MOST_TO_ADDRESS)]
    sent = [(await invite(each, email)).status for each in others for _ in range(MOST_TO_ADDRESS)]
    assert sent == [201] * (MOST_MAILS - MOST_TO_ADDRESS) + [429] * MOST_TO_ADDRESS
    # Links that are mailed to it count too.
    (await Client(service).post("/account/sign-in/link", {"email": email})).fault(429)


async def test_deleted_account_has_no_members_left(service: DashboardService) -> None:
    owner = await service.holder()
    member = await member_of(service, owner)
    await invite(owner, address())
    await owner.post("/account/delete", {"email": owner.account["email"], "current_password": PASSWORD})
    (await member.get("/account/session")).fault(401)
    async with service.pool.connection() as connection:
        for table in ("members", "invitations"):
            assert not await connection.fetchval(
                f"select count(*) from {table} where account_id = $1", owner.account["id"]
            )
        left = "select count(*) from account_passwords where account_id = $1"
        assert not await connection.fetchval(left, member.account["person"]["id"])


# Operators


async def test_operator_lists_and_removes_members_on_the_command_line(service: DashboardService) -> None:
    owner = await service.holder()
    member = await member_of(service, owner)
    account, person = owner.account["id"], member.account["person"]
    listed = await run_json(service, "accounts", "members", account)
    assert [(each["id"], each["role"]) for each in listed] == [(account, "owner"), (person["id"], "developer")]
    removed = await run_json(service, "accounts", "remove-member", account, person["id"])
    assert removed["email"] == person["email"]
    (await member.get("/account/session")).fault(401)


async def visit(service: DashboardService, owner: Client) -> Client:
    operator = await service.operator()
    reply = await operator.post(f"/admin/accounts/{owner.account['id']}/visit")
    assert reply.status == 201, reply
    assert (await operator.get("/admin/session")).status == 200
    client = Client(service)
    client.cookies = dict(operator.cookies)
    client.csrf = reply.data["csrf_token"]
    client.account = reply.data
    return client


async def test_operator_looks_at_an_account_for_half_an_hour(service: DashboardService) -> None:
    owner = await service.holder()
    await owner.new_key()
    visitor = await visit(service, owner)
    session = (await visitor.get("/account/session")).data
    assert (session["account"]["id"], session["person"]["role"]) == (owner.account["id"], "visitor")
    assert len((await visitor.get("/account/keys")).data["keys"]) == 1
    (await visitor.post("/account/keys", {"name": "x", "mode": "test"})).fault(403)
    (await visitor.get("/account/sessions")).fault(403)
    log = (await owner.get("/account/actions")).data["actions"]
    assert (log[0]["by"], log[0]["action"]) == ("operator", "admin_visit_account")
    assert [each["email"] for each in (await owner.get("/account/members")).data["members"]] == [owner.account["email"]]

    async with service.pool.connection() as connection:
        lasts = await connection.fetchval(
            "select ends_at - now() from account_visits where id = $1", session["person"]["id"]
        )
        assert 1500 < lasts.total_seconds() <= 1800
        await connection.execute("update account_visits set ends_at = now() where id = $1", session["person"]["id"])
    (await visitor.get("/account/session")).fault(401)


async def test_visit_ends_with_the_operators_token(service: DashboardService) -> None:
    owner = await service.holder()
    visitor = await visit(service, owner)
    async with service.pool.connection() as connection:
        token = await connection.fetchval(
            "select admin_token_id from account_visits where id = $1", visitor.account["person"]["id"]
        )
    await service.sessions.revoke_token(token)
    (await visitor.get("/account/session")).fault(401)
    (await owner.post(f"/admin/accounts/{owner.account['id']}/visit")).fault(401)


async def test_disabled_or_unknown_account_cannot_be_visited(service: DashboardService) -> None:
    owner, operator = await service.holder(), await service.operator()
    path = f"/admin/accounts/{owner.account['id']}"
    await operator.request("PATCH", path, {"disabled": True})
    assert "disabled" in (await operator.post(f"{path}/visit")).fault(400)
    (await operator.post("/admin/accounts/acct_0/visit")).fault(404)


# Mail


async def test_invitation_is_mailed_and_the_first_owner_learns_of_the_new_member(
    pool: Pool, mail_server: MailServer
) -> None:
    tasks, tokens = Tasks(), SessionStore(pool, pepper=PEPPER)
    account = await KeyStore(pool, pepper=PEPPER, plans={"free": 10}).create_account(
        name="Acme", email="first@example.com", plan="free"
    )
    await tokens.set_password(account["id"], hash_password(PASSWORD))
    sign_in = sign_in_of(pool, mail_server, tasks)
    here = SignInPlace("192.0.2.1")
    owner = await sign_in.by_password("first@example.com", PASSWORD, code=None, at=here)
    team = Team(MemberStore(pool), tokens, sign_in, AccountMails(mail_server.mailer(), tasks), SETTINGS)

    async def mail_to(address: str) -> str:
        found = [each for each in mail_server.mails if each["X-Rcpt"] == address]
        return str(found[-1].get_content()) if found else ""

    try:
        assert (await team.invite(owner, email="new@example.com", role="developer")).url == ""
        text = str(await until(lambda: mail_to("new@example.com")))
        assert "first@example.com invites you to the account Acme" in text
        joined = await team.accept(token_of(text).split()[0], password=OWN_PASSWORD, at=here)
        assert (joined.session.id, joined.session.role) == (account["id"], "developer")
        assert "new@example.com has joined" in str(await until(lambda: mail_to("first@example.com")))
        for number in range(SETTINGS.members - 1):
            await team.invite(owner, email=f"{number}@example.com", role="read-only")
        await team.invite(owner, email="0@example.com", role="owner")
        with pytest.raises(Forbidden, match="members and invitations"):
            await team.invite(owner, email="more@example.com", role="read-only")
    finally:
        await tasks.close()
