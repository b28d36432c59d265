"""Compute the events that must be delivered directly from the chain, and record those that were delivered.

This shares no code with the service: events are compared by their content, not by the ids that the service assigns.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import random
from base64 import b64decode, b64encode
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from tests.chain_upstream import TRANSFER, LittleChain

Fact = tuple[Any, ...]
LONGEST_S = 0.3


def facts_of(body: dict[str, Any]) -> Fact:
    """The content of an event, comparable with `expected`."""
    data = body["data"]
    if body.get("type") == "NEW_BLOCK":
        return "block", data["blockHash"], data["blockNumber"], data["transactionCount"]
    if body["event_type"] == "log":
        return "log", data["tx_hash"], data["log_index"], data["contract"].lower()
    assert body["event_type"] == "nft_transfer"
    return "nft", data["tx_hash"], data["from"].lower(), data["to"].lower(), data["token_id"], data["quantity"]


def expected(chain: LittleChain, *, coin: bytes, art: bytes) -> set[Fact]:
    """Every block, every Transfer log of the coin, and every transfer of the NFTs."""
    found: set[Fact] = set()
    for block in chain.blocks:
        found.add(("block", block.hash, block.number, 0))
        for index, (event, log) in enumerate(zip(block.events, block.logs(), strict=True)):
            if event.contract == coin and event.topics[0] == TRANSFER:
                found.add(("log", log["transactionHash"], index, "0x" + coin.hex()))
            for standard, contract, sender, recipient, token, amount in event.moves:
                if standard != 20 and contract == art:
                    ends = "0x" + sender.hex(), "0x" + recipient.hex()
                    found.add(("nft", log["transactionHash"], *ends, str(token), amount))
    return found


@dataclass
class RecordingReceiver:
    """A receiver that writes every event to disk before it replies."""

    path: Path
    rng: random.Random
    secrets: dict[str, str] = field(default_factory=dict)
    port: int = 0
    # The number of requests.
    posts: int = 0

    async def receive(self, request: web.Request) -> web.Response:
        raw = await request.read()
        self.posts += 1
        webhook = request.path.removeprefix("/")
        if not self._is_signed(webhook, request, raw):
            return web.Response(status=400)
        line = orjson.dumps({"event": request.headers["webhook-id"], "body": raw.decode()}) + b"\n"
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, line)
        os.fsync(fd)
        os.close(fd)
        # Long enough for a process to be killed between the write and the reply.
        await asyncio.sleep(self.rng.random() * LONGEST_S)
        return web.Response()

    def _is_signed(self, webhook: str, request: web.Request, raw: bytes) -> bool:
        key = b64decode(self.secrets[webhook].removeprefix("whsec_"))
        signed = f"{request.headers['webhook-id']}.{request.headers['webhook-timestamp']}.".encode() + raw
        made = "v1," + b64encode(hmac.digest(key, signed, "sha256")).decode()
        return hmac.compare_digest(made, request.headers["webhook-signature"])

    def read(self) -> ReceivedEvents:
        received = ReceivedEvents()
        for line in self.path.read_bytes().splitlines() if self.path.exists() else ():
            received.add(**orjson.loads(line))
        return received


@dataclass
class ReceivedEvents:
    """The acknowledged events, read from disk."""

    times: Counter[str] = field(default_factory=Counter)
    digests: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    bodies: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, event: str, body: str) -> None:
        content = orjson.loads(body)
        assert content["id"] == event
        self.times[event] += 1
        self.digests[event].add(hashlib.sha256(body.encode()).hexdigest())
        self.bodies[event] = content

    @property
    def tests(self) -> set[str]:
        return {name for name, body in self.bodies.items() if body.get("test")}

    @property
    def withdrawn(self) -> set[str]:
        corrections = [body["data"] for body in self.bodies.values() if self._is_correction(body)]
        return {data.get("takes_back") or data["takesBack"] for data in corrections}

    @staticmethod
    def _is_correction(body: dict[str, Any]) -> bool:
        return str(body.get("event_type") or body.get("type")).lower() == "correction"

    def facts(self) -> Counter[Fact]:
        """The facts according to all events received, each with the number of its events that were not corrected."""
        withdrawn = self.withdrawn
        return Counter(
            facts_of(body)
            for name, body in self.bodies.items()
            if not self._is_correction(body) and not body.get("test") and name not in withdrawn
        )

    @property
    def duplicates(self) -> int:
        return sum(times - 1 for times in self.times.values())
