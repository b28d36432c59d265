"""/account/announcements and /admin/announcements: operators' notices; every dashboard shows the current ones."""

from __future__ import annotations

from typing import Any

from proxy.core.action_changes import changed_members
from proxy.services.announcements import Announcements
from proxy.web.dashboard.session_endpoint import SessionHandler, SessionRequest
from proxy.web.rest.endpoint import RestReply
from proxy.web.timestamps import moment_of, time_of


class AnnouncementHandlers:
    def __init__(self, announcements: Announcements) -> None:
        self._announcements = announcements

    def handlers(self) -> dict[str, SessionHandler]:
        return {
            "list_announcements": self.current,
            "admin_list_announcements": self.all,
            "admin_create_announcement": self.create,
            "admin_delete_announcement": self.delete,
        }

    async def current(self, _request: SessionRequest) -> dict[str, Any]:
        rows = await self._announcements.current()
        return {"announcements": [{"id": row["id"], "level": row["level"], "text": row["text"]} for row in rows]}

    async def all(self, _request: SessionRequest) -> dict[str, Any]:
        return {"announcements": [_shown(row) for row in await self._announcements.all()]}

    async def create(self, request: SessionRequest) -> RestReply:
        body = request.body
        starts = moment_of(body["from"], "from") if body.get("from") else None
        row = await self._announcements.add(
            body["level"], body["text"], starts=starts, ends=moment_of(body["until"], "until"), by=request.who.name
        )
        shown = _shown(row)
        return RestReply(shown, status=201, changes=changed_members(None, shown))

    async def delete(self, request: SessionRequest) -> RestReply:
        row = await self._announcements.remove(int(request.path["number"]))
        return RestReply({"deleted": True}, changes=changed_members(_shown(row), None))


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": row["id"],
        "level": row["level"],
        "text": row["text"],
        "from": time_of(row["starts_at"]),
        "until": time_of(row["ends_at"]),
        "by": row["by_whom"],
    }
