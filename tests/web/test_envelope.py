"""The envelope end to end: an upstream that decodes like Go runs exactly the call that was checked and priced."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core import jsonrpc
from proxy.core.jsonrpc import MalformedCall
from tests.web.worker import NO_CACHE, Worker, on_uvloop, running_worker
from tests.wire.upstreams import Exchange, Scripted, go_decode, http

WAYS = pytest.mark.parametrize("way", ["hot", "short", "aiohttp"])
READ, WRITE = "eth_gasPrice", "eth_sendRawTransaction"
CHAIN_ID = b'"method":"eth_chainId"'


class GoUpstream(Scripted):
    """Runs what Go would run, and records the methods."""

    def __init__(self) -> None:
        super().__init__(self._act)
        self.ran: list[str] = []

    async def _act(self, exchange: Exchange) -> None:
        calls = go_decode(await exchange.body())
        many = calls if isinstance(calls, list) else [calls]
        self.ran += [call["method"] for call in many]
        reply = [_answer(call) for call in many]
        await exchange.send(http(b"[" + b",".join(reply) + b"]" if isinstance(calls, list) else reply[0]))


def _answer(call: dict[str, Any]) -> bytes:
    result = {"ran": call["method"], "params": call["params"]}
    return json.dumps({"jsonrpc": "2.0", "id": call["id"], "result": result}).encode()


@asynccontextmanager
async def go(way: str = "hot") -> AsyncIterator[tuple[Worker, GoUpstream]]:
    upstream = GoUpstream()
    async with upstream, running_worker(upstream.url, **(NO_CACHE if way == "short" else {})) as worker:
        worker.headers = {"TE": "trailers"} if way == "aiohttp" else {}
        yield worker, upstream


# https://www.jsonrpc.org/specification, section 7, with methods that exist here


@WAYS
@on_uvloop
async def test_examples_of_the_specification_are_answered(way: str) -> None:
    async with go(way) as (worker, upstream):
        for params, number in ((b"[42, 23]", 1), (b"[23, 42]", 2)):
            body = b'{"jsonrpc": "2.0", "method": "net_listening", "params": %b, "id": %d}' % (params, number)
            reply = await worker.send(body)
            assert reply.status == 200
            assert reply.json == {
                "jsonrpc": "2.0", "result": {"ran": "net_listening", "params": orjson.loads(params)}, "id": number,
            }  # fmt: skip
        named = b'{"jsonrpc":"2.0","method":"net_listening","params":{"subtrahend":23,"minuend":42},"id":3}'
        assert (await worker.send(named)).fault(400)["details"] == {"rpc_code": -32600}
        # Notifications.
        for body in (
            b'{"jsonrpc": "2.0", "method": "net_listening", "params": [1,2,3,4,5]}',
            b'{"jsonrpc": "2.0", "method": "net_listening"}',
            b'{"jsonrpc": "2.0", "method": "foobar"}',
        ):
            reply = await worker.send(body)
            assert (reply.status, reply.body) == (204, b"")
        assert upstream.ran == ["net_listening"] * 4
        # A method that does not exist.
        reply = await worker.send(b'{"jsonrpc": "2.0", "method": "foobar", "id": "1"}')
        assert reply.status == 200
        assert reply.json["error"]["code"] == -32601
        assert reply.json["id"] == "1"
        # A request that is refused as a whole gets an HTTP error with the specification's code.
        for body, code in (
            (b'{"jsonrpc": "2.0", "method": "foobar, "params": "bar", "baz]', -32700),
            (b'{"jsonrpc": "2.0", "method": 1, "params": "bar"}', -32600),
            (b'[{"jsonrpc":"2.0","method":"sum","params":[1,2,4],"id":"1"},{"jsonrpc":"2.0","method"]', -32700),
            (b"[]", -32600),
        ):
            assert (await worker.send(body)).fault(400)["details"] == {"rpc_code": code}
        assert upstream.ran == ["net_listening"] * 4


@WAYS
@on_uvloop
async def test_batches_of_the_specification_are_answered(way: str) -> None:
    async with go(way) as (worker, _):
        for count in (1, 3):
            reply = (await worker.send(b"[%b]" % b",".join([b"1"] * count))).json
            assert [(item["id"], item["error"]["code"]) for item in reply] == [(None, -32600)] * count
        reply = (
            await worker.send(
                b"""[
            {"jsonrpc": "2.0", "method": "net_listening", "params": [1,2,4], "id": "1"},
            {"jsonrpc": "2.0", "method": "net_listening", "params": [7]},
            {"jsonrpc": "2.0", "method": "eth_protocolVersion", "params": [42,23], "id": "2"},
            {"foo": "boo"},
            {"jsonrpc": "2.0", "method": "foo.get", "params": {"name": "myself"}, "id": "5"},
            {"jsonrpc": "2.0", "method": "web3_clientVersion", "id": "9"}
        ]""",
            )
        ).json
        assert [item["id"] for item in reply] == ["1", "2", None, "5", "9"]
        assert [item["error"]["code"] if "error" in item else item["result"]["ran"] for item in reply] == [
            *("net_listening", "eth_protocolVersion", -32600, -32600, "web3_clientVersion")
        ]
        silent = b"""[
            {"jsonrpc": "2.0", "method": "net_listening", "params": [1,2,4]},
            {"jsonrpc": "2.0", "method": "net_listening", "params": [7]}
        ]"""
        reply = await worker.send(silent)
        assert (reply.status, reply.body) == (204, b"")


# Bytes that must not change

IDS = (
    b"0", b"1", b"-1", b"18446744073709551616", b"1" * 60, b"1.50e3", b"1E400", b"-0.0", b"null", b'""', b'"a"', b'"\\u0000"',
    b'"\\u0061\\n\\"\\\\\\/"', '"é\u2028🙂"'.encode(), b'"\\ud83d\\ude42"', b'"%b"' % (b"x" * 62), b'"%b"' % (b"x" * 63),
    b'"%b"' % (b"x" * 254), b"0.1000000000000000055511151231257827",
)  # fmt: skip


@WAYS
@on_uvloop
async def test_id_comes_back_byte_for_byte(way: str) -> None:
    async with go(way) as (worker, upstream):
        for call_id in IDS:
            reply = await worker.send(b'{"jsonrpc":"2.0","id":%b,"method":"net_listening","params":[]}' % call_id)
            assert reply.status == 200, (call_id, reply)
            assert reply.body.startswith(b'{"jsonrpc":"2.0","id":%b,"result":' % call_id)
            reply = await worker.send(b'{"jsonrpc":"2.0","id":%b,"method":"eth_nope"}' % call_id)
            assert reply.body.startswith(b'{"jsonrpc":"2.0","id":%b,"error":' % call_id)
        calls = b",".join(b'{"jsonrpc":"2.0","id":%b,"method":"net_listening"}' % call_id for call_id in IDS)
        reply = await worker.send(b"[%b]" % calls)
        for call_id in IDS:
            assert b'{"jsonrpc":"2.0","id":%b,"result":' % call_id in reply.body
        assert not any(b"xxx" in body for body in upstream.bodies), "ids of callers stay here"


@WAYS
@on_uvloop
async def test_params_are_forwarded_byte_for_byte(way: str) -> None:
    async with go(way) as (worker, upstream):
        for params in (
            *(b"[]", b"[{}]", b"[ ]", b'[1.0,1E5,-0,"\\u00e9\\/"]', '["é🙂"]'.encode(), b'[{"a":1,"a":2,"A":3}]'),
            b"[115792089237316195423570985008687907853269984665640564039457584007913129639935]",
            *(b'["],\\"method\\":\\"x\\""]', b'[{"method":"x","params":[],"id":7}]', b'["' + b"a" * 70_000 + b'"]'),
        ):
            upstream.bodies.clear()
            assert (
                await worker.send(b'{"jsonrpc":"2.0","id":1,"method":"net_listening","params":%b}' % params)
            ).status == 200
            (sent,) = upstream.bodies
            assert sent.endswith(b',"method":"net_listening","params":%b}' % params)


# Ambiguous envelopes: the checked call is the one that runs


def tricks() -> Iterator[bytes]:
    """Envelopes that two decoders might read as two different calls."""
    pairs = ((READ, WRITE), (WRITE, READ))
    names = (
        *(
            "Method",
            "METHOD",
            "mEthod",
            "method ",
            " method",
            "method\\u0000",
            "meth\\u006fd",
            "\\u006dethod",
            "method\\n",
        ),
        *("MET\u0048OD", "metho\u0064", "мethod", "method\u200b", "m\\u0065thod", "params\u017f", "method\ufeff"),
    )
    for (one, two), name in itertools.product(pairs, names):
        yield f'{{"jsonrpc":"2.0","id":1,"method":"{one}","{name}":"{two}","params":[]}}'.encode()
        yield f'{{"jsonrpc":"2.0","id":1,"{name}":"{two}","method":"{one}","params":[]}}'.encode()
        yield f'{{"jsonrpc":"2.0","id":1,"{name}":"{two}","params":[]}}'.encode()
    for one, two in pairs:
        yield f'{{"jsonrpc":"2.0","id":1,"method":"{one}","method":"{two}"}}'.encode()
        yield f'{{"jsonrpc":"2.0","id":1,"method":"{one}","method":null}}'.encode()
        yield f'{{"jsonrpc":"2.0","id":1,"method":"{one}","params":[],"params":{{"method":"{two}"}}}}'.encode()
        yield f'{{"jsonrpc":"2.0","id":1,"method":"{one}","param\u017f":[],"params":[1]}}'.encode()
        yield f'{{"j\u017fonrpc":"2.0","jsonrpc":"2.0","id":1,"method":"{one}"}}'.encode()
        yield f'{{"jsonrpc":"2.0","id":1,"ID":2,"method":"{one}"}}'.encode()
        yield f'{{"jsonrpc":"2.0","id":1,"id":2,"method":"{one}"}}'.encode()
        yield f'{{"jsonrpc":"2.0","id":"\\",\\"method\\":\\"{two}\\"","method":"{one}"}}'.encode()
        yield f'{{"jsonrpc":"2.0","id":{{"method":"{two}"}},"method":"{one}"}}'.encode()
        yield f'{{"jsonrpc":"2.0","id":1,"method":"{one}"}}{{"jsonrpc":"2.0","id":1,"method":"{two}"}}'.encode()
        yield f'{{"jsonrpc":"2.0","id":1,"method":["{one}","{two}"]}}'.encode()
        yield f'{{"jsonrpc":"2.0","id":1,"method":"{one}",}}'.encode()
        yield f'\ufeff{{"jsonrpc":"2.0","id":1,"method":"{one}"}}'.encode()
        for tail in (
            "\\u0000",
            "\\n",
            "\\u0000admin",
            " ",
            "\\u017f",
            "\u017f",
            "\\u212a",
            "\u200b",
            "\\ud800",
            '\\",\\"x\\":\\"',
        ):
            yield f'{{"jsonrpc":"2.0","id":1,"method":"{one}{tail}"}}'.encode()
        yield f'{{"jsonrpc":"2.0","id":1,"method":"{one.upper()}"}}'.encode()
        yield f'{{"jsonrpc":"2.0","id":1,"method":"{one}\u017f"}}'.encode()
    for hidden in (
        "personal_unlockAccount",
        "admin_addPeer",
        "debug_setHead",
        "eth_sendTransaction",
        "eth_sign",
        "miner_start",
    ):
        yield f'{{"jsonrpc":"2.0","id":1,"method":"{hidden}"}}'.encode()
        yield f'{{"jsonrpc":"2.0","id":1,"method":"{READ}","METHOD":"{hidden}"}}'.encode()


@WAYS
@on_uvloop
async def test_read_only_key_causes_no_upstream_write(way: str) -> None:
    async with go(way) as (worker, upstream):
        worker.add_key("reads", scopes=["rpc:read"])
        for body in tricks():
            for sent in (body, b"[%b]" % body):
                reply = await worker.send(sent, key="reads")
                assert reply.status in (200, 204, 400, 403), reply
                assert orjson.loads(reply.body or b"null") is not False
        assert set(upstream.ran) == {READ}


@WAYS
@on_uvloop
async def test_call_is_priced_as_the_method_that_runs(way: str) -> None:
    """A single call that reaches the upstream was charged as the method that the upstream ran."""
    async with go(way) as (worker, upstream):
        units = {name: plan.units for name, plan in worker.app.networks.routes["ethereum/mainnet"].policies.items()}
        assert units[READ] != units[WRITE]
        for body in tricks():
            upstream.ran.clear()
            reply = await worker.send(body)
            if upstream.ran:
                (ran,) = upstream.ran
                assert reply.headers["x-compute-units"] == str(units[ran]), body
                assert reply.json["result"]["ran"] == ran
            elif reply.status == 200:
                assert "error" in reply.json
                assert reply.headers["x-compute-units"] == "1"
            else:
                assert "x-compute-units" not in reply.headers


@WAYS
@on_uvloop
async def test_deep_nesting_and_invalid_bytes_are_refused(way: str) -> None:
    call = b'{"jsonrpc":"2.0","id":1,"method":"net_listening","params":%b}'
    async with go(way) as (worker, upstream):
        for params in (b"[" * 100_000, b'{"a":' * 100_000, b"[" * 5000 + b"]" * 5000, b'[{"a":[' * 20_000):
            for body in (call % params, b"[%b]" % (call % params)):
                assert (await worker.send(body)).fault(400)["details"]["rpc_code"] == -32700
        for params in (
            b'["\xff"]',
            b'["\xc3"]',
            b'["\xed\xa0\x80"]',
            b'["\xc0\xaf"]',
            b'["\xf4\x90\x80\x80"]',
            b'["\0"]',
            b'["\n"]',
        ):
            assert (await worker.send(call % params)).fault(400)["details"]["rpc_code"] == -32700
        for bad_id in (b'"\xff"', b'"\n"', b"01", b"1.", b"+1", b"0x1", b"NaN", b"true", b"[]", b'"%b"' % (b"x" * 255)):
            assert (await worker.send(b'{"jsonrpc":"2.0","id":%b,%b}' % (bad_id, CHAIN_ID))).status == 400
        assert not upstream.bodies
        nested = b"[" * 100 + b"]" * 100
        assert (await worker.send(call % nested)).status == 200


# Without a server: Go's decoding, and arbitrary envelopes


@pytest.mark.parametrize(
    ("body", "method"),
    [
        (b'{"method":"a"}', "a"),
        (b'{"method":"a","METHOD":"b"}', "b"),
        (b'{"METHOD":"b","method":"a"}', "a"),
        (b'{"method":"a","method":"b"}', "b"),
        (b'{"method":"a","method":null}', "a"),
        (b'{"m\\u0065thod":"a"}', "a"),
        (b'{"method ":"a"}', ""),
        ('{"j\u017fonrpc":"2.0","method":"a"}'.encode(), "a"),
        (b'{"method":"\xff"}', "\ufffd"),
    ],
)
def test_stub_decodes_as_go_does(body: bytes, method: str) -> None:
    assert go_decode(body)["method"] == method
    assert go_decode(b"[%b,%b]" % (body, body)) == [go_decode(body)] * 2
    assert go_decode('{"j\u017fonrpc":"2.0"}'.encode())["jsonrpc"] == "2.0"
    assert go_decode('{"param\u017f":[1]}'.encode())["params"] == [1]


TEXT = st.sampled_from(
    [READ, WRITE, "admin_x", "Method", "METHOD", "method", "params", "param\u017f", "id", "jsonrpc", "2.0", "\u212a"]
)
VALUE = st.recursive(
    TEXT | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner),
    max_leaves=5,
)


@settings(max_examples=400)
@given(st.lists(st.tuples(TEXT, VALUE), max_size=6), st.booleans(), st.booleans())
def test_rebuilt_envelope_runs_the_method_that_was_checked(
    members: list[tuple[str, Any]], complete: bool, escaped: bool
) -> None:
    pairs = [("jsonrpc", "2.0"), ("method", READ), ("id", 1), *members] if complete else members
    text = ",".join(f"{json.dumps(name, ensure_ascii=escaped)}:{json.dumps(value)}" for name, value in pairs)
    try:
        method, params, _ = jsonrpc.parse(f"{{{text}}}".encode())
    except MalformedCall:
        return
    rebuilt = b"".join((jsonrpc.ENVELOPE_START, b"7", jsonrpc.request_tail(method), params, b"}"))
    run = go_decode(rebuilt)
    assert (run["jsonrpc"], run["id"], run["method"]) == ("2.0", 7, method)
