"""Requests of the reference with a sandbox token: as a key, for its session only."""

from __future__ import annotations

from typing import Any

import aiohttp

from tests.dashboard.service import Client, DashboardService, Reply
from tests.dashboard.test_activity import actions_of
from tests.dashboard.test_members import member_of, people
from tests.dashboard.test_usage import known_key, totals
from tests.service import until


async def send(client: Client, token: str, **headers: str) -> Reply:
    return await client.get("/chains", X_API_Key=token, **headers)


async def sandboxed(service: DashboardService, **members: Any) -> tuple[Client, str, str]:
    """A holder, the id of a key that all workers know, and a token for it."""
    holder = await service.holder()
    await known_key(service, holder, **members)
    key = (await holder.get("/account/keys")).data["keys"][0]["id"]
    return holder, key, (await holder.post(f"/account/keys/{key}/sandbox")).data["token"]


async def test_token_is_served_and_counted_as_its_key(service: DashboardService) -> None:
    holder, key, token = await sandboxed(service)
    reply = await send(holder, token, Sec_Fetch_Site="same-origin")
    assert reply.status == 200, reply
    assert reply.headers["X-Compute-Units"] == "1"

    async def is_counted() -> bool:
        return bool((await totals(holder, f"key={key}&method=list_chains"))["requests"] == 1)

    await until(is_counted)


async def test_token_needs_its_session_and_our_page(service: DashboardService) -> None:
    holder, key, token = await sandboxed(service)
    stranger = await service.holder()
    (await send(stranger, token)).fault(401)
    (await send(Client(service), token)).fault(401)
    (await send(holder, token, Sec_Fetch_Site="cross-site")).fault(401)
    (await send(holder, token, Origin="https://evil.example")).fault(401)
    (await send(holder, token + "x")).fault(401)
    (await stranger.post(f"/account/keys/{key}/sandbox")).fault(404)
    (await holder.request("POST", f"/account/keys/{key}/sandbox", X_CSRF_Token="wrong")).fault(403)
    assert (await send(holder, token)).status == 200


async def test_token_has_the_scopes_of_its_key_and_ends_with_it(service: DashboardService) -> None:
    holder, key, token = await sandboxed(service, scopes=["data:read"])
    assert (await send(holder, token)).status == 200
    (await holder.get("/webhooks", X_API_Key=token)).fault(403)
    await holder.request("DELETE", f"/account/keys/{key}")

    async def is_refused() -> bool:
        return {(await send(holder, token)).status for _ in range(8)} == {401}

    await until(is_refused)
    (await holder.post(f"/account/keys/{key}/sandbox")).fault(403)


async def sandboxed_member(service: DashboardService) -> tuple[Client, str, Client, str]:
    """An owner, the path of a developer of the account, that developer, and a token of theirs."""
    owner, key, _ = await sandboxed(service)
    member = await member_of(service, owner)
    token = (await member.post(f"/account/keys/{key}/sandbox")).data["token"]
    assert (await send(member, token)).status == 200
    path = next(each["id"] for each in (await people(owner)).values() if each["role"] == "developer")
    return owner, f"/account/members/{path}", member, token


async def test_token_ends_when_its_person_signs_out(service: DashboardService) -> None:
    holder, key, token = await sandboxed(service)
    cookie = "; ".join(f"{name}={value}" for name, value in holder.cookies.items())
    assert (await send(holder, token, Cookie=cookie)).status == 200
    assert ("create_sandbox_token", key) in [(each["action"], each["subject"]) for each in await actions_of(holder)]
    await holder.post("/account/sign-out")
    (await send(holder, token, Cookie=cookie)).fault(401)


async def test_token_ends_with_the_role_of_its_person(service: DashboardService) -> None:
    owner, path, member, token = await sandboxed_member(service)
    assert (await owner.request("PATCH", path, {"role": "read-only"})).status == 200
    (await send(member, token)).fault(401)
    assert (await owner.request("PATCH", path, {"role": "developer"})).status == 200
    assert (await send(member, token)).status == 200
    assert (await owner.request("DELETE", path)).status == 200
    (await send(member, token)).fault(401)


async def test_token_opens_no_socket(service: DashboardService) -> None:
    holder, _, token = await sandboxed(service)
    cookie = "; ".join(f"{name}={value}" for name, value in holder.cookies.items())
    ways: tuple[tuple[dict[str, str], dict[str, str]], ...] = (({"apiKey": token}, {}), ({}, {"X-API-Key": token}))
    async with aiohttp.ClientSession(headers={"Cookie": cookie, "X-Forwarded-For": holder.address}) as session:
        for query, headers in ways:
            async with session.get(f"{service.base}/ws/ethereum/sepolia", params=query, headers=headers) as reply:
                assert reply.status == 401
                assert "sandbox tokens cannot open sockets" in (await reply.json())["error"]["message"]
