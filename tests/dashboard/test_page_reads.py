"""Several reads in one request: each part is what a request for it alone would get."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest

from tests.dashboard.service import Client, DashboardService


async def parts(client: Client, *paths: str, root: str = "/account") -> list[tuple[int, Any]]:
    reply = await client.get(f"{root}/reads?paths={quote(','.join(paths), safe='')}")
    assert reply.status == 200, reply
    return [(part["status"], part["body"]) for part in reply.data["parts"]]


async def test_parts_are_the_replies_to_single_requests(service: DashboardService) -> None:
    holder = await service.holder()
    key = await holder.new_key()
    paths = ("", "/keys", f"/keys/{key['id']}", "/members", "/webhooks?limit=5", "/announcements")
    alone = [(reply.status, reply.data) for reply in [await holder.get(f"/account{path}") for path in paths]]
    assert await parts(holder, *paths) == alone


async def test_failing_part_does_not_affect_the_others(service: DashboardService) -> None:
    holder = await service.holder()
    asked = ("/keys", "/keys/key_000000000000000000000000", "/usage?by=nothing", "/nothing", "/usage/csv", "/sign-out")
    found = await parts(holder, *asked)
    assert [status for status, _ in found] == [200, 404, 400, 404, 404, 404]
    assert found[2][1] == (await holder.get("/account/usage?by=nothing")).data
    assert found[3][1]["error"]["message"] == "there is nothing to read at /account/nothing"


async def test_part_needs_the_permission_of_its_operation(service: DashboardService) -> None:
    """An operator who visits an account sees its keys, but not the sessions of a person."""
    holder, visitor = await service.holder(), await service.operator()
    assert (await visitor.post(f"/admin/accounts/{holder.account['id']}/visit")).status < 300
    assert [status for status, _ in await parts(visitor, "/keys", "/sessions")] == [200, 403]


async def test_query_of_a_part_may_contain_commas(service: DashboardService) -> None:
    operator = await service.operator()
    [(status, found), _] = await parts(operator, "/accounts?search=no%2Cbody", "/plans", root="/admin")
    assert (status, found["accounts"]) == (200, [])


async def test_parts_cannot_be_nested(service: DashboardService) -> None:
    holder = await service.holder()
    inner = "/reads?paths=" + quote("/keys,/keys", safe="")
    assert [status for status, _ in await parts(holder, inner)] == [404]


@pytest.mark.parametrize("paths", ["keys", ",".join(["/keys"] * 11)])
async def test_paths_are_validated(service: DashboardService, paths: str) -> None:
    holder = await service.holder()
    words = (await holder.get(f"/account/reads?paths={quote(paths, safe='')}")).fault(400)
    assert words.startswith("parameter 'paths'")


async def test_parts_need_a_session_of_their_kind(service: DashboardService) -> None:
    holder = await service.holder()
    (await Client(service).get("/account/reads?paths=%2Fkeys")).fault(401)
    (await holder.get("/admin/reads?paths=%2Fplans")).fault(401)
