"""Announcements: written by operators, read by every account while they last."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from proxy.errors import InvalidRequest
from proxy.services.announcements import moment_after
from tests.dashboard.service import Client, DashboardService

NOW = datetime.datetime(2026, 1, 15, 9, 30, tzinfo=datetime.UTC)


def at(hours: float) -> str:
    return (datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=hours)).isoformat()


async def texts(client: Client) -> list[str]:
    return [each["text"] for each in (await client.get("/account/announcements")).data["announcements"]]


async def test_accounts_see_current_announcements(service: DashboardService) -> None:
    holder, operator = await service.holder(), await service.operator()

    async def announce(text: str, **more: Any) -> int:
        body = {"level": "warning", "text": text, "until": at(1), **more}
        reply = await operator.post("/admin/announcements", body)
        assert reply.status == 201, reply
        return int(reply.data["id"])

    first = await announce("Maintenance \u202e at noon")
    await announce("Later", **{"from": at(0.5)})
    second = await announce("Second", level="critical")
    assert await texts(holder) == ["Second", "Maintenance at noon"]
    listed = (await operator.get("/admin/announcements")).data["announcements"]
    assert {"Later", "Second"} <= {each["text"] for each in listed}
    for number in (first, second):
        assert (await operator.request("DELETE", f"/admin/announcements/{number}")).status == 200
    (await operator.request("DELETE", f"/admin/announcements/{first}")).fault(404)
    assert await texts(holder) == []


async def test_announcements_need_an_operator_and_an_end_in_the_future(service: DashboardService) -> None:
    holder, operator = await service.holder(), await service.operator()
    body = {"level": "info", "text": "x", "until": at(-1)}
    assert "must be after now" in (await operator.post("/admin/announcements", body)).fault(400)
    (await operator.post("/admin/announcements", {**body, "until": at(1), "level": "loud"})).fault(400)
    (await operator.post("/admin/announcements", {**body, "until": at(1), "from": at(2)})).fault(400)
    (await holder.post("/admin/announcements", {**body, "until": at(1)})).fault(401)
    (await Client(service).get("/account/announcements")).fault(401)


def test_times_may_be_spans() -> None:
    assert moment_after("90m", NOW) - NOW == datetime.timedelta(minutes=90)
    assert moment_after("3d", NOW) - NOW == datetime.timedelta(days=3)
    assert moment_after("2026-02-01T00:00Z", NOW).day == 1
    with pytest.raises(InvalidRequest, match="must be a time"):
        moment_after("soon", NOW)
