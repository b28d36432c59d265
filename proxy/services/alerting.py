"""The alerts of an account, as its holder sets them up: which ones, and where they are sent.

The webhook for alerts is stored with the other webhooks and signed like them, under a network that no follower has. It is not
listed with them, and does not count towards the plan's number. PagerDuty checks no signature: instead of a signing secret, its
webhook has the routing key, which the deliverer puts into each event.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from proxy.core import signatures
from proxy.core.alert_formats import PAGERDUTY_URL, AlertFormat
from proxy.errors import Forbidden, InvalidRequest, RateLimited
from proxy.store.postgres.alerts import EVENT_TYPES, NO_NETWORK, AlertSettings, AlertStore
from proxy.store.postgres.secrets import Vault
from proxy.store.postgres.webhooks import NewWebhook, WebhookStore
from proxy.wire.outbound_guard import UrlRefused
from proxy.wire.webhook_guard import WebhookGuard

__all__ = ("AlertSettings", "AlertSettingsService", "AlertSetup")

# Test alerts of an account in an hour: each may be a mail.
MOST_TESTS = 10


@dataclass(frozen=True, slots=True)
class AlertSetup:
    """The settings, and the signing secret of a webhook that was created now; otherwise it is empty."""

    settings: AlertSettings
    secret: str = ""


@dataclass(frozen=True, slots=True)
class _Target:
    """The target of alerts. `url` is None if none are sent. `is_another`: the present webhook cannot just change its URL."""

    url: str | None
    format: AlertFormat
    routing_key: str
    is_another: bool


class AlertSettingsService:
    def __init__(self, store: AlertStore, webhooks: WebhookStore, vault: Vault, guard: WebhookGuard) -> None:
        self._store = store
        self._webhooks = webhooks
        self._vault = vault
        self._guard = guard

    def __repr__(self) -> str:
        return f"<AlertSettingsService {self._store!r}>"

    @property
    def sends_mail(self) -> bool:
        return self._store.sends_mail

    async def read(self, account: str) -> AlertSettings:
        return await self._store.settings(account)

    async def recent(self, account: str) -> list[dict[str, Any]]:
        return await self._store.recent(account)

    async def change(self, account: str, given: Mapping[str, Any]) -> AlertSetup:
        """Members that are absent stay as they are; a `webhook_url` of null removes the webhook. Another format, and another
        routing key, is another webhook."""
        before = await self._store.settings(account)
        wanted = replace(
            before,
            kinds=tuple(given.get("alerts", before.kinds)),
            error_percent=given.get("error_rate_percent", before.error_percent),
            by_mail=given.get("mail", before.by_mail),
        )
        secret = ""
        if given.keys() & {"webhook_url", "webhook_format", "routing_key"}:
            secret = await self._set_webhook(account, _target(before, given))
        await self._store.save(account, wanted)
        return AlertSetup(await self._store.settings(account), secret)

    async def test(self, account: str) -> AlertSettings:
        """Send a test alert to the mail address and the webhook. Returns the settings."""
        settings = await self._store.settings(account)
        if not (settings.by_mail and self.sends_mail) and settings.status != "active":
            raise InvalidRequest(
                "alerts have no address: fill in Webhook URL (webhook_url) and save, also if the webhook is paused, or turn "
                "mails on"
            )
        if not await self._store.raise_test(account, secrets.token_hex(8), most=MOST_TESTS):
            raise RateLimited(f"only {MOST_TESTS} test alerts can be sent in an hour", retry_after_s=3600)
        return settings

    async def _set_webhook(self, account: str, target: _Target) -> str:
        """Returns the signing secret of a new webhook."""
        if target.url is not None:
            self._check_url(target.url)
        webhook = await self._webhooks.for_alerts(account)
        if webhook is not None and (target.url is None or target.is_another):
            await self._webhooks.move(webhook, "delete")
            webhook = None
        if webhook is not None:
            await self._webhooks.update(webhook, url=target.url, cause=None if webhook.status == "active" else "resume")
            return ""
        return "" if target.url is None else await self._create(account, target.url, target)

    async def _create(self, account: str, url: str, target: _Target) -> str:
        webhook_id = self._webhooks.new_id()
        secret = target.routing_key.encode() or secrets.token_bytes(signatures.SECRET_BYTES)
        event_type = EVENT_TYPES[target.format]
        new = NewWebhook(account=account, network=NO_NETWORK, live=True, url=url, event_type=event_type, config={})
        try:
            await self._webhooks.create(
                webhook_id,
                new,
                addresses=None,
                secret=self._vault.seal(webhook_id, secret),
                rotated=self._vault.seal_for_previous(webhook_id, secret),
                most=1,
            )
        except Forbidden:
            raise InvalidRequest(
                "webhook_url: was set by another request at the same time; read it again", param="webhook_url"
            ) from None
        return signatures.secret_of(secret) if target.format == "json" else ""

    def _check_url(self, url: str) -> None:
        try:
            self._guard.check(url)
        except UrlRefused as exc:
            raise InvalidRequest(f"webhook_url: {exc}", param="webhook_url") from None


def _target(before: AlertSettings, given: Mapping[str, Any]) -> _Target:
    wanted: AlertFormat = given.get("webhook_format", before.format)
    url, routing_key = given.get("webhook_url", before.url or None), given.get("routing_key", "")
    is_another = wanted != before.format or routing_key != ""
    if wanted != "pagerduty":
        if routing_key:
            raise InvalidRequest("routing_key: only webhook_format pagerduty has one", param="routing_key")
    elif "webhook_url" not in given and (not url or before.format != wanted):
        url = PAGERDUTY_URL
    if url is None and "webhook_url" not in given:
        raise InvalidRequest("webhook_url: is required with webhook_format", param="webhook_url")
    if url is not None and wanted == "pagerduty" and not routing_key and (before.format != wanted or not before.url):
        raise InvalidRequest(
            "routing_key: is required: it is the Integration Key of an Events API v2 integration", param="routing_key"
        )
    return _Target(url, wanted, routing_key, is_another)
