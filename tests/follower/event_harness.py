"""A follower with webhooks, for the tests of their events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jsonschema_rs
import orjson

from proxy.compose.webhooks import EventFeature
from proxy.services.follower.network_follower import NetworkFollower
from proxy.services.follower.sinks import StaleRead
from proxy.services.webhooks.webhooks import read_config
from proxy.settings import SCHEMAS
from proxy.store.postgres.blocks import LeaderSession
from proxy.store.postgres.webhooks import NewWebhook, Webhook, WebhookStore
from proxy.web import api_spec
from tests.chain_upstream import Event, address
from tests.database import connected
from tests.follower.harness import NETWORK, FollowerHarness, follower_harness

A, B, C = address(1), address(2), address(3)
COIN, ART, GAME = address(100), address(101), address(102)
DOCUMENT = api_spec.load(SCHEMAS).document


class EventHarness:
    """A follower with webhooks. The test runs the follower's steps."""

    def __init__(
        self, harness: FollowerHarness, events: EventFeature, follower: NetworkFollower, term: LeaderSession
    ) -> None:
        self.inner = harness
        self.events = events
        self.follower = follower
        self.term = term
        self.store = WebhookStore(harness.running.pool)

    async def webhook(self, event_type: str, *, account: str = "acct", **config: Any) -> Webhook:
        async with connected(self.inner.database) as connection:
            await connection.execute(
                "insert into accounts (id, name, email, plan) values ($1, 'A', $1 || '@example.com', 'growth') "
                "on conflict do nothing",
                account,
            )
        addresses = await read_config(event_type, config)
        new = NewWebhook(
            account=account,
            network=NETWORK,
            live=False,
            url="https://hooks.example.com/",
            event_type=event_type,
            config={name: value for name, value in config.items() if name != "addresses"},
        )
        return await self.store.create(WebhookStore.new_id(), new, addresses=addresses, secret=b"sealed", most=100)

    async def step(self) -> None:
        """One step, repeated after a stale read as in the follower's loop."""
        try:
            await self.follower.step(self.term)
        except StaleRead:
            await self.follower.step(self.term)

    async def mine(self, *blocks: list[Event]) -> None:
        self.inner.chain.mine(*blocks)
        await self.step()

    async def rows(self, query: str) -> list[Any]:
        async with connected(self.inner.database) as connection:
            return [dict(row) for row in await connection.fetch(query)]

    async def bodies(self, state: str = "due") -> list[dict[str, Any]]:
        """The bodies of deliveries in this state, in the order of their events."""
        rows = await self.rows(
            "select body from events join deliveries on event_id = events.id "
            f"where state = '{state}' order by deliveries.created_at, block, events.id"
        )
        found = [orjson.loads(row["body"]) for row in rows]
        for body in found:
            check(body)
        return found

    async def deliver(self) -> None:
        """Mark all due deliveries as delivered."""
        async with connected(self.inner.database) as connection:
            await connection.execute(
                "update deliveries set claim = 1, state = 'delivered', finished_at = now() where state = 'due'"
            )


def check(body: dict[str, Any]) -> None:
    """Check a body against the published schema."""
    event_type = body.get("event_type") or body["type"]
    schema = DOCUMENT["webhooks"][event_type]["post"]["requestBody"]["content"]["application/json"]["schema"]
    whole = {**schema, "components": DOCUMENT["components"]}
    jsonschema_rs.Draft202012Validator(whole, validate_formats=True).validate(body)


@asynccontextmanager
async def event_harness(database: str, **options: Any) -> AsyncIterator[EventHarness]:
    async with follower_harness(database) as harness:
        events = harness.running.events(harness.route)
        async with harness.leading(events.sink, **options) as (follower, term):
            yield EventHarness(harness, events, follower, term)


def transaction(name: str, sender: bytes, recipient: bytes, value: int) -> dict[str, Any]:
    return {
        "hash": name,
        "from": "0x" + sender.hex(),
        "to": "0x" + recipient.hex(),
        "value": hex(value),
        "nonce": "0x0",
        "input": "0x",
        "transactionIndex": "0x0",
    }


def with_transaction(harness: EventHarness, name: str, *, only: int | None = None) -> None:
    """Put this transaction from A to B into every block, or into this one."""
    upstream = harness.inner.upstream

    def block(params: list[Any]) -> Any:
        found = upstream._eth_getBlockByNumber(params)
        given = transaction(name, A, B, 5)
        if found and only is not None and int(found["number"], 16) != only:
            return found
        return found and {**found, "transactions": [given if params[1] else name]}

    upstream.answers["eth_getBlockByNumber"] = block
