"""Signing in, being signed in, and every way in which one is not."""

from __future__ import annotations

import asyncio

import pytest

from tests.dashboard.service import PASSWORD, Desk, Person
from tests.database import connected
from tests.service import until


async def test_holder_signs_in_with_a_password_and_out_again(desk: Desk) -> None:
    holder = await desk.holder()
    session = await holder.get("/account/session")
    assert session.data["account"]["email"] == holder.account["email"]
    assert session.data["account"]["has_password"] is True
    assert session.data["csrf_token"] == holder.csrf
    cookies = dict(holder.cookies)
    assert (await holder.post("/account/sign-out")).data == {"signed_out": True}
    assert not holder.cookies
    holder.cookies = cookies
    (await holder.get("/account/session")).fault(401)


async def test_cookie_is_out_of_reach_of_scripts_and_of_other_sites(desk: Desk) -> None:
    account = await desk.account()
    body = {"email": account["email"], "password": PASSWORD}
    cookie = (await Person(desk).post("/account/sign-in", body)).headers["Set-Cookie"]
    name, *attributes = cookie.split("; ")
    assert name.startswith("penstock_session=")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(attributes)
    assert "Secure" not in attributes
    secure = (await Person(desk).post("/account/sign-in", body, X_Forwarded_Proto="https")).headers["Set-Cookie"]
    name, *attributes = secure.split("; ")
    assert name.startswith("__Host-penstock_session=")
    assert {"HttpOnly", "SameSite=Strict", "Path=/", "Secure"} <= set(attributes)


async def test_wrong_password_and_unknown_email_get_the_same_answer(desk: Desk) -> None:
    account = await desk.account()
    without = await desk.account(password=None)
    replies = [
        await Person(desk).post("/account/sign-in", {"email": email, "password": "not the password"})
        for email in (account["email"], "nobody@example.com", without["email"], "not an e-mail", "n\u00fcl@example.com")
    ]
    assert {reply.status for reply in replies} == {401}
    assert len({reply.body for reply in replies}) == 1
    volatile = {"X-Request-ID", "X-Request-Id", "Date"}
    assert len({tuple(pair for pair in reply.headers.items() if pair[0] not in volatile) for reply in replies}) == 1


async def test_email_is_the_same_in_any_case(desk: Desk) -> None:
    account = await desk.account()
    reply = await Person(desk).post("/account/sign-in", {"email": account["email"].upper(), "password": PASSWORD})
    assert reply.status == 200


async def test_tries_with_one_email_run_out_whoever_tries_and_whether_it_exists(desk: Desk) -> None:
    for email in ((await desk.account())["email"], "never.seen@example.com"):
        for _ in range(10):
            reply = await Person(desk).post("/account/sign-in", {"email": email, "password": "a guess, a guess"})
            assert reply.status == 401
        reply = await Person(desk).post("/account/sign-in", {"email": email, "password": PASSWORD})
        assert "too many" in reply.fault(429)
        assert 1 <= int(reply.headers["Retry-After"]) <= 60


async def test_tries_of_one_address_run_out(desk: Desk) -> None:
    guesser = Person(desk)
    statuses = []
    while 429 not in statuses and len(statuses) < 100:  # some come back in the time that all of it takes
        body = {"email": f"guess{len(statuses)}@example.com", "password": "a guess, a guess"}
        statuses.append((await guesser.post("/account/sign-in", body)).status)
    assert statuses[:20] == [401] * 20
    assert statuses[-1] == 429


async def test_session_from_before_signing_in_is_not_the_session_after(desk: Desk) -> None:
    """Fixation: a cookie that somebody planted signs nobody in, and one that was good is over."""
    planted = "A" * 43
    holder = Person(desk)
    holder.cookies["penstock_session"] = planted
    account = await desk.account()
    body = {"email": account["email"], "password": PASSWORD}
    assert (await holder.post("/account/sign-in", body)).status == 200
    first = holder.cookies["penstock_session"]
    assert first != planted
    assert (await holder.post("/account/sign-in", body)).status == 200
    assert holder.cookies["penstock_session"] != first
    for old in (planted, first):
        thief = Person(desk)
        thief.cookies["penstock_session"] = old
        (await thief.get("/account/session")).fault(401)


async def test_what_changes_something_needs_the_csrf_token(desk: Desk) -> None:
    holder, other = await desk.holder(), await desk.holder()
    good = holder.csrf
    for token in ("", "x", other.csrf, good[:-1]):
        holder.csrf = token
        body = {"name": "forged", "mode": "test"}
        assert "X-CSRF-Token" in (await holder.post("/account/keys", body)).fault(403)
    assert (await holder.get("/account/keys")).data == {"keys": []}
    holder.csrf = good
    await holder.new_key()


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Origin": "null"},
    ],
)
async def test_page_of_another_origin_can_neither_act_nor_sign_in(desk: Desk, headers: dict[str, str]) -> None:
    holder = await desk.holder()
    (await holder.post("/account/keys", {"name": "forged", "mode": "test"}, **headers)).fault(403)
    body = {"email": holder.account["email"], "password": PASSWORD}
    (await Person(desk).post("/account/sign-in", body, **headers)).fault(403)


async def test_own_page_may_act_under_either_of_its_names(desk: Desk) -> None:
    holder = await desk.holder()
    here = f"http://127.0.0.1:{desk.running.port}"
    for origin in (here, "https://desk.example.com"):
        assert (await holder.post("/account/keys", {"name": "own", "mode": "test"}, Origin=origin)).status == 201
    reply = await holder.post("/account/keys", {"name": "own", "mode": "test"}, Sec_Fetch_Site="same-origin")
    assert reply.status == 201
    assert reply.headers["Cache-Control"] == "no-store"


async def test_session_ends_when_it_is_too_old_or_was_idle_for_too_long(desk: Desk) -> None:
    for column in ("expires_at", "seen_at"):
        holder = await desk.holder()
        async with connected(desk.database) as connection:
            await connection.execute(
                f"update sessions set {column} = now() - interval '1 day' where account_id = $1", holder.account["id"]
            )
        (await holder.get("/account/session")).fault(401)


async def test_being_used_keeps_a_session_from_being_idle(desk: Desk) -> None:
    holder = await desk.holder()
    async with connected(desk.database) as connection:
        await connection.execute(
            "update sessions set seen_at = now() - interval '50 minutes' where account_id = $1", holder.account["id"]
        )
        assert (await holder.get("/account/session")).status == 200
        age = await connection.fetchval(
            "select extract(epoch from now() - seen_at) from sessions where account_id = $1", holder.account["id"]
        )
    assert age < 600


async def test_link_signs_in_once_and_sets_a_password(desk: Desk) -> None:
    account = await desk.account(password=None)
    operator = await desk.operator()
    made = await operator.post(f"/admin/accounts/{account['id']}/link")
    assert made.data["url"].startswith("https://desk.example.com/#token=")
    token = made.data["url"].partition("#token=")[2]
    holder = Person(desk)
    body = {"token": token, "password": "a password of its own"}
    reply = await holder.post("/account/sign-in/redeem", body)
    assert reply.data["account"]["id"] == account["id"]
    assert reply.data["account"]["has_password"] is True
    (await Person(desk).post("/account/sign-in/redeem", body)).fault(401)
    by_password = {"email": account["email"], "password": "a password of its own"}
    assert (await Person(desk).post("/account/sign-in", by_password)).status == 200


async def test_two_who_use_one_link_at_once_are_one(desk: Desk) -> None:
    account = await desk.account()
    operator = await desk.operator()
    token = (await operator.post(f"/admin/accounts/{account['id']}/link")).data["url"].partition("#token=")[2]
    people = [Person(desk) for _ in range(8)]
    replies = await asyncio.gather(*(each.post("/account/sign-in/redeem", {"token": token}) for each in people))
    assert sorted(reply.status for reply in replies) == [200] + [401] * 7


async def test_link_is_promised_to_everybody_and_made_for_those_who_have_an_account(desk: Desk) -> None:
    account = await desk.account()
    known = await Person(desk).post("/account/sign-in/link", {"email": account["email"]})
    unknown = await Person(desk).post("/account/sign-in/link", {"email": "nobody.here@example.com"})
    assert (known.status, known.body) == (unknown.status, unknown.body) == (202, b'{"sent":true}')
    async with connected(desk.database) as connection:
        query = "select count(*) from sign_in_links where account_id = $1"
        await until(lambda: connection.fetchval(query, account["id"]))
    # Without a mail server the letter is in the log: not what signs in.
    await until(lambda: desk.running.said("mail not sent: no SMTP server is configured (mail.host)"))
    assert "#token=" not in desk.running.log_file.read_text()


async def test_text_that_cannot_be_stored_is_refused_by_name(desk: Desk) -> None:
    operator = await desk.operator()
    (upstream, *_) = (await operator.get("/admin/networks")).data["networks"][0]["upstreams"]
    for path, body, named in (
        ("/account/sign-in", {"email": "a\0b@example.com", "password": PASSWORD}, "email"),
        ("/account/sign-in/link", {"email": "a\0b@example.com"}, "email"),
        ("/admin/accounts", {"name": "a\0b", "email": "ab@example.com"}, "name"),
        ("/admin/accounts", {"name": "ab", "email": "a\0b@example.com"}, "email"),
        (f"/admin/upstreams/{upstream['id']}/cordon", {"reason": "a\0b"}, "reason"),
    ):
        assert named in (await operator.post(path, body)).fault(400), path
    assert "search" in (await operator.get("/admin/accounts?search=%00")).fault(400)
    # Where no pattern says so the database does.
    policy = {"name": "a\0b", "chain": "ethereum-sepolia", "rules": {"max_gas_usd": "1"}}
    (await (await desk.holder()).post("/account/gas/policies", policy)).fault(400)


async def test_new_password_needs_the_old_one_and_ends_all_other_sessions(desk: Desk) -> None:
    holder = await desk.holder()
    elsewhere = await desk.holder(holder.account)
    wrong = {"current_password": "not the password", "new_password": "another long password"}
    assert "current_password" in (await holder.ask("PUT", "/account/password", wrong)).fault(400)
    short = {"current_password": PASSWORD, "new_password": "short"}
    (await holder.ask("PUT", "/account/password", short)).fault(400)
    right = {"current_password": PASSWORD, "new_password": "another long password"}
    assert (await holder.ask("PUT", "/account/password", right)).status == 200
    assert (await holder.get("/account/session")).status == 200
    (await elsewhere.get("/account/session")).fault(401)
    (await Person(desk).post("/account/sign-in", {"email": holder.account["email"], "password": PASSWORD})).fault(401)


async def test_disabled_account_is_signed_out_and_cannot_sign_in(desk: Desk) -> None:
    holder, operator = await desk.holder(), await desk.operator()
    path = f"/admin/accounts/{holder.account['id']}"
    assert (await operator.ask("PATCH", path, {"disabled": True})).data["disabled"] is True
    (await holder.get("/account/session")).fault(401)
    body = {"email": holder.account["email"], "password": PASSWORD}
    (await Person(desk).post("/account/sign-in", body)).fault(401)
    await operator.ask("PATCH", path, {"disabled": False})
    assert (await Person(desk).post("/account/sign-in", body)).status == 200


async def test_operator_signs_in_with_a_token_or_sends_it_with_every_request(desk: Desk) -> None:
    token = await desk.admin_token("night shift")
    operator = Person(desk)
    reply = await operator.post("/admin/sign-in", {"token": token})
    assert reply.data["operator"]["name"] == "night shift"
    assert (await operator.get("/admin/accounts")).status == 200
    program = Person(desk)
    bearer = f"Bearer {token}"
    assert (await program.get("/admin/accounts", Authorization=bearer)).status == 200
    made = await program.post("/admin/accounts", {"name": "P", "email": "p@example.com"}, Authorization=bearer)
    assert made.status == 201
    (await program.get("/admin/accounts", Authorization="Bearer adm_" + "A" * 43)).fault(401)


async def test_revoked_admin_token_opens_nothing_any_more(desk: Desk) -> None:
    token = await desk.admin_token()
    operator = Person(desk)
    found = await operator.post("/admin/sign-in", {"token": token})
    await desk.sessions.revoke_token(found.data["operator"]["id"])
    (await operator.get("/admin/session")).fault(401)
    (await Person(desk).post("/admin/sign-in", {"token": token})).fault(401)
    (await Person(desk).get("/admin/session", Authorization=f"Bearer {token}")).fault(401)


async def test_holder_is_no_operator_and_no_operator_a_holder(desk: Desk) -> None:
    holder, operator = await desk.holder(), await desk.operator()
    (await holder.get("/admin/accounts")).fault(401)
    (await operator.get("/account/keys")).fault(401)
    # Nor under the other's name.
    holder.cookies["penstock_admin"] = holder.cookies["penstock_session"]
    (await holder.get("/admin/accounts")).fault(401)
    operator.cookies["penstock_session"] = operator.cookies["penstock_admin"]
    (await operator.get("/account/keys")).fault(401)


async def test_api_key_opens_nothing_that_people_sign_in_to(desk: Desk) -> None:
    holder = await desk.holder()
    key = (await holder.new_key())["key"]
    for path in ("/account", "/account/keys", "/admin/accounts"):
        (await Person(desk).get(path, X_API_Key=key)).fault(401)
        (await Person(desk).get(path, Authorization=f"Bearer {key}")).fault(401)


async def test_database_holds_no_token_and_no_password(desk: Desk) -> None:
    holder, operator = await desk.holder(), await desk.operator()
    key = (await holder.new_key())["key"]
    secrets = [PASSWORD, key, *holder.cookies.values(), *operator.cookies.values(), holder.csrf]
    async with connected(desk.database) as connection:
        tables = [
            row[0] for row in await connection.fetch("select tablename from pg_tables where schemaname = 'public'")
        ]
        text = "\n".join([str(await connection.fetch(f"select * from {name}")) for name in tables])
    assert not [secret for secret in secrets if secret in text]
    log = desk.running.log_file.read_text()
    assert not [secret for secret in secrets if secret in log]
