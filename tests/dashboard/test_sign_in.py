"""Sign-in, sessions, CSRF protection, sign-in links and admin tokens."""

from __future__ import annotations

import asyncio

import pytest

from tests.dashboard.service import PASSWORD, Client, DashboardService, wait_until_known
from tests.database import connected
from tests.service import until


async def test_holder_signs_in_with_a_password_and_out_again(service: DashboardService) -> None:
    holder = await service.holder()
    session = await holder.get("/account/session")
    assert session.data["account"]["email"] == holder.account["email"]
    assert session.data["account"]["has_password"] is True
    assert session.data["csrf_token"] == holder.csrf
    cookies = dict(holder.cookies)
    assert (await holder.post("/account/sign-out")).data == {"signed_out": True}
    # The browser stays known.
    assert [*holder.cookies] == ["penstock_device"]
    holder.cookies = cookies
    (await holder.get("/account/session")).fault(401)


async def test_session_cookie_is_http_only_and_same_site(service: DashboardService) -> None:
    account = await service.account()
    body = {"email": account["email"], "password": PASSWORD}
    cookie = (await Client(service).post("/account/sign-in", body)).headers["Set-Cookie"]
    name, *attributes = cookie.split("; ")
    assert name.startswith("penstock_session=")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(attributes)
    assert "Secure" not in attributes
    secure = (await Client(service).post("/account/sign-in", body, X_Forwarded_Proto="https")).headers["Set-Cookie"]
    name, *attributes = secure.split("; ")
    assert name.startswith("__Host-penstock_session=")
    assert {"HttpOnly", "SameSite=Strict", "Path=/", "Secure"} <= set(attributes)


async def test_wrong_password_and_unknown_email_get_the_same_reply(service: DashboardService) -> None:
    account = await service.account()
    without = await service.account(password=None)
    replies = [
        await Client(service).post("/account/sign-in", {"email": email, "password": "not the password"})
        for email in (account["email"], "nobody@example.com", without["email"], "not an email", "n\u00fcl@example.com")
    ]
    assert {reply.status for reply in replies} == {401}
    assert len({reply.body for reply in replies}) == 1
    volatile = {"X-Request-ID", "X-Request-Id", "X-RateLimit-Remaining", "X-RateLimit-Reset", "Date"}
    assert len({tuple(pair for pair in reply.headers.items() if pair[0] not in volatile) for reply in replies}) == 1


async def test_email_is_case_insensitive(service: DashboardService) -> None:
    account = await service.account()
    reply = await Client(service).post("/account/sign-in", {"email": account["email"].upper(), "password": PASSWORD})
    assert reply.status == 200


async def test_attempts_per_email_are_limited_across_addresses(service: DashboardService) -> None:
    for email in ((await service.account())["email"], "never.seen@example.com"):
        for _ in range(10):
            reply = await Client(service).post("/account/sign-in", {"email": email, "password": "a guess, a guess"})
            assert reply.status == 401
        reply = await Client(service).post("/account/sign-in", {"email": email, "password": PASSWORD})
        assert "too many" in reply.fault(429)
        assert 1 <= int(reply.headers["Retry-After"]) <= 60


async def test_attempts_per_ip_address_are_limited(service: DashboardService) -> None:
    guesser = Client(service)
    statuses: list[int] = []
    while 429 not in statuses and len(statuses) < 100:  # the limit refills while the test runs
        body = {"email": f"guess{len(statuses)}@example.com", "password": "a guess, a guess"}
        statuses.append((await guesser.post("/account/sign-in", body)).status)
    assert statuses[:20] == [401] * 20
    assert statuses[-1] == 429


async def test_attempts_of_one_ipv6_network_are_limited_together(service: DashboardService) -> None:
    statuses: list[int] = []
    guesser = Client(service)
    while 429 not in statuses and len(statuses) < 100:
        guesser.address = f"2001:db8:9:9::{len(statuses):x}"
        body = {"email": f"six{len(statuses)}@example.com", "password": "a guess, a guess"}
        statuses.append((await guesser.post("/account/sign-in", body)).status)
    assert statuses[:20] == [401] * 20
    assert statuses[-1] == 429


async def test_sign_in_starts_a_new_session(service: DashboardService) -> None:
    """Session fixation: a planted cookie is replaced, and signing in again ends the previous session."""
    planted = "A" * 43
    holder = Client(service)
    holder.cookies["penstock_session"] = planted
    account = await service.account()
    body = {"email": account["email"], "password": PASSWORD}
    assert (await holder.post("/account/sign-in", body)).status == 200
    first = holder.cookies["penstock_session"]
    assert first != planted
    assert (await holder.post("/account/sign-in", body)).status == 200
    assert holder.cookies["penstock_session"] != first
    for old in (planted, first):
        thief = Client(service)
        thief.cookies["penstock_session"] = old
        (await thief.get("/account/session")).fault(401)


async def test_write_requires_the_csrf_token(service: DashboardService) -> None:
    holder, other = await service.holder(), await service.holder()
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
async def test_page_of_another_origin_can_neither_write_nor_sign_in(
    service: DashboardService, headers: dict[str, str]
) -> None:
    holder = await service.holder()
    (await holder.post("/account/keys", {"name": "forged", "mode": "test"}, **headers)).fault(403)
    body = {"email": holder.account["email"], "password": PASSWORD}
    (await Client(service).post("/account/sign-in", body, **headers)).fault(403)


async def test_dashboard_may_write_from_its_own_origins(service: DashboardService) -> None:
    holder = await service.holder()
    here = f"http://127.0.0.1:{service.running.port}"
    for origin in (here, "https://dashboard.example.com"):
        assert (await holder.post("/account/keys", {"name": "own", "mode": "test"}, Origin=origin)).status == 201
    reply = await holder.post("/account/keys", {"name": "own", "mode": "test"}, Sec_Fetch_Site="same-origin")
    assert reply.status == 201
    assert reply.headers["Cache-Control"] == "no-store"


async def test_session_expires_by_age_and_by_idle_time(service: DashboardService) -> None:
    for column in ("expires_at", "seen_at"):
        holder = await service.holder()
        async with connected(service.database) as connection:
            await connection.execute(
                f"update sessions set {column} = now() - interval '1 day' where account_id = $1", holder.account["id"]
            )
        (await holder.get("/account/session")).fault(401)


async def test_request_resets_the_idle_time_of_a_session(service: DashboardService) -> None:
    holder = await service.holder()
    async with connected(service.database) as connection:
        await connection.execute(
            "update sessions set seen_at = now() - interval '50 minutes' where account_id = $1", holder.account["id"]
        )
        assert (await holder.get("/account/session")).status == 200
        age = await connection.fetchval(
            "select extract(epoch from now() - seen_at) from sessions where account_id = $1", holder.account["id"]
        )
    assert age < 600


async def test_link_signs_in_once_and_sets_a_password(service: DashboardService) -> None:
    account = await service.account(password=None)
    operator = await service.operator()
    made = await operator.post(f"/admin/accounts/{account['id']}/link")
    assert made.data["url"].startswith("https://dashboard.example.com/#token=")
    token = made.data["url"].partition("#token=")[2]
    holder = Client(service)
    body = {"token": token, "password": "a password of its own"}
    reply = await holder.post("/account/sign-in/redeem", body)
    assert reply.data["account"]["id"] == account["id"]
    assert reply.data["account"]["has_password"] is True
    (await Client(service).post("/account/sign-in/redeem", body)).fault(401)
    by_password = {"email": account["email"], "password": "a password of its own"}
    assert (await Client(service).post("/account/sign-in", by_password)).status == 200


async def test_concurrent_uses_of_a_link_sign_in_only_once(service: DashboardService) -> None:
    account = await service.account()
    operator = await service.operator()
    token = (await operator.post(f"/admin/accounts/{account['id']}/link")).data["url"].partition("#token=")[2]
    clients = [Client(service) for _ in range(8)]
    replies = await asyncio.gather(*(each.post("/account/sign-in/redeem", {"token": token}) for each in clients))
    assert sorted(reply.status for reply in replies) == [200] + [401] * 7


async def test_link_request_has_the_same_reply_but_creates_a_link_only_for_an_account(
    service: DashboardService,
) -> None:
    account = await service.account()
    known = await Client(service).post("/account/sign-in/link", {"email": account["email"]})
    unknown = await Client(service).post("/account/sign-in/link", {"email": "nobody.here@example.com"})
    assert (known.status, known.body) == (unknown.status, unknown.body) == (202, b'{"sent":true}')
    async with connected(service.database) as connection:
        query = "select count(*) from sign_in_links where account_id = $1"
        await until(lambda: connection.fetchval(query, account["id"]))
    # Without a mail server the mail is logged, but not the token.
    await until(lambda: service.running.said("mail not sent: no SMTP server is configured (mail.host)"))
    assert "#token=" not in service.running.log_file.read_text()


async def test_error_for_text_with_a_nul_names_the_member(service: DashboardService) -> None:
    operator = await service.operator()
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
    # The schema has no pattern for this member; the database rejects the value.
    policy = {"name": "a\0b", "chain": "ethereum-sepolia", "rules": {"max_gas_usd": "1"}}
    (await (await service.holder()).post("/account/gas/policies", policy)).fault(400)


async def test_new_password_requires_the_old_one_and_ends_other_sessions(service: DashboardService) -> None:
    holder = await service.holder()
    elsewhere = await service.holder(holder.account)
    wrong = {"current_password": "not the password", "new_password": "another long password"}
    assert "current_password" in (await holder.request("PUT", "/account/password", wrong)).fault(400)
    short = {"current_password": PASSWORD, "new_password": "short"}
    (await holder.request("PUT", "/account/password", short)).fault(400)
    right = {"current_password": PASSWORD, "new_password": "another long password"}
    assert (await holder.request("PUT", "/account/password", right)).status == 200
    assert (await holder.get("/account/session")).status == 200
    (await elsewhere.get("/account/session")).fault(401)
    (await Client(service).post("/account/sign-in", {"email": holder.account["email"], "password": PASSWORD})).fault(
        401
    )


async def test_disabled_account_is_signed_out_and_cannot_sign_in(service: DashboardService) -> None:
    holder, operator = await service.holder(), await service.operator()
    path = f"/admin/accounts/{holder.account['id']}"
    assert (await operator.request("PATCH", path, {"disabled": True})).data["disabled"] is True
    (await holder.get("/account/session")).fault(401)
    body = {"email": holder.account["email"], "password": PASSWORD}
    (await Client(service).post("/account/sign-in", body)).fault(401)
    await operator.request("PATCH", path, {"disabled": False})
    assert (await Client(service).post("/account/sign-in", body)).status == 200


async def test_admin_token_works_for_sign_in_and_as_bearer_token(service: DashboardService) -> None:
    token = await service.admin_token("night shift")
    operator = Client(service)
    reply = await operator.post("/admin/sign-in", {"token": token})
    assert reply.data["operator"]["name"] == "night shift"
    assert (await operator.get("/admin/accounts")).status == 200
    program = Client(service)
    bearer = f"Bearer {token}"
    assert (await program.get("/admin/accounts", Authorization=bearer)).status == 200
    made = await program.post("/admin/accounts", {"name": "P", "email": "p@example.com"}, Authorization=bearer)
    assert made.status == 201
    (await program.get("/admin/accounts", Authorization="Bearer adm_" + "A" * 43)).fault(401)


async def test_revoked_admin_token_ends_its_sessions_and_is_rejected(service: DashboardService) -> None:
    token = await service.admin_token()
    operator = Client(service)
    found = await operator.post("/admin/sign-in", {"token": token})
    await service.sessions.revoke_token(found.data["operator"]["id"])
    (await operator.get("/admin/session")).fault(401)
    (await Client(service).post("/admin/sign-in", {"token": token})).fault(401)
    (await Client(service).get("/admin/session", Authorization=f"Bearer {token}")).fault(401)


async def test_account_and_admin_sessions_are_not_interchangeable(service: DashboardService) -> None:
    holder, operator = await service.holder(), await service.operator()
    (await holder.get("/admin/accounts")).fault(401)
    (await operator.get("/account/keys")).fault(401)
    # Not under the other cookie's name either.
    holder.cookies["penstock_admin"] = holder.cookies["penstock_session"]
    (await holder.get("/admin/accounts")).fault(401)
    operator.cookies["penstock_session"] = operator.cookies["penstock_admin"]
    (await operator.get("/account/keys")).fault(401)


async def test_key_without_a_scope_for_it_is_rejected_where_people_sign_in(service: DashboardService) -> None:
    holder = await service.holder()
    key = (await holder.new_key())["key"]
    await wait_until_known(service, key)
    statuses = {"/account": 403, "/account/keys": 403, "/account/sessions": 403, "/admin/accounts": 401}
    for path, status in statuses.items():
        (await Client(service).get(path, X_API_Key=key)).fault(status)
        (await Client(service).get(path, Authorization=f"Bearer {key}")).fault(status)
        (await Client(service).get(path, X_API_Key=key[:-1])).fault(401)


async def test_database_and_log_contain_no_token_or_password(service: DashboardService) -> None:
    holder, operator = await service.holder(), await service.operator()
    key = (await holder.new_key())["key"]
    secrets = [PASSWORD, key, *holder.cookies.values(), *operator.cookies.values(), holder.csrf]
    async with connected(service.database) as connection:
        tables = [
            row[0] for row in await connection.fetch("select tablename from pg_tables where schemaname = 'public'")
        ]
        text = "\n".join([str(await connection.fetch(f"select * from {name}")) for name in tables])
    assert not [secret for secret in secrets if secret in text]
    log = service.running.log_file.read_text()
    assert not [secret for secret in secrets if secret in log]


async def test_error_does_not_repeat_a_password_or_token(service: DashboardService) -> None:
    holder = await service.holder()
    secret = "canary?"
    for method, path, body in (
        ("POST", "/account/sign-in", {"email": "a@example.com", "password": [secret]}),
        ("POST", "/account/sign-in", {"email": "a@example.com", "password": secret * 30}),
        ("POST", "/account/sign-in", [secret]),
        ("POST", "/account/sign-in/redeem", {"token": "t", "password": secret}),
        ("POST", "/account/sign-in/redeem", {"token": {"a": secret}}),
        ("PUT", "/account/password", {"current_password": {"a": secret}, "new_password": "another long password"}),
        ("PUT", "/account/password", {"current_password": PASSWORD, "new_password": secret}),
        ("POST", "/admin/sign-in", {"token": [secret]}),
    ):
        assert "canary" not in (await holder.request(method, path, body)).fault(400), (path, body)


async def test_link_does_not_accept_the_email_as_password(service: DashboardService) -> None:
    account = await service.account(password=None)
    operator = await service.operator()
    token = (await operator.post(f"/admin/accounts/{account['id']}/link")).data["url"].partition("#token=")[2]
    body = {"token": token, "password": account["email"].upper()}
    assert "must not be the email" in (await Client(service).post("/account/sign-in/redeem", body)).fault(400)
    # The link still works.
    assert (await Client(service).post("/account/sign-in/redeem", {"token": token})).status == 200


async def test_wrong_passwords_of_strangers_do_not_keep_a_holder_out(service: DashboardService) -> None:
    holder = await service.holder()
    right = {"email": holder.account["email"], "password": PASSWORD}
    wrong = {**right, "password": "a guess, a guess"}
    for _ in range(11):
        await Client(service).post("/account/sign-in", wrong)
        await Client(service).post("/account/sign-in/link", {"email": right["email"]})
    (await Client(service).post("/account/sign-in", right)).fault(429)
    (await Client(service).post("/account/sign-in/link", {"email": right["email"]})).fault(429)
    change = {"current_password": PASSWORD, "new_password": PASSWORD}
    assert (await holder.request("PUT", "/account/password", change)).status == 200
    assert (await holder.post("/account/sign-in", right)).status == 200
    assert (await holder.post("/account/sign-in/link", {"email": right["email"].upper()})).status == 202
    # A known place has its own limit.
    statuses = [(await holder.post("/account/sign-in", wrong)).status for _ in range(11)]
    assert statuses[0] == 401
    assert statuses[-1] == 429


async def test_browser_of_the_holder_is_known_wherever_it_is(service: DashboardService) -> None:
    """Strangers use up the account's count and that of the address that they share with the holder."""
    holder = await service.holder()
    right = {"email": holder.account["email"], "password": PASSWORD}
    wrong = {**right, "password": "a guess, a guess"}
    stranger = Client(service)
    statuses = [(await stranger.post("/account/sign-in", wrong)).status for _ in range(40)]
    assert statuses[-1] == 429
    holder.address = stranger.address
    assert (await holder.post("/account/sign-in", right)).status == 200
    # A made-up device token is no known one, and a planted one does not become known.
    thief = Client(service)
    thief.cookies["penstock_device"] = holder.cookies["penstock_device"][::-1]
    (await thief.post("/account/sign-in", right)).fault(429)
    planted = "A" * 43
    fresh = await service.holder()
    fresh.cookies["penstock_device"] = planted
    assert (await fresh.post("/account/sign-in", {**right, "email": fresh.account["email"]})).status == 200
    assert fresh.cookies["penstock_device"] != planted


async def test_right_password_at_a_known_place_clears_its_count(service: DashboardService) -> None:
    holder = await service.holder()
    right = {"email": holder.account["email"], "password": PASSWORD}
    for _ in range(3):
        for _ in range(9):
            (await holder.post("/account/sign-in", {**right, "password": "a guess, a guess"})).fault(401)
        assert (await holder.post("/account/sign-in", right)).status == 200


async def test_device_cookie_is_no_session(service: DashboardService) -> None:
    holder = await service.holder()
    stranger = Client(service)
    stranger.cookies["penstock_session"] = stranger.cookies["penstock_device"] = holder.cookies["penstock_device"]
    (await stranger.get("/account/session")).fault(401)
