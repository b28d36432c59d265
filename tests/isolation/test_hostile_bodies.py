"""Bodies of REST and session operations in hostile shapes: each is refused or read in short steps, within bounded memory."""

from __future__ import annotations

import resource

import orjson
import pytest

from proxy.core.bounded_json import MOST_CONTAINERS, MOST_STRINGS, MOST_VALUES
from tests.http_client import Reply, request
from tests.isolation.loop_steps import LONGEST_STEP_S, LoopSteps, send_apart
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.web.worker import on_uvloop

ROUNDS = 3
LARGE = 8_000_000
MOST_GROWTH = 64 << 20
HOOK = b'{"url":"https://hooks.example.com/x","chain":"ethereum","event_type":"address_activity","config":%b}'
ADDRESSES = orjson.dumps([f"0x{number:040x}" for number in range(99_999)])


def many(part: bytes, size: int) -> bytes:
    return b"[%b%b]" % ((part + b",") * (size // (len(part) + 1)), part)


SHAPES = {
    "arrays": many(b"[]", LARGE),
    "objects": many(b"{}", LARGE),
    "small objects": many(b'{"a":1}', LARGE),
    "numbers": many(b"0", LARGE),
    "text": many(b'""', LARGE),
    "escaped text": many(b'"\\n"', LARGE),
    "names": b"{%b}" % b",".join(b'"%d":0' % number for number in range(500_000)),
    "repeated names": b'{%b"a":0}' % (b'"a":0,' * 1_000_000),
    "depth": b"[" * LARGE,
    "long text": b'"%b"' % (b"a" * LARGE),
    "escapes": b'"%b"' % (b"\\n" * (LARGE // 2)),
    "digits": b"1" * 10_000,
    "space": b" " * LARGE + b"1",
    "open text": b'"' + b"a" * LARGE,
    "escaped quotes": b'"' + b'\\"' * (LARGE // 2),
    "most values": many(b"0", 2 * (MOST_VALUES - 50)),
    "most arrays": many(b"[0]", 4 * (MOST_CONTAINERS - 20)),
    "most strings": many(b'""', 3 * (MOST_STRINGS - 100)),
}
TARGETS = ["/v1/webhooks", "/v1/wallets/create", "/v1/gas/policies", "/v1/account/sign-in"]


def growth() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


async def longest_step(harness: RpcHarness, raw: bytes) -> tuple[float, Reply]:
    """The longest step that the request needs: what else the machine does can only add to it, in one round or another."""
    measured, reply = [], None
    for _ in range(ROUNDS):
        with LoopSteps.measured() as steps:
            reply = await send_apart(harness.worker.port, raw)
        measured.append(steps.longest_s)
    assert reply is not None
    return min(measured), reply


@pytest.mark.parametrize("target", TARGETS)
@on_uvloop
async def test_body_in_a_hostile_shape_is_refused_in_short_steps(target: str) -> None:
    async with rpc_harness(1) as harness:
        key = harness.worker.keys["main"]
        (await send_apart(harness.worker.port, request("POST", target, b"{}", key=key))).fault(400)
        for shape, value in SHAPES.items():
            body = HOOK % (b'{"a":%b}' % value) if target == "/v1/webhooks" else b'{"config":%b}' % value
            raw = request("POST", target, body, key=key)
            before = growth()
            longest_s, reply = await longest_step(harness, raw)
            assert reply.status in (400, 413), (shape, reply)
            assert longest_s < LONGEST_STEP_S, (shape, longest_s)
            assert growth() - before < MOST_GROWTH, shape


@on_uvloop
async def test_longest_list_of_addresses_is_validated_in_short_steps() -> None:
    """The network has no upstream, so the request ends after its validation."""
    async with rpc_harness(1) as harness:
        body = HOOK.replace(b'"ethereum"', b'"polygon"') % (b'{"addresses":%b}' % ADDRESSES)
        raw = request("POST", "/v1/webhooks", body, key=harness.worker.keys["main"])
        longest_s, reply = await longest_step(harness, raw)
        assert reply.status == 404, reply
        assert longest_s < LONGEST_STEP_S


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b'"a\\u0000b"', "U+0000"),
        (b'{"\\u0000":1}', "U+0000"),
        (b'"\\ud800"', "surrogate"),
        (b'{"\\udfff":1}', "surrogate"),
        (b'{"a":1,"a":2}', "more than once"),
        (b'{"a":1,"\\u0061":2}', "more than once"),
        (b"1" * 10_000, "digits"),
        (b"0." + b"1" * 10_000, "digits"),
        (b"[" * 600 + b"]" * 600, "arrays"),
    ],
)
@pytest.mark.parametrize("target", TARGETS)
@on_uvloop
async def test_unusable_value_is_a_clear_400(target: str, value: bytes, words: str) -> None:
    async with rpc_harness(1) as harness, await harness.worker.connect() as client:
        body = b'{"config":%b}' % value if len(value) < 4000 else b'{"a":%b}' % value[:3000]
        reply = await client.send(request("POST", target, body, key=harness.worker.keys["main"]))
        message = reply.fault(400)["message"]
        assert message.startswith("the body "), message
        assert words in message
