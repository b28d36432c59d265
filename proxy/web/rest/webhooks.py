"""/webhooks: what owners do with them. A webhook is its account's; somebody else's is not there."""

from __future__ import annotations

from typing import Any

from proxy.chains.registry import Registry
from proxy.core.access import Key
from proxy.core.iso_time import iso_seconds
from proxy.services.webhooks.backtest import Backtest
from proxy.services.webhooks.webhooks import CreatedWebhook, Webhook, WebhookChange, WebhookService
from proxy.web.rest.endpoint import RestHandler, RestReply, RestRequest


class WebhookHandlers:
    def __init__(self, webhooks: WebhookService, backtest: Backtest, chains: Registry) -> None:
        self._webhooks = webhooks
        self._backtest = backtest
        self._networks = {network.id: network for network in chains.networks()}

    def answers(self) -> dict[str, RestHandler]:
        return {
            "create_webhook": self.create,
            "list_webhooks": self.list,
            "read_webhook": self.read,
            "update_webhook": self.update,
            "delete_webhook": self.delete,
            "resume_webhook": self.resume,
            "rotate_webhook_secret": self.rotate,
            "backtest_webhook": self.backtest,
        }

    async def create(self, asked: RestRequest) -> RestReply:
        body = asked.body
        network = asked.network(body["chain"])
        made = await self._webhooks.create(
            asked.key, network, url=body["url"], event_type=body["event_type"], config=body.get("config", {})
        )
        config = await self._config(made.webhook)
        return RestReply({**self._listed(asked.key, made.webhook), "config": config, **_secret(made)}, status=201)

    async def list(self, asked: RestRequest) -> dict[str, Any]:
        found, total = await self._webhooks.page(asked.key, asked.page, status=asked.query["status"])
        return {
            "webhooks": [self._listed(asked.key, each) for each in found],
            "page": asked.page.number,
            "total": total,
        }

    async def read(self, asked: RestRequest) -> dict[str, Any]:
        return await self._whole(asked.key, await self.own(asked))

    async def update(self, asked: RestRequest) -> dict[str, Any]:
        body = asked.body
        change = WebhookChange(
            url=body.get("url"),
            status=body.get("status"),
            config=body.get("config"),
            add=body.get("add_addresses", ()),
            remove=body.get("remove_addresses", ()),
        )
        return self._changed(asked.key, await self._webhooks.update(await self.own(asked), change))

    async def delete(self, asked: RestRequest) -> dict[str, Any]:
        found = await self.own(asked)
        await self._webhooks.delete(found)
        return {"id": found.id, "deleted": True}

    async def resume(self, asked: RestRequest) -> dict[str, Any]:
        return self._changed(asked.key, await self._webhooks.resume(await self.own(asked)))

    async def rotate(self, asked: RestRequest) -> dict[str, Any]:
        made = await self._webhooks.rotate(await self.own(asked))
        assert made.webhook.old_secret_until is not None
        return {
            "id": made.webhook.id,
            **_secret(made),
            "previous_secret_valid_until": iso_seconds(made.webhook.old_secret_until),
        }

    async def backtest(self, asked: RestRequest) -> dict[str, Any]:
        body = asked.body
        network = asked.network(body["chain"])
        found = await self._backtest.run(
            network, body["event_type"], body.get("config", {}), first=body["from_block"], last=body["to_block"]
        )
        return {
            "chain": body["chain"],
            "event_type": body["event_type"],
            "from_block": found.first,
            "to_block": found.last,
            "events": found.events,
            "blocks_with_events": found.blocks,
        }

    async def own(self, asked: RestRequest) -> Webhook:
        """The webhook that the path names; on a network that the key may use."""
        found = await self._webhooks.read(asked.key, asked.path["id"])
        if (network := self._networks.get(found.network)) is not None:
            asked.network(network.word(live=asked.key.live))
        return found

    # How a webhook looks

    async def _whole(self, key: Key, found: Webhook) -> dict[str, Any]:
        return {
            **self._listed(key, found),
            "config": await self._config(found),
            "updated_at": iso_seconds(found.updated_at),
            "status_reason": found.reason,
        }

    async def _config(self, found: Webhook) -> dict[str, Any]:
        addresses = await self._webhooks.addresses(found)
        return dict(found.config) if addresses is None else {"addresses": addresses, **found.config}

    def _listed(self, key: Key, found: Webhook) -> dict[str, Any]:
        return {**self._named(key, found), "created_at": iso_seconds(found.created_at)}

    def _changed(self, key: Key, found: Webhook) -> dict[str, Any]:
        return {**self._named(key, found), "updated_at": iso_seconds(found.updated_at)}

    def _named(self, key: Key, found: Webhook) -> dict[str, Any]:
        return {
            "id": found.id,
            "url": found.url,
            "chain": self._word(key, found.network),
            "event_type": found.event_type,
            "status": found.status,
        }

    def _word(self, key: Key, name: str) -> str:
        """The network as this key would name it; one that is configured no more by its old name."""
        network = self._networks.get(name)
        return name.replace("/", "-") if network is None else network.word(live=key.live)


def _secret(made: CreatedWebhook) -> dict[str, str]:
    return {"signing_secret": made.secret}
