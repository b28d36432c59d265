"""/alerts: which alerts an account gets, where they are sent, and the last ones."""

from __future__ import annotations

from typing import Any

from proxy.core import alerts
from proxy.core.iso_time import iso_seconds
from proxy.errors import Forbidden
from proxy.services.alerting import AlertSettings, AlertSettingsService
from proxy.services.delivery.history import STATES
from proxy.web.rest.endpoint import RestHandler, RestRequest

_STATUS_OF = {state: status for status, state in STATES.items()}


class AlertHandlers:
    def __init__(self, service: AlertSettingsService) -> None:
        self._service = service

    def handlers(self) -> dict[str, RestHandler]:
        return {"read_alerts": self.read, "update_alerts": self.update, "test_alerts": self.test}

    async def read(self, request: RestRequest) -> dict[str, Any]:
        account = request.key.account.id
        settings = await self._service.read(account)
        recent = [_shown(row) for row in await self._service.recent(account)]
        return {**self._settings(settings), "recent": recent}

    async def update(self, request: RestRequest) -> dict[str, Any]:
        _refuse_test_key(request)
        changed = await self._service.change(request.key.account.id, request.body)
        return {**self._settings(changed.settings), **({"signing_secret": changed.secret} if changed.secret else {})}

    async def test(self, request: RestRequest) -> dict[str, Any]:
        _refuse_test_key(request)
        settings = await self._service.test(request.key.account.id)
        return {"mail": settings.by_mail and self._service.sends_mail, "webhook": settings.status == "active"}

    def _settings(self, settings: AlertSettings) -> dict[str, Any]:
        webhook = {"id": settings.webhook_id, "url": settings.url, "status": settings.status, "format": settings.format}
        return {
            "alerts": [each for each in alerts.KINDS if each in settings.kinds],
            "error_rate_percent": settings.error_percent,
            "mail": settings.by_mail,
            "mail_address": settings.email,
            "mail_available": self._service.sends_mail,
            "webhook": webhook if settings.webhook_id else None,
        }


def _refuse_test_key(request: RestRequest) -> None:
    if not request.key.live:
        raise Forbidden("alerts belong to the whole account: use a live key, or the dashboard", reason="mode")


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "alert": row["kind"],
        "message": alerts.title_of(row["kind"], row["threshold"], row["subject"], row["about"]),
        "threshold": row["threshold"],
        "subject": row["subject"],
        "raised_at": iso_seconds(row["raised_at"]),
        "delivery": None if row["state"] is None else _STATUS_OF[row["state"]],
    }
