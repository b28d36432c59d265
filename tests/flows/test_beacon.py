"""The beacon chain on a real node: lodestar's development chain, which makes a block every six seconds.

Every reply is compared with that of the node itself, byte for byte. `make lodestar` installs the node; without it, the tests
are skipped. Its release is old: replies have no `finalized`, which today's clients need, so that member and the client are
tested with a node made from the specification (`test_rest_calls.py`).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import aiohttp
import pytest

from proxy.core.event_stream import EventReader, SentEvent
from proxy.dev.chain import free_port
from proxy.dev.child import die_with_parent
from tests import node_programs
from tests.http_client import HttpClient, Reply
from tests.random_reads import reads_or
from tests.rpc_harness import NetworkHarness
from tests.service import until
from tests.web.worker import on_uvloop, running_worker

NETWORK = "ethereum-beacon/devnet"
INSTALLED = node_programs.BUILT / "lodestar"
READS = reads_or(600)
START_S = 150.0


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a running node."""
    program = INSTALLED / "node_modules/.bin/lodestar"
    if not program.exists():
        pytest.skip("lodestar is not installed: install it with `make lodestar`, which needs npm and a C compiler")
    rest, port, home = free_port(), free_port(), tmp_path_factory.mktemp("lodestar")
    url = f"http://127.0.0.1:{rest}"
    argv = [str(program), "dev", "--genesisValidators", "8", "--startValidators", "0..7", "--eth1", "false", "--reset"]
    argv += [
        "--rest",
        "--rest.address",
        "127.0.0.1",
        "--rest.port",
        str(rest),
        "--beaconNodes",
        url,
        "--metrics",
        "false",
    ]
    argv += ["--dataDir", str(home), "--listenAddress", "127.0.0.1", "--port", str(port)]
    environ = {**os.environ, "NODE_OPTIONS": f"--require {INSTALLED / 'poly.cjs'}"}
    with open(home / "log", "wb") as log:
        process = subprocess.Popen(
            argv, cwd=home, env=environ, stdout=log, stderr=log, preexec_fn=partial(die_with_parent, signal.SIGTERM)
        )
    try:
        yield url
    finally:
        process.kill()
        process.wait()


class BeaconHarness(NetworkHarness):
    url = ""
    session: aiohttp.ClientSession

    async def of_node(self, path: str) -> tuple[int, bytes]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.read()

    async def add_roots(self, known: dict[int, str]) -> int:
        """Add the roots of new blocks by slot. Returns the slot of the newest one."""
        _, head = await self.of_node("/eth/v1/beacon/headers/head")
        newest = int(head.partition(b'"slot":"')[2].partition(b'"')[0])
        for slot in range(max(known, default=-1) + 1, newest + 1):
            _, found = await self.of_node(f"/eth/v1/beacon/blocks/{slot}/root")
            if b'"root"' in found:
                known[slot] = found.decode().partition('"root":"')[2][:66]
        return newest

    async def of_service(self, client: HttpClient, path: str) -> Reply:
        key = self.worker.keys["main"]
        return await client.send(
            f"GET /v1/rest/{NETWORK}{path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {key}\r\n\r\n".encode()
        )


@asynccontextmanager
async def beacon_harness(url: str) -> AsyncIterator[BeaconHarness]:
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())

        async def has_blocks() -> bool:
            try:
                async with session.get(f"{url}/eth/v1/beacon/headers/4") as response:
                    return response.status == 200
            except aiohttp.ClientError:
                return False

        await until(has_blocks, within_s=START_S)
        running = await stack.enter_async_context(running_worker({NETWORK: [url]}))
        harness = BeaconHarness(running, NETWORK)
        harness.url, harness.session = url, session
        await harness.look()
        await harness.shows("up")
        yield harness


PATHS = (
    *("/eth/v1/beacon/headers/{}", "/eth/v2/beacon/blocks/{}", "/eth/v1/beacon/blocks/{}/root"),
    *("/eth/v1/beacon/blocks/{}/attestations", "/eth/v1/beacon/genesis", "/eth/v1/config/spec"),
    *("/eth/v1/config/fork_schedule", "/eth/v1/beacon/states/genesis/validators?id=1&id=2"),
    *("/eth/v1/beacon/states/genesis/fork", "/eth/v1/beacon/states/genesis/validators/3", "/eth/v1/node/version"),
)


@on_uvloop
async def test_every_reply_is_that_of_the_node_while_blocks_are_made(node: str) -> None:
    rng, compared, heads, hashes = random.Random(3), 0, set[int](), dict[int, str]()
    async with beacon_harness(node) as harness, await harness.worker.connect() as client:
        harness.watch()
        for number in range(READS):
            if number % 100 == 0:
                heads.add(await harness.add_roots(hashes))
            ids = [*map(str, range(max(heads) + 1)), *hashes.values(), "genesis", "99999", "0x" + "ab" * 32]
            path = rng.choice(PATHS).format(rng.choice(ids))
            status, body = await harness.of_node(path)
            reply = await harness.of_service(client, path)
            assert (reply.status, reply.body) == (status, body), path
            compared += status == 200
        assert compared > READS * 0.6
        assert len(heads) > 1 or READS < 2000


@on_uvloop
async def test_events_are_those_of_the_node(node: str) -> None:
    """lodestar sends the headers of a stream with its first event."""
    async with beacon_harness(node) as harness, AsyncExitStack() as stack, asyncio.timeout(100):
        harness.watch()
        path = "/eth/v1/events?topics=head&topics=block"
        url = f"http://127.0.0.1:{harness.worker.port}/v1/rest/{NETWORK}{path}"
        headers = {"X-API-Key": harness.worker.keys["main"]}
        own, *ours = await asyncio.gather(
            stack.enter_async_context(harness.session.get(harness.url + path)),
            *(stack.enter_async_context(harness.session.get(url, headers=headers)) for _ in range(5)),
        )
        assert {each.status for each in ours} == {200}
        expected, *found = await asyncio.gather(events_of(own, 8), *(events_of(each, 6) for each in ours))
        assert {event.name for event in expected} == {b"head", b"block"}
        for events in found:
            first = expected.index(events[0])
            shared = expected[first : first + len(events)]
            assert len(shared) > 2
            assert events[: len(shared)] == shared


async def events_of(response: aiohttp.ClientResponse, count: int) -> list[SentEvent]:
    reader, found = EventReader(), list[SentEvent]()
    while len(found) < count:
        found += reader.feed(await response.content.readany())
    return found[:count]


@on_uvloop
async def test_head_is_followed(node: str) -> None:
    async with beacon_harness(node) as harness, await harness.worker.connect() as client:
        harness.watch()
        seen: list[int] = []
        for _ in range(40):
            reply = await harness.of_service(client, "/eth/v1/beacon/headers/head")
            seen.append(int(reply.json["data"]["header"]["message"]["slot"]))
            await asyncio.sleep(0.5)
        assert seen == sorted(seen)
        assert seen[-1] > seen[0]
        _, body = await harness.of_node("/eth/v1/beacon/headers/head")
        assert seen[-1] >= int(body.partition(b'"slot":"')[2].partition(b'"')[0]) - 1
