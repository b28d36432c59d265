"""A beacon node made from its specification (github.com/ethereum/beacon-APIs), for what lodestar's old release does not have.

Its replies have `finalized` and `execution_optimistic`, SSZ for `Accept: application/octet-stream`, large states, and events.
Every request is kept as it arrived.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
from aiohttp import web

from tests.service import until

ROOT = "0x4b363db94e286120d76eb905340fdd4e54bfe9f06bf33ff6cf5ad27f511bfe95"
LARGE_STATE = 8 << 20
B = TypeVar("B", bound="BeaconStub")


@dataclass
class BeaconStub:
    """The head and the finalized slot can be set. `optimistic`: replies say that their execution is not verified."""

    head: int = 100
    final: int = 64
    optimistic: bool = False
    genesis: str = ROOT
    targets: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    # The status of the next replies, if they shall fail.
    fails_with: int = 0
    hangs: bool = False
    # States end in the middle.
    breaks_states: bool = False
    url: str = ""
    # Open streams of events; setting the event ends one.
    streams: dict[web.StreamResponse, asyncio.Event] = field(default_factory=dict)
    # Their headers come with the first event, as those of lodestar.
    late_headers: bool = False
    _asked: dict[web.StreamResponse, web.Request] = field(default_factory=dict)

    def root(self, slot: int) -> str:
        return "0x" + hashlib.sha256(f"{self.genesis}{slot}".encode()).hexdigest()

    def slot_of(self, word: str) -> int | None:
        named = {"head": self.head, "finalized": self.final, "justified": self.final, "genesis": 0}
        if word in named:
            return named[word]
        if word.isdecimal():
            return int(word) if int(word) <= self.head and int(word) % 10 != 7 else None  # Every tenth slot is empty.
        return next((slot for slot in range(self.head + 1) if self.root(slot) == word), None)

    def asked(self, part: str) -> int:
        return sum(part in target for target in self.targets)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.targets.append(f"{request.method} {request.raw_path}")
        self.headers.append(dict(request.headers))
        if self.hangs and not is_poll(request):
            await asyncio.sleep(60)
        if self.fails_with and not is_poll(request):
            return web.json_response({"code": self.fails_with, "message": "failed"}, status=self.fails_with)
        parts = request.path.strip("/").split("/")
        match parts:
            case ["eth", "v1", "beacon", "genesis"]:
                fork = {"genesis_fork_version": "0x00000000"}
                return _data({"genesis_time": "1606824023", "genesis_validators_root": self.genesis, **fork})
            case ["eth", "v1", "node", "syncing"]:
                return _data({"head_slot": str(self.head), "sync_distance": "0", "is_syncing": False})
            case ["eth", "v1", "node", "health"]:
                return web.Response(status=206)
            case ["eth", "v1", "node", "version"]:
                return _data({"version": "stub/1"})
            case ["eth", "v1", "events"]:
                return await self._events(request)
            case ["eth", "v2", "debug", "beacon", "states", _]:
                return await self._state(request)
            case ["eth", "v1", "beacon", "states", word, "validators"] if request.method == "POST":
                wanted = orjson.loads(await request.read())
                return self._final(word, {"ids": wanted["ids"]})
            case ["eth", "v1", "beacon", "states", word, "validator_balances"] if request.method == "POST":
                try:
                    wanted = orjson.loads(await request.read())
                except orjson.JSONDecodeError:
                    return web.json_response({"code": 400, "message": "the body is not JSON"}, status=400)
                return self._final(word, [{"index": each, "balance": "32000000000"} for each in wanted])
            case ["eth", _, "beacon", kind, word, *more]:
                return self._about(request, kind, word, more)
            case _:
                return web.json_response({"code": 404, "message": "no such route"}, status=404)

    async def _state(self, request: web.Request) -> web.StreamResponse:
        body = bytes(range(256)) * (LARGE_STATE // 256)
        if not self.breaks_states:
            return web.Response(body=body, content_type="application/octet-stream")
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = LARGE_STATE
        await response.prepare(request)
        await response.write(body[: LARGE_STATE // 2])
        assert request.transport is not None
        request.transport.abort()
        return response

    def _about(self, request: web.Request, kind: str, word: str, more: list[str]) -> web.Response:
        slot = self.slot_of(word)
        if slot is None:
            return web.json_response({"code": 404, "message": f"No {kind} found for id '{word}'"}, status=404)
        if kind == "blocks" and request.headers.get("Accept", "").startswith("application/octet-stream"):
            body = b"ssz" + slot.to_bytes(8, "little")
            return web.Response(
                body=body,
                headers={
                    "Content-Type": "application/octet-stream",
                    "Eth-Consensus-Version": "deneb",
                    "X-Private": "secret",
                },
            )
        roots = {"parent_root": self.root(slot - 1), "state_root": self.root(slot), "body_root": self.root(slot)}
        header = {"message": {"slot": str(slot), "proposer_index": "1", **roots}, "signature": "0x" + "00" * 96}
        return self._final(word, {"root": self.root(slot), "canonical": True, "header": header, "more": more})

    def _final(self, word: str, data: Any) -> web.Response:
        slot = self.slot_of(word) or 0
        body = {"execution_optimistic": self.optimistic, "finalized": slot <= self.final, "data": data}
        return web.json_response(body, headers={"Eth-Consensus-Version": "deneb", "X-Private": "secret"})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if not self.late_headers:
            await response.prepare(request)
        self._asked[response] = request
        ended = asyncio.Event()
        self.streams[response] = ended
        try:
            await ended.wait()
        finally:
            del self.streams[response]
        return response

    async def end_streams(self) -> None:
        for ended in self.streams.values():
            ended.set()
        await until(lambda: not self.streams)

    async def send_event(self, topic: str, data: Any) -> None:
        for stream in tuple(self.streams):
            with suppress(ConnectionError):
                if not stream.prepared:
                    await stream.prepare(self._asked[stream])
                await stream.write(b"event: %b\ndata: %b\n\n" % (topic.encode(), orjson.dumps(data)))

    @contextmanager
    def failing(self, status: int) -> Iterator[None]:
        self.fails_with = status
        try:
            yield
        finally:
            self.fails_with = 0


def is_poll(request: web.Request) -> bool:
    """Whether the service may have made the request by itself, to follow the head."""
    return request.raw_path.endswith(("/headers/head", "/headers/finalized", "/syncing", "/genesis"))


def _data(data: Any) -> web.Response:
    return web.json_response({"data": data})


@asynccontextmanager
async def beacon_stub(**state: Any) -> AsyncIterator[BeaconStub]:
    async with serving(BeaconStub(**state)) as stub:
        yield stub


@asynccontextmanager
async def serving(stub: B) -> AsyncIterator[B]:
    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{path:.*}", stub.serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield stub
    finally:
        await runner.cleanup()
