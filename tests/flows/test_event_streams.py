"""Server-sent events of beacon nodes through the product's worker: shared, bounded, counted, and resumed elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest

from proxy.core.event_stream import EventReader, SentEvent
from proxy.services.feed import stream_feed
from tests.client_scripts import run_script
from tests.flows.test_rest_calls import HEADERS, NETWORK, RestHarness, rest_harness
from tests.http_client import HttpClient
from tests.service import holds, until
from tests.web.worker import on_uvloop

EVENTS = "/eth/v1/events"
HEAD = {"slot": "101", "block": "0x" + "ab" * 32, "state": "0x" + "cd" * 32, "epoch_transition": False}


class EventClient:
    """A client of one stream."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._reader = EventReader()
        self._events: list[SentEvent] = []
        self.received = b""

    async def event(self) -> SentEvent:
        async with asyncio.timeout(10):
            while not self._events:
                self._events += self._reader.feed(await self.piece())
        return self._events.pop(0)

    async def piece(self) -> bytes:
        size = int(await self._client.reader.readuntil(b"\r\n"), 16)
        piece = await self._client.reader.readexactly(size + 2)
        self.received += piece[:-2]
        return piece[:-2]

    async def rest(self) -> bytes:
        """The bytes that follow until the server closes the connection."""
        async with asyncio.timeout(10):
            return await self._client.reader.read()


@asynccontextmanager
async def stream(harness: RestHarness, topics: str = "head", *, key: str = "main") -> AsyncIterator[EventClient]:
    async with await harness.worker.connect() as client:
        target = f"/v1/rest/{NETWORK}{EVENTS}?topics={topics}"
        client.writer.write(harness.request(target, key=key, Accept="text/event-stream"))
        async with asyncio.timeout(15):
            head = (await client.reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert head.startswith("http/1.1 200"), head
        assert "content-type: text/event-stream\r\n" in head
        assert "cache-control: no-store\r\n" in head
        assert "x-compute-units: 10\r\n" in head
        yield EventClient(client)


@on_uvloop
async def test_clients_of_the_same_topics_share_one_upstream_stream() -> None:
    async with rest_harness() as harness, AsyncExitStack() as stack:
        stub, key = harness.stubs[0], harness.worker.add_key("many")
        topics = ["head,block", "block,head", "head&topics=block", "head,block,head"]
        clients = [
            await stack.enter_async_context(stream(harness, topics[index % 4], key="many")) for index in range(12)
        ]
        assert len(stub.streams) == 1
        for number in range(20):
            await stub.send_event("head", {**HEAD, "slot": str(number)})
        for client in clients:
            for number in range(20):
                event = await client.event()
                assert event.name == b"head"
                assert event.data.startswith(b'{"slot":"%d"' % number)
        events = sum(tally.units for shared, tally in key.tallies.items() if shared.labels[1] == "event:streamed")
        assert events == 12 * 20
        assert len(harness.worker.app.sockets) == 12


@on_uvloop
async def test_stream_ends_with_its_last_client_and_frees_everything() -> None:
    async with rest_harness() as harness:
        stub, held = harness.stubs[0], harness.worker.held_bytes
        for _ in range(3):
            async with stream(harness) as client:
                await stub.send_event("head", HEAD)
                await client.event()
        await until(lambda: not harness.worker.app.sockets)
        await until(lambda: harness.worker.held_bytes == held)
        await stub.send_event("head", HEAD)
        await until(lambda: not [each for each in stub.streams if not closed(each)], every_s=0.1)


def closed(response: object) -> bool:
    request = response._req  # type: ignore[attr-defined]
    return request is None or request.transport is None or request.transport.is_closing()


@on_uvloop
@pytest.mark.parametrize("query", ["", "?topics=", "?topics=attestation", "?topics=head,x", "?topics=head&from=1"])
async def test_unknown_topics_are_refused_and_charged(query: str) -> None:
    async with rest_harness() as harness:
        reply = await harness.get(EVENTS + query)
        assert reply.status == 400, reply
        assert "topics" in reply.json["error"]["message"]
        assert reply.headers["x-compute-units"] == "1"
        assert (await harness.get(f"{EVENTS}?topics=head", Accept="application/json")).status == 400
        assert not harness.stubs[0].streams


@on_uvloop
async def test_streams_count_as_sockets_of_the_account() -> None:
    async with rest_harness() as harness, AsyncExitStack() as stack:
        key = harness.worker.add_key("small")
        key.account.plan = "free"
        most = harness.worker.app.sockets.context.caps.plan_of(key).sockets
        for _ in range(most):
            await stack.enter_async_context(stream(harness, key="small"))
        refused = await harness.get(f"{EVENTS}?topics=head", key="small")
        assert refused.status == 429
        assert "sockets" in refused.json["error"]["message"]
        async with stream(harness):
            pass


@on_uvloop
async def test_account_has_few_streams_with_different_topics() -> None:
    async with rest_harness() as harness, AsyncExitStack() as stack:
        names = [
            "head",
            "block",
            "chain_reorg",
            "finalized_checkpoint",
            "voluntary_exit",
            "blob_sidecar",
            "block_gossip",
        ]
        names += ["proposer_slashing", "attester_slashing"]
        for name in names[: stream_feed.MOST_OF_ACCOUNT]:
            await stack.enter_async_context(stream(harness, name))
        refused = await harness.get(f"{EVENTS}?topics={names[stream_feed.MOST_OF_ACCOUNT]}")
        assert refused.status == 429
        assert "different topics" in refused.json["error"]["message"]
        harness.worker.add_key("other")
        async with stream(harness, names[-1], key="other"):
            pass


@on_uvloop
async def test_client_that_does_not_read_is_cut_off_and_others_are_not() -> None:
    async with rest_harness(sockets={"max_queue_bytes": 1 << 18}) as harness, stream(harness) as reading:
        held = harness.worker.held_bytes
        async with stream(harness) as slow:
            slow._client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            for number in range(400):
                await harness.stubs[0].send_event("head", {"slot": str(number), "filler": "x" * 100_000})
                event = await reading.event()
                assert event.data.startswith(b'{"slot":"%d"' % number)
                if len(harness.worker.app.sockets) == 1:
                    break
                assert harness.worker.held_bytes < held + (1 << 20)
            assert len(harness.worker.app.sockets) == 1
        await until(lambda: harness.worker.held_bytes == held)


@on_uvloop
async def test_lost_stream_is_resumed_at_another_upstream_without_repeats() -> None:
    async with rest_harness(2) as harness, stream(harness) as client:
        first, second = harness.stubs if harness.stubs[0].streams else reversed(harness.stubs)
        await first.send_event("head", HEAD)
        assert b"101" in (await client.event()).data
        with first.failing(503):
            await first.end_streams()
            await until(lambda: bool(second.streams))
            await second.send_event("head", HEAD)
            await second.send_event("head", {**HEAD, "slot": "102"})
            assert b'"102"' in (await client.event()).data
            assert b": resumed at another upstream" in client.received
            # A head that comes again later is news: the chain went back to it.
            harness.worker.app.feeds.by_network[NETWORK]._channels.popitem()[1].repeats_until = 0.0  # type: ignore[attr-defined]
            await second.send_event("head", {**HEAD, "slot": "102"})
            assert b'"102"' in (await client.event()).data


@on_uvloop
async def test_stream_begins_before_the_headers_of_the_upstream() -> None:
    """Some upstreams send them with the first event, which may be minutes later."""
    async with rest_harness() as harness:
        harness.stubs[0].late_headers = True
        async with stream(harness, "finalized_checkpoint") as first, stream(harness, "finalized_checkpoint") as second:
            await until(lambda: harness.stubs[0].streams)
            await holds(lambda: len(harness.stubs[0].streams) == 1, for_s=2 * stream_feed.CHECK_S)
            await harness.stubs[0].send_event("finalized_checkpoint", {"epoch": "3"})
            for client in (first, second):
                assert (await client.event()).data == b'{"epoch":"3"}'
        await until(lambda: not harness.worker.app.sockets)
        await harness.stubs[0].send_event("finalized_checkpoint", {"epoch": "4"})
        await until(lambda: all(closed(each) for each in harness.stubs[0].streams), every_s=0.1)


@on_uvloop
async def test_streams_that_wait_for_their_upstream_hold_nothing_of_others() -> None:
    """One account waits for as many streams as it may have, from an upstream that has not sent any headers."""
    async with rest_harness() as harness, AsyncExitStack() as stack:
        harness.stubs[0].late_headers = True
        harness.worker.add_key("other")
        names = ["head", "block", "chain_reorg", "finalized_checkpoint", "voluntary_exit", "blob_sidecar"]
        for name in names[: stream_feed.MOST_OF_ACCOUNT]:
            await stack.enter_async_context(stream(harness, name))
        for number in range(20):
            assert (await harness.get(f"{HEADERS}/{60 + number}", key="other")).status in (200, 404)
        async with stream(harness, "head", key="other") as client:
            await harness.stubs[0].send_event("head", HEAD)
            assert (await client.event()).name == b"head"


@on_uvloop
async def test_topics_that_every_upstream_refuses_are_an_error() -> None:
    async with rest_harness(2) as harness:
        with harness.stubs[0].failing(400), harness.stubs[1].failing(400):
            reply = await harness.get(f"{EVENTS}?topics=head_v2")
            assert reply.status == 400
            assert "name fewer" in reply.json["error"]["message"]
        async with stream(harness, "head_v2"):
            pass


@on_uvloop
async def test_stream_ends_when_its_key_is_revoked() -> None:
    async with rest_harness() as harness:
        key = harness.worker.add_key("revoked")
        async with stream(harness, key="revoked") as client:
            harness.worker.app.keyring.remove(key)
            assert b": the API key was revoked" in await client.rest()


@on_uvloop
async def test_long_stream_is_not_a_slow_call() -> None:
    async with rest_harness() as harness:
        key = harness.worker.add_key("patient")
        async with stream(harness, key="patient"):
            await asyncio.sleep(1.5)
        await until(lambda: sum(each.results for each in key.tallies.values()) == 1)
        assert sum(each.seconds for each in key.tallies.values()) < 1.0


@on_uvloop
async def test_network_with_routes_has_no_websocket() -> None:
    async with rest_harness() as harness:
        upgrade: dict[str, Any] = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec_WebSocket_Version": "13"}
        target = f"/v1/ws/{NETWORK}"
        reply = await harness.send(target, **upgrade, Sec_WebSocket_Key="dGhlIHNhbXBsZSBub25jZQ==")
        assert (reply.status, reply.json["error"]["reason"]) == (404, "network")


@on_uvloop
async def test_client_of_lodestar_receives_events() -> None:
    async with rest_harness() as harness:
        harness.worker.add_key("in url", allow_in_url=True)
        url = f"http://127.0.0.1:{harness.worker.port}/v1/rest/{NETWORK}/{harness.worker.keys['in url']}"
        task = {"url": url, "topics": ["head", "finalized_checkpoint"], "events": 2}
        stub, run = harness.stubs[0], partial(run_script, "lodestar_events.mjs", task, within_s=60)
        async with asyncio.TaskGroup() as group:
            script = group.create_task(asyncio.to_thread(run))
            await until(lambda: bool(stub.streams), within_s=50)
            duties = {f"{name}_duty_dependent_root": "0x" + "00" * 32 for name in ("previous", "current")}
            await stub.send_event("head", {**HEAD, **duties, "execution_optimistic": False})
            checkpoint = {"block": HEAD["block"], "state": HEAD["state"], "epoch": "3", "execution_optimistic": False}
            await stub.send_event("finalized_checkpoint", checkpoint)
        assert script.result()["events"] == [["head", 101], ["finalized_checkpoint", 3]]
