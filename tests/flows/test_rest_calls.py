"""Routes of REST upstreams through the product's worker, with beacon nodes made from their specification."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.core.access import AllowedUses, Key, Limits
from proxy.core.rest_routes import template_fault
from proxy.settings import SCHEMAS
from proxy.web import api_spec
from proxy.web.docs.client_code import LANGUAGES, client_module
from tests.beacon_stub import LARGE_STATE, BeaconStub, beacon_stub
from tests.client_scripts import run_script
from tests.http_client import Reply
from tests.rpc_harness import NetworkHarness
from tests.service import until
from tests.web.worker import on_uvloop, running_worker

NETWORK = "ethereum-beacon/mainnet"
HEADERS = "/eth/v1/beacon/headers"
VALIDATORS = "/eth/v1/beacon/states/finalized/validators"


class RestHarness(NetworkHarness):
    stubs: Sequence[BeaconStub] = ()

    async def send(
        self, target: str, *, verb: str = "GET", body: bytes = b"", key: str = "main", **headers: str
    ) -> Reply:
        """Send a request with exactly this target."""
        async with await self.worker.connect() as client:
            return await client.send(self.request(target, verb=verb, body=body, key=key, **headers))

    def request(self, target: str, *, verb: str = "GET", body: bytes = b"", key: str = "main", **headers: str) -> bytes:
        given = {"Host": "x", "X-API-Key": self.worker.keys[key] if key else ""}
        if verb == "POST":
            given |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [f"{name}: {value}" for name, value in given.items() if value]
        return f"{verb} {target} HTTP/1.1\r\n".encode("latin-1") + "\r\n".join([*lines, "", ""]).encode() + body

    async def get(self, path: str, **options: Any) -> Reply:
        return await self.send(f"/v1/rest/{NETWORK}{path}", **options)


@asynccontextmanager
async def rest_harness(count: int = 1, **sections: Any) -> AsyncIterator[RestHarness]:
    async with AsyncExitStack() as stack:
        stubs = [await stack.enter_async_context(beacon_stub()) for _ in range(count)]
        running = await stack.enter_async_context(running_worker({NETWORK: [each.url for each in stubs]}, **sections))
        harness = RestHarness(running, NETWORK)
        harness.stubs = stubs
        await harness.look()
        await harness.shows(*["up"] * count)
        yield harness


@on_uvloop
async def test_reply_is_that_of_the_upstream() -> None:
    async with rest_harness() as harness:
        reply = await harness.get(f"{HEADERS}/80")
        assert reply.status == 200, reply
        assert reply.json["data"]["root"] == harness.stubs[0].root(80)
        assert reply.headers["content-type"].startswith("application/json")
        assert reply.headers["eth-consensus-version"] == "deneb"
        assert reply.headers["x-compute-units"] == "1"
        assert reply.headers["x-block-number"] == "100"
        # Other headers of upstreams, and of clients, are not passed on.
        assert "x-private" not in reply.headers
        await harness.get(f"{HEADERS}/81", Cookie="a=b", X_Secret="c")
        assert not {"Cookie", "X-Secret", "X-API-Key", "X-Api-Key"} & harness.stubs[0].headers[-1].keys()


@on_uvloop
async def test_replies_are_cached_as_they_say_themselves() -> None:
    async with rest_harness() as harness:
        stub = harness.stubs[0]

        async def caches(path: str, **headers: str) -> list[str]:
            return [(await harness.get(path, **headers)).headers.get("x-cache", "") for _ in range(2)]

        assert await caches(f"{HEADERS}/50") == ["miss", "hit"]
        assert await caches(f"{HEADERS}/{stub.root(51)}") == ["miss", "hit"]
        assert await caches(f"{HEADERS}/{stub.root(90)}") == ["miss", "hit"]
        # The representation is a part of the key.
        assert await caches("/eth/v2/beacon/blocks/50") == ["miss", "hit"]
        assert await caches("/eth/v2/beacon/blocks/50", Accept="application/octet-stream") == ["miss", "hit"]
        assert await caches("/eth/v1/node/version") == ["", ""]
        stub.head = 101
        await harness.look()
        await until(lambda: asyncio.sleep(0, harness.route.heads.tip == 101))
        # Final replies stay cached, and the rest does not.
        assert await caches(f"{HEADERS}/50") == ["hit", "hit"]
        assert await caches(f"{HEADERS}/{stub.root(51)}") == ["hit", "hit"]
        assert await caches(f"{HEADERS}/{stub.root(90)}") == ["miss", "hit"]
        stub.optimistic = True
        assert await caches(f"{HEADERS}/52") == ["miss", "miss"]


@on_uvloop
async def test_equal_requests_share_one_upstream_request() -> None:
    async with rest_harness() as harness:
        replies = await asyncio.gather(*[harness.get(f"/eth/v2/beacon/blocks/{88}") for _ in range(20)])
        assert {each.status for each in replies} == {200}
        assert harness.stubs[0].asked("/eth/v2/beacon/blocks/88") < 5


@on_uvloop
async def test_ssz_and_its_version_are_passed_on() -> None:
    async with rest_harness() as harness:
        reply = await harness.get(
            "/eth/v2/beacon/blocks/80", Accept="application/octet-stream;q=1,application/json;q=0.9"
        )
        assert reply.body == b"ssz" + (80).to_bytes(8, "little")
        assert reply.headers["content-type"] == "application/octet-stream"
        assert reply.headers["eth-consensus-version"] == "deneb"
        refused = await harness.get("/eth/v2/beacon/blocks/80", Accept="text/html")
        assert (refused.status, refused.json["error"]["param"]) == (400, "Accept")


@on_uvloop
async def test_large_body_is_streamed() -> None:
    async with rest_harness() as harness:
        held = harness.worker.held_bytes
        reply = await harness.get("/eth/v2/debug/beacon/states/head", Accept="application/octet-stream")
        assert (reply.status, len(reply.body)) == (200, LARGE_STATE)
        assert reply.body == bytes(range(256)) * (LARGE_STATE // 256)
        assert reply.headers["x-compute-units"] == "72"
        assert harness.worker.held_bytes == held


@on_uvloop
async def test_client_that_leaves_a_large_body_frees_its_upstream_connection() -> None:
    async with rest_harness() as harness:
        for _ in range(3):
            async with await harness.worker.connect() as client:
                client.writer.write(
                    harness.request(f"/v1/rest/{NETWORK}/eth/v2/debug/beacon/states/head", Accept="*/*")
                )
                await client.reader.readexactly(1000)
        assert (await harness.get(f"{HEADERS}/80")).status == 200
        await until(lambda: asyncio.sleep(0, not any(each.in_flight() for each in harness.route.upstreams)))


def counted(key: Key) -> tuple[int, int, int]:
    """Results, errors and units in the usage of a key."""
    tallies = key.tallies.values()
    return (
        sum(each.results for each in tallies),
        sum(each.errors for each in tallies),
        sum(each.units for each in tallies),
    )


@on_uvloop
async def test_large_body_counts_although_its_client_leaves() -> None:
    async with rest_harness() as harness:
        key = harness.worker.add_key("leaver")
        target = f"/v1/rest/{NETWORK}/eth/v2/debug/beacon/states/head"
        async with await harness.worker.connect() as client:
            client.writer.write(harness.request(target, key="leaver", Accept="*/*"))
            await client.reader.readexactly(1000)
        await until(lambda: asyncio.sleep(0, counted(key) == (1, 0, 72)))


@on_uvloop
async def test_body_that_an_upstream_breaks_off_is_cut_off_and_free() -> None:
    async with rest_harness() as harness:
        key = harness.worker.add_key("unlucky")
        harness.stubs[0].breaks_states = True
        async with await harness.worker.connect() as client:
            target = f"/v1/rest/{NETWORK}/eth/v2/debug/beacon/states/head"
            client.writer.write(harness.request(target, key="unlucky", Accept="*/*"))
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await client.reader.readexactly(LARGE_STATE)
        await until(lambda: asyncio.sleep(0, sum(each.upstream_faults for each in key.tallies.values()) == 1))
        assert counted(key) == (0, 0, 0)


UNREADABLE: dict[str, dict[str, Any]] = {
    "an encoded slash": {"path": "/eth/v1/beacon/headers/%2f"},
    "an unknown route": {"path": "/eth/v1/beacon/nothing"},
    "another verb": {"path": f"{HEADERS}/80", "verb": "POST", "body": b"{}"},
    "no type that is served": {"path": f"{HEADERS}/80", "Accept": "text/html"},
    "a header that is too long": {"path": f"{HEADERS}/80", "Eth_Consensus_Version": "x" * 300},
    "a directive that is not valid": {"path": f"{HEADERS}/80", "X_Min_Block": "many"},
    "a query with control characters": {"path": f"{HEADERS}/80?x=%00"},
    "a body of another type": {"path": VALIDATORS, "verb": "POST", "body": b"x", "Content_Type": "text/plain"},
    "a body that is not UTF-8": {"path": VALIDATORS, "verb": "POST", "body": b"\xff\xfe"},
    "a body that is too large": {"path": VALIDATORS, "verb": "POST", "body": b" " * (2 << 20)},
}


@on_uvloop
@pytest.mark.parametrize("why", UNREADABLE)
async def test_request_that_cannot_be_read_is_charged_counted_and_limited(why: str) -> None:
    async with rest_harness() as harness:
        key = harness.worker.add_key("poor", limits=Limits(5, 1000, 0))
        replies = [await harness.get(**UNREADABLE[why], key="poor") for _ in range(8)]
        refused = [each for each in replies if each.status == 429]
        read = [each for each in replies if each.status != 429]
        assert {each.status // 100 for each in read} == {4}
        assert {each.headers["x-compute-units"] for each in read} == {"1"}
        assert counted(key) == (0, len(read), len(read))
        assert refused


@on_uvloop
async def test_large_body_that_cannot_be_read_costs_its_size() -> None:
    async with rest_harness() as harness:
        reply = await harness.get(VALIDATORS, verb="POST", body=b"\xff" * 200_000)
        assert (reply.status, reply.json["error"]["reason"]) == (400, "body")
        assert int(reply.headers["x-compute-units"]) > 10


@on_uvloop
async def test_not_found_is_the_upstreams_reply() -> None:
    async with rest_harness() as harness:
        reply = await harness.get(f"{HEADERS}/97")
        assert (reply.status, reply.json["message"]) == (404, "No headers found for id '97'")
        assert (await harness.get("/eth/v1/node/health")).status == 206


@on_uvloop
async def test_failing_upstream_does_not_show() -> None:
    async with rest_harness(2) as harness:
        first, second = harness.stubs
        with first.failing(500):
            for slot in range(1, 60):
                if slot % 10 != 7:
                    assert (await harness.get(f"{HEADERS}/{slot}")).status == 200
        with first.failing(503), second.failing(503):
            reply = await harness.get(f"{HEADERS}/61")
            assert reply.status == 503


@on_uvloop
async def test_upstream_that_is_behind_is_not_believed() -> None:
    async with rest_harness(2) as harness:
        harness.stubs[0].head = 102
        await harness.look()
        for _ in range(10):
            assert (await harness.get(f"{HEADERS}/102")).status == 200


@on_uvloop
async def test_upstream_of_another_chain_is_not_asked() -> None:
    async with AsyncExitStack() as stack:
        good = await stack.enter_async_context(beacon_stub())
        other = await stack.enter_async_context(beacon_stub(genesis="0x" + "11" * 32, head=200))
        running = await stack.enter_async_context(running_worker({NETWORK: [other.url, good.url]}))
        harness = RestHarness(running, NETWORK)
        harness.tracker.withhold()
        await harness.shows("wrong_chain", "up")
        for _ in range(10):
            assert (await harness.get(f"{HEADERS}/80")).json["data"]["root"] == good.root(80)


@on_uvloop
async def test_post_with_a_body_is_a_read() -> None:
    async with rest_harness() as harness:
        path = VALIDATORS
        reply = await harness.get(path, verb="POST", body=b'{"ids":["1","2"]}')
        assert reply.json["data"] == {"ids": ["1", "2"]}
        assert (await harness.get(path, verb="POST", body=b'{"ids":["1","2"]}')).headers["x-cache"] == "hit"
        assert (await harness.get(path, verb="POST", body=b'{"ids":["3"]}')).json["data"] == {"ids": ["3"]}
        wrong = await harness.get(path, verb="POST", body=b"x", Content_Type="text/plain")
        assert wrong.status == 415
        assert (await harness.get(path, verb="POST", body=b"\xff\xfe")).status == 400


@on_uvloop
async def test_keys_scopes_and_limits_apply() -> None:
    async with rest_harness() as harness:
        worker = harness.worker
        worker.add_key("writer", scopes=["rpc:write"])
        worker.add_key("in url", allow_in_url=True)
        worker.add_key("test", live=False)
        worker.add_key("narrow", uses=AllowedUses(methods=frozenset({"GET /eth/v1/beacon/genesis"})))
        assert (await harness.get(f"{HEADERS}/80", key="")).status == 401
        assert (await harness.get(f"{HEADERS}/80", key="writer")).status == 403
        assert (await harness.get(f"{HEADERS}/80", key="test")).status == 403
        assert (await harness.get(f"{HEADERS}/80", key="narrow")).status == 403
        assert (await harness.get("/eth/v1/beacon/genesis", key="narrow")).status == 200
        text = worker.keys["in url"]
        assert (await harness.send(f"/v1/rest/{NETWORK}/{text}{HEADERS}/80", key="")).status == 200
        assert (await harness.send(f"/v1/rest/{NETWORK}{HEADERS}/80?apiKey={text}", key="")).status == 200
        assert not any(text in target for target in harness.stubs[0].targets)
        refused = await harness.send(f"/v1/rest/{NETWORK}/{worker.keys['main']}{HEADERS}/80", key="")
        assert refused.status in (401, 403)


@on_uvloop
async def test_the_other_kind_of_network_is_named() -> None:
    async with rest_harness() as harness:
        reply = await harness.call("eth_blockNumber")
        assert (reply.status, reply.json["error"]["reason"]) == (404, "network")
        assert f"/v1/rest/{NETWORK}/" in reply.json["error"]["message"]
        refused = await harness.get("/eth/v1/node/peers")
        assert refused.status == 404
        assert "peers of an upstream" in refused.json["error"]["message"]
        assert (await harness.get(f"{HEADERS}/80", verb="POST", body=b"{}")).status == 405


@on_uvloop
async def test_client_of_lodestar_works() -> None:
    async with rest_harness() as harness:
        url = f"http://127.0.0.1:{harness.worker.port}/v1/rest/{NETWORK}"
        task = {"url": url, "key": harness.worker.keys["main"], "slot": 80}
        seen = await asyncio.to_thread(run_script, "lodestar_api.mjs", task, within_s=60)
        stub = harness.stubs[0]
        assert (seen["genesis"], seen["root"], seen["version"]) == (stub.genesis, stub.root(80), "stub/1")
        assert (seen["finalized"], seen["absent"]) == (False, 404)


# Hostile paths

_INSIDE = "eth/v1/node/peers"
_DOTS = [
    *(
        "..",
        "%2e%2e",
        "%2E%2e",
        ".%2e",
        "%2e.",
        "%252e%252e",
        "..;",
        "..%3b",
        "..%00",
        "..%20",
        "..\\",
        "..%5c",
        "%c0%ae%c0%ae",
    ),
    *(
        "%e0%80%ae%e0%80%ae",
        "...",
        "..%0d%0a",
        "..%09",
        "%u002e%u002e",
        "..%ef%bc%8f",
        "\uff0e\uff0e",
        ".",
        "%2e",
        "..?",
        "..#",
    ),
]
_SLASHES = ["/", "//", "%2f", "%2F", "%252f", "\\", "%5c", "/./", "/;/", "%00/", "%0d%0a", "/%20/", "\u2215", "%c0%af"]
_FRONTS = ["eth/v1/beacon/headers", "eth/v1/beacon/blocks", "eth/v1/config"]


def _hostile() -> list[str]:
    made = [
        f"/{front}{slash}{dots}{slash}{dots}{slash}{_INSIDE}"
        for front, slash, dots in itertools.product(_FRONTS, _SLASHES, _DOTS)
    ]
    made += [
        f"/{_INSIDE}{end}" for end in ("", "/", "//", "%00", "?x=1", ";x", "%20", "%2f", ".json", "#", "\t", "%0a")
    ]
    made += [
        f"/eth/v1/beacon/headers/{text}" for text in ("a" * 9000, "%", "%2", "%zz", "a%0d%0aX-A: b", "\u0000", "é")
    ]
    made += [f"/eth/v1/beacon/headers/80?{text}" for text in ("a" * 9000, "x=%0d%0aX-A:%20b", "x=%", "=1", "x=\u00e9")]
    made += ["//eth/v1/node/peers", "/./eth/v1/node/peers", "/eth/v1/node/./peers", "/ETH/v1/node/peers", "http://x/y"]
    return made


@on_uvloop
async def test_no_hostile_path_reaches_an_unlisted_route() -> None:
    async with rest_harness() as harness:
        listed = [
            re.sub(r"\\\{[a-z_]+\\\}", "[^/?]+", re.escape(name)) + r"(?:\?.*)?" for name in harness.route.policies
        ]
        forms = _hostile()
        assert len(forms) > 500
        before = len(harness.stubs[0].targets)
        good = harness.request(f"/v1/rest/{NETWORK}{HEADERS}/80")
        for index, form in enumerate(forms):
            target = f"/v1/rest/{NETWORK}{form}"
            raw = f"GET {target} HTTP/1.1\r\nHost: x\r\nX-API-Key: {harness.worker.keys['main']}\r\n\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", harness.worker.port)
            # Every other one follows a good request, which the hot path serves.
            writer.write((good if index % 2 else b"") + raw.encode("utf-8"))
            if index % 2:
                await reader.readuntil(b"\r\n\r\n")
                await reader.readuntil(b'"more": []}}')
            line = await reader.readline()
            writer.close()
            assert line == b"" or line.split(b" ")[1] in (b"200", b"400", b"404", b"405", b"414", b"431"), (
                form,
                line,
            )
        for target in harness.stubs[0].targets[before:]:
            assert any(re.fullmatch(each, target) for each in listed), target
            assert not re.search(r"peers|\.\.|//|%2f|%5c|%00|%0d|%0a|;|\\", target.partition("?")[0], re.IGNORECASE), (
                target
            )


@pytest.mark.parametrize("name", ["GET eth", "PUT /x", "GET /x/../y", "GET /x//y", "GET /{a}/{a}", "GET /x?y"])
def test_bad_route_is_refused_at_start(name: str) -> None:
    assert template_fault(name)


@on_uvloop
async def test_examples_of_the_api_spec_work_and_generated_clients_keep_slashes(tmp_path: Path) -> None:
    spec = api_spec.load(SCHEMAS)
    parameters = spec.document["components"]["parameters"]
    module = client_module(spec.document, LANGUAGES["python"], SCHEMAS)
    (tmp_path / "penstock_client.py").write_text(module)
    async with rest_harness() as harness:
        read = parameters["RestPath"]["examples"]["beacon"]["value"]
        assert (await harness.get(f"/{read}")).status == 200
        posted = parameters["RestPostPath"]["examples"]["beacon"]["value"]
        body = spec.document["paths"]["/rest/{chain}/{network}/{path}"]["post"]["requestBody"]["content"][
            "application/json"
        ]["examples"]["beacon"]["value"]
        assert (await harness.get(f"/{posted}", verb="POST", body=json.dumps(body).encode())).status == 200
        script = f"""
import json
from penstock_client import Penstock

penstock = Penstock({f"http://127.0.0.1:{harness.worker.port}"!r}, {harness.worker.keys["main"]!r})
read = penstock.rest_get("ethereum-beacon", "mainnet", {read!r})
posted = penstock.rest_post("ethereum-beacon", "mainnet", {posted + "?status=active"!r}, {body!r})
print(json.dumps([read["data"]["genesis_validators_root"], posted["data"]]))
"""
        done = await asyncio.create_subprocess_exec(sys.executable, "-c", script, cwd=tmp_path, stdout=PIPE)
        root, balances = json.loads((await done.communicate())[0])
        assert root == harness.stubs[0].genesis
        assert [each["index"] for each in balances] == body


@on_uvloop
async def test_many_representations_of_one_account_evict_no_reply_of_another() -> None:
    """Each query is an entry of its own, and an account has no more than its share of a full cache."""
    async with rest_harness(cache={"bytes": 1 << 20}) as harness:
        harness.worker.add_key("other")
        replies = harness.route.state.replies
        mine = [f"{HEADERS}/{slot}" for slot in (60, 61, 62)]
        for path in mine:
            assert (await harness.get(path, key="other")).headers["x-cache"] == "miss"
        async with await harness.worker.connect() as client:
            for number in range(4000):
                target = f"/v1/rest/{NETWORK}{HEADERS}/{60 + number % 5}?n={number}"
                assert (await client.send(harness.request(target))).status == 200
        assert replies.evictions > 500
        assert [(await harness.get(path, key="other")).headers["x-cache"] for path in mine] == ["hit"] * 3
