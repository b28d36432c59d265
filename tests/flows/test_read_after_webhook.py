"""A transfer, its webhook, then a read of the balance: with the event's block in X-Min-Block it is never stale, although two
of three upstreams lag."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from tests.delivery.harness import Inbox, inbox
from tests.flows.test_webhook_events import Chain, call, random_address
from tests.service import Service, until

# Every round waits for the follower and for the webhook.
ROUNDS = int(os.environ.get("READS_AFTER_WEBHOOKS", "4"))
PATIENT = {"X-Min-Block-Wait": "10"}


@dataclass(frozen=True)
class Reading:
    """What the receiver of one webhook event has read."""

    block: int
    plain: int
    called: int
    listed: int


@dataclass
class BalanceReader:
    """A webhook receiver that reads the holder's balance as soon as it learns of a transfer."""

    service: Service
    holder: str
    token: str
    readings: dict[int, Reading] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return str(self.service.keys["test"])

    async def receive(self, request: web.Request) -> web.Response:
        block = int(orjson.loads(await request.read())["data"]["block_number"])
        token = {"X-Min-Block": str(block), **PATIENT}
        read = Reading(block, await self.called({}), await self.called(token), await self.listed(token))
        self.readings.setdefault(block, read)
        return web.Response()

    async def called(self, headers: dict[str, str]) -> int:
        """The balance by JSON-RPC, of the newest block that the upstream has."""
        asked = {"to": self.token, "data": call("balanceOf(address)", self.holder)}
        method = {"jsonrpc": "2.0", "id": 1, "method": "eth_call", "params": [asked, "latest"]}
        reply = await self._send("POST", "/rpc/dev/testnet", headers, orjson.dumps(method))
        return int(reply["result"], 16)

    async def listed(self, headers: dict[str, str]) -> int:
        """The balance by REST, of the newest block that is indexed."""
        found = await self._send("GET", f"/tokens/dev/balances/{self.holder}", headers)
        return sum(int(each["balance"]) for each in found["tokens"])

    async def _send(self, method: str, path: str, headers: dict[str, str], body: bytes | None = None) -> Any:
        """Send a request until it is answered: on a busy machine the block may come later than the wait."""
        sent = {"X-API-Key": self.key, "Content-Type": "application/json", **headers}
        while True:
            async with self.service.session.request(method, self.service.base + path, data=body, headers=sent) as reply:
                found = orjson.loads(await reply.read())
                if reply.status == 503 and "block" in found["error"].get("details", {}):
                    continue
                assert reply.status == 200, found
                assert int(reply.headers.get("X-Block-Number", "0")) >= int(headers.get("X-Min-Block", "0"))
                return found


@asynccontextmanager
async def hooked(reader: BalanceReader, box: Inbox) -> AsyncIterator[None]:
    """A webhook on transfers to the holder, once it is active."""
    service = reader.service
    box.pages["/transfers"] = reader.receive
    config = {"addresses": [reader.holder]}
    body = {"url": box.url("/transfers"), "chain": "dev", "event_type": "token_transfer", "config": config}
    status, made = await service.send("POST", "/webhooks", body, key=reader.key)
    assert status == 201, made

    async def is_active() -> bool:
        return bool((await service.send("GET", f"/webhooks/{made['id']}", key=reader.key))[1]["status"] == "active")

    await until(is_active)
    yield
    assert (await service.send("DELETE", f"/webhooks/{made['id']}", key=reader.key))[0] == 200


async def test_balance_is_never_stale_with_the_block_of_the_webhook(followed: Service) -> None:
    chain = Chain(followed)
    token = chain.contract("PEN")
    reader = BalanceReader(followed, random_address(), token)
    transfer = call("transfer(address,uint256)", reader.holder, 1)
    stale = 0
    async with inbox() as box, hooked(reader, box):
        for count in range(1, ROUNDS + 1):
            block = int(
                (await chain.send(token, transfer, sender=followed.ready["funded_account"]["address"]))["blockNumber"],
                16,
            )
            await until(lambda block=block: block in reader.readings)
            read = reader.readings[block]
            assert (read.called, read.listed) == (count, count), read
            stale += read.plain < count
    # A few rounds may be lucky.
    assert stale or ROUNDS < 50
    print(f"{stale} of {ROUNDS} reads without the token were stale")
