"""/webhooks: create, read, change and delete. A webhook of another account is a 404, like one that does not exist."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import orjson

from proxy.core.bounded_json import LongText
from proxy.core.iso_time import iso_seconds
from proxy.errors import RateLimited
from proxy.services.accounts.metering import meter_of_task
from proxy.services.delivery.history import DeliveryHistory
from proxy.services.events.mined_lookups import CALLS_PER_LOOKUP
from proxy.services.webhooks.backtest import Backtest
from proxy.services.webhooks.webhooks import CreatedWebhook, Webhook, WebhookChange, WebhookService
from proxy.turn_queue import next_turn
from proxy.web.reply import EncodedList
from proxy.web.rest.deliveries import shown_health
from proxy.web.rest.endpoint import RestHandler, RestReply, RestRequest

# How many addresses one unit pays for: writing them, and keeping them until they are purged.
ADDRESSES_PER_UNIT = 100
LOOKUP_METHOD = "eth_getTransactionByHash"
# Units that are charged at a time: less than any key may spend per second.
PAID_AT_ONCE = 10


class WebhookHandlers:
    def __init__(
        self,
        webhooks: WebhookService,
        deliveries: DeliveryHistory,
        backtest: Backtest,
        *,
        price_of: Callable[[str, str], int | None],
    ) -> None:
        """`price_of`: the price of a method on a network."""
        self._price_of = price_of
        self._webhooks = webhooks
        self._deliveries = deliveries
        self._backtest = backtest

    def __repr__(self) -> str:
        return f"<WebhookHandlers with {self._backtest!r}>"

    def handlers(self) -> dict[str, RestHandler]:
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

    async def create(self, request: RestRequest) -> RestReply:
        body = request.body
        network = request.network(body["chain"])
        request.require_all_contracts()
        config = body.get("config", {})
        await self._pay(network.id, _count(config, "addresses"), _count(config, "tx_hashes"))
        created = await self._webhooks.create(
            request.key,
            network,
            url=body["url"],
            event_type=body["event_type"],
            config=config,
            fault=body.get("fault"),
        )
        shown = await self._config(created.webhook)
        return RestReply({**_listed(request, created.webhook), "config": shown, **_secret(created)}, status=201)

    async def list(self, request: RestRequest) -> dict[str, Any]:
        webhooks, total = await self._webhooks.page(request.key, request.page, status=request.query["status"])
        health = await self._deliveries.health(webhooks)
        listed = [{**_listed(request, each), "health": shown_health(health[each.id])} for each in webhooks]
        return request.listed("webhooks", listed, total)

    async def read(self, request: RestRequest) -> dict[str, Any]:
        webhook = await self.own(request)
        health = await self._deliveries.health([webhook])
        return {
            **_listed(request, webhook),
            "health": shown_health(health[webhook.id]),
            "config": await self._config(webhook),
            "updated_at": iso_seconds(webhook.updated_at),
            "status_reason": webhook.reason if webhook.is_listening else "mempool",
        }

    async def update(self, request: RestRequest) -> dict[str, Any]:
        body = request.body
        change = WebhookChange(
            url=body.get("url"),
            status=body.get("status"),
            config=body.get("config"),
            add=body.get("add_addresses", ()),
            remove=body.get("remove_addresses", ()),
            fault=body.get("fault"),
        )
        webhook = await self.own(request)
        config = change.config or {}
        addresses = _count(config, "addresses") + len(change.add) + len(change.remove)
        await self._pay(webhook.network, addresses, _count(config, "tx_hashes", webhook.config.get("tx_hashes", ())))
        return _changed(request, await self._webhooks.update(request.key, webhook, change))

    async def delete(self, request: RestRequest) -> dict[str, Any]:
        webhook = await self.own(request)
        await self._webhooks.delete(webhook)
        return {"id": webhook.id, "deleted": True}

    async def resume(self, request: RestRequest) -> dict[str, Any]:
        return _changed(request, await self._webhooks.resume(await self.own(request)))

    async def rotate(self, request: RestRequest) -> dict[str, Any]:
        rotated = await self._webhooks.rotate(await self.own(request))
        assert rotated.webhook.old_secret_until is not None
        return {
            "id": rotated.webhook.id,
            **_secret(rotated),
            "previous_secret_valid_until": iso_seconds(rotated.webhook.old_secret_until),
        }

    async def backtest(self, request: RestRequest) -> dict[str, Any]:
        body = request.body
        network = request.network(body["chain"])
        request.require_all_contracts()
        backtest = await self._backtest.run(
            network, body["event_type"], body.get("config", {}), first=body.get("from_block"), last=body.get("to_block")
        )
        return {
            "chain": body["chain"],
            "event_type": body["event_type"],
            "from_block": backtest.first,
            "to_block": backtest.last,
            "events": backtest.events,
            "blocks_with_events": backtest.blocks,
        }

    async def _pay(self, network: str, addresses: int, transactions: int) -> None:
        """Pay for the addresses that are stored, and for the calls that look up whether transactions were mined already. Raises
        RateLimited at once if the account does not get that many units in time."""
        meter = meter_of_task.get()
        if meter is None:
            return
        units = addresses // ADDRESSES_PER_UNIT
        units += transactions * CALLS_PER_LOOKUP * (self._price_of(network, LOOKUP_METHOD) or 0)
        if units > (most := meter.affords(1)):
            raise RateLimited(
                f"this config costs {units} compute units, and the account has {most} for a request: send fewer values",
                retry_after_s=1,
            )
        while units > 0:
            await meter.pay(min(units, PAID_AT_ONCE))
            units -= PAID_AT_ONCE

    async def own(self, request: RestRequest) -> Webhook:
        """The account's webhook that the path names, on a network that the key may use. Its events may be of any contract."""
        webhook = await self._webhooks.read(request.key, request.path["id"])
        request.require_network(webhook.network)
        request.require_all_contracts()
        return webhook

    async def _config(self, webhook: Webhook) -> dict[str, Any]:
        """The config with its addresses, which are encoded in turns: there may be a hundred thousand."""
        if webhook.addresses is None:
            return dict(webhook.config)
        parts = [b"["]
        async for part in self._webhooks.addresses(webhook):
            parts += (orjson.dumps(part)[1:-1], b",")
        await next_turn()
        # Megabytes are copied once.
        addresses = EncodedList(b"".join((*parts[: max(1, len(parts) - 1)], b"]")), webhook.addresses)
        await next_turn()
        return {"addresses": addresses, **webhook.config}


def _count(config: Mapping[str, Any], name: str, but: Iterable[Any] = ()) -> int:
    """The number of values in a list of the config that are not in `but`. The service validates the list."""
    values, known = config.get(name), {str(each).lower() for each in but}
    if not isinstance(values, (list, LongText)):
        return 0
    return sum(str(each).lower() not in known for each in values) if known else len(values)


def _listed(request: RestRequest, webhook: Webhook) -> dict[str, Any]:
    return {**_summary(request, webhook), "created_at": iso_seconds(webhook.created_at)}


def _changed(request: RestRequest, webhook: Webhook) -> dict[str, Any]:
    return {**_summary(request, webhook), "updated_at": iso_seconds(webhook.updated_at)}


def _summary(request: RestRequest, webhook: Webhook) -> dict[str, Any]:
    return {
        "id": webhook.id,
        "url": webhook.url,
        "chain": request.network_word(webhook.network),
        "event_type": webhook.event_type,
        "status": webhook.status if webhook.is_listening else "starting",
        **({"fault": webhook.fault} if webhook.test_key else {}),
    }


def _secret(created: CreatedWebhook) -> dict[str, str]:
    return {"signing_secret": created.secret}
