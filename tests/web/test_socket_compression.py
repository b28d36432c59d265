"""permessage-deflate: negotiation, real clients, shared frames, bombs."""

from __future__ import annotations

import asyncio
import os
import zlib
from typing import Any

import aiohttp
import orjson
import pytest
import websockets

from proxy.core.encodings import MessageInflater, TooMuchData, deflate_message
from proxy.web.websocket import frames
from proxy.web.websocket.extensions import acceptance, window_bits
from proxy.web.websocket.frames import FrameReader, ProtocolViolation
from tests.client_scripts import run_script
from tests.http_client import rpc
from tests.web.worker import LIVE, NO_CACHE, Worker, on_uvloop, running_worker
from tests.wire.upstreams import Scripted, answer, http, replies


@pytest.mark.parametrize(
    ("offers", "bits"),
    [
        ("", 0),
        ("permessage-deflate", 15),
        ("permessage-deflate; client_max_window_bits", 15),
        ("permessage-deflate; server_max_window_bits=12; client_max_window_bits=12", 12),
        ('Permessage-Deflate; SERVER_MAX_WINDOW_BITS="10"', 10),
        ("permessage-deflate; server_max_window_bits=8", 0),
        ("permessage-deflate; server_max_window_bits=8, permessage-deflate", 15),
        ("permessage-deflate; server_max_window_bits", 0),
        ("permessage-deflate; server_no_context_takeover; client_no_context_takeover", 15),
        ("permessage-deflate; server_no_context_takeover=1", 0),
        ("permessage-deflate; client_max_window_bits=16", 0),
        ("permessage-deflate; client_max_window_bits; client_max_window_bits", 0),
        ("permessage-deflate; unknown", 0),
        ("x-webkit-deflate-frame", 0),
    ],
)
def test_offer_is_accepted_only_if_it_can_be_kept(offers: str, bits: int) -> None:
    assert window_bits(offers) == bits


def test_window_is_named_if_it_is_smaller_than_the_largest() -> None:
    assert acceptance(15) == "permessage-deflate; server_no_context_takeover; client_no_context_takeover"
    assert acceptance(12).endswith("; server_max_window_bits=12")


@pytest.mark.parametrize("bits", range(9, 16))
def test_message_fits_its_window(bits: int) -> None:
    data = os.urandom(3000).hex().encode() * 5
    reader = zlib.decompressobj(-bits)
    assert reader.decompress(deflate_message(data, bits) + b"\0\0\xff\xff") == data
    assert inflated(deflate_message(data, bits), len(data))[0] == data


def inflated(packed: bytes, limit: int) -> tuple[bytes, int]:
    """The whole message, and the steps that it took."""
    inflater, steps = MessageInflater(packed, limit), 1
    while not inflater.step():
        steps += 1
    return bytes(inflater.text), steps


# Four empty blocks with dynamic codes (RFC 1951, 3.2.7), which take long to read, and the end of a message.
TINY_BLOCKS = bytes.fromhex(
    "04c081000000000090ff6b100007020000000040feaf41001c080000000000f9bf060170200000000000e4ff1a000000ffff"
)


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 131_072, 1_000_000])
def test_message_is_decompressed_in_steps_of_bounded_size(size: int) -> None:
    for text in (b"0" * size, os.urandom(size // 2 + 1).hex().encode()[:size]):
        packed = deflate_message(text, 15)
        found, steps = inflated(packed, size)
        assert found == text
        assert max(size // 65_536, len(packed) // 1024) <= steps <= size // 65_536 + len(packed) // 1024 + 3


def test_data_that_becomes_nothing_is_read_in_steps_too() -> None:
    blocks = TINY_BLOCKS * 20_000
    assert inflated(blocks, 1) == (b"", -(-(len(blocks) + 4) // 1024))


def last_of(reader: FrameReader) -> frames.Message | None:
    """The message behind its fragments."""
    while (found := reader.take()) == frames.FRAGMENT:
        pass
    return found


def masked(payload: bytes, first: int) -> bytes:
    size = len(payload)
    length = bytes((0x80 | size,)) if size < 126 else bytes((0x80 | 126,)) + size.to_bytes(2, "big")
    return bytes((first,)) + length + bytes(4) + payload


def test_reader_inflates_whole_and_fragmented_messages_up_to_the_limit() -> None:
    text = b'{"method":"eth_call"}' * 200
    packed = deflate_message(text, 15)
    reader = FrameReader(len(text), inflates=True)
    reader.feed(masked(packed, 0xC1))
    assert reader.take() == (frames.TEXT, text)
    reader.feed(masked(packed[:50], 0x41) + masked(b"", 0x89) + masked(packed[50:], 0x80) + masked(b"plain", 0x81))
    taken = [reader.take() for _ in range(4)]
    assert taken == [frames.FRAGMENT, (frames.PING, b""), (frames.TEXT, text), (frames.TEXT, b"plain")]
    bomb = deflate_message(b"0" * 50_000_000, 15)[:60_000]
    for wrong, code in ((bomb, frames.TOO_BIG), (b"\xff\xff\xff", frames.NOT_UTF8)):
        reader = FrameReader(len(text) * 40, inflates=True)
        reader.feed(masked(wrong, 0xC1))
        with pytest.raises(ProtocolViolation) as caught:
            last_of(reader)
        assert caught.value.code == code
    with pytest.raises(TooMuchData):
        inflated(packed, len(text) - 1)


def test_large_message_is_returned_after_its_caller_could_postpone_it() -> None:
    text = b"0" * frames.LARGE_MESSAGE
    for data in (masked(text, 0x81), masked(text[:9], 0x01) + masked(text[9:], 0x80)):
        reader = FrameReader(len(text), inflates=True)
        reader.feed(data)
        while not reader.has_arrived:
            assert reader.take() == frames.FRAGMENT
        assert reader.is_large
        assert reader.take() == (frames.TEXT, text)
        assert not reader.is_large
        assert reader.is_between
    # The size of a compressed message is known later.
    reader = FrameReader(1_000_000, inflates=True)
    reader.feed(masked(deflate_message(b"0" * 1_000_000, 15), 0xC1))
    assert reader.take() == frames.FRAGMENT
    assert reader.is_large


@pytest.mark.parametrize("first", [0xC1, 0xC0, 0xC9, 0xA1, 0x91])
def test_reserved_bits_are_refused_where_nothing_was_negotiated(first: int) -> None:
    for inflates in (False, True):
        if inflates and first == 0xC1:
            continue
        reader = FrameReader(1000, inflates=inflates)
        reader.feed(masked(b"x", first))
        with pytest.raises(ProtocolViolation):
            reader.take()


def by_size(asked: Any) -> bytes:
    return http(answer(asked, result="ab" * (asked["params"][0] // 2)))


def random_by_size(asked: Any) -> bytes:
    """Digits that take a while to decompress."""
    return http(answer(asked, result=os.urandom(asked["params"][0] // 2).hex()))


def url_of(worker: Worker) -> str:
    return f"ws://127.0.0.1:{worker.port}/v1/ws/{LIVE}?apiKey={worker.keys['main']}"


SIZES = (10, 2000, 50_000, 100_000, 400_000)


@on_uvloop
async def test_clients_of_the_trade_exchange_compressed_messages() -> None:
    async with Scripted(replies(by_size)) as upstream, running_worker(upstream.url, **NO_CACHE) as worker:
        async with websockets.connect(url_of(worker), max_size=1 << 24) as client:
            assert "permessage-deflate" in client.response.headers["Sec-WebSocket-Extensions"]  # type: ignore[union-attr]
            for size in SIZES:
                await client.send(rpc("net_listening", [size, "x" * 3000]).decode())
                assert len(orjson.loads(await client.recv())["result"]) == size
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(url_of(worker), compress=15, max_msg_size=1 << 24) as socket,
        ):
            assert socket.compress == 15
            for size in SIZES:
                await socket.send_str(rpc("net_listening", [size, "x" * 3000]).decode())
                assert len((await socket.receive_json())["result"]) == size


@on_uvloop
async def test_large_messages_are_smaller_on_the_wire() -> None:
    async with (
        Scripted(replies(by_size)) as upstream,
        running_worker(upstream.url, **NO_CACHE) as worker,
        await worker.connect() as client,
    ):
        offer = "Sec-WebSocket-Extensions: permessage-deflate\r\n"
        await client.write(
            f"GET /v1/ws/{LIVE} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{offer}"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {'A' * 22}==\r\n"
            f"X-API-Key: {worker.keys['main']}\r\n\r\n".encode()
        )
        assert (await client.reply()).headers["sec-websocket-extensions"] == acceptance(15)
        await client.write(masked(rpc("net_listening", [20_000]), 0x81))
        first, size = await client.reader.readexactly(2)
        assert first == 0xC1
        assert size < 126
        text, _ = inflated(await client.reader.readexactly(size), 30_000)
        assert len(orjson.loads(text)["result"]) == 20_000


@on_uvloop
async def test_nothing_is_negotiated_if_it_is_turned_off() -> None:
    async with (
        Scripted(replies(by_size)) as upstream,
        running_worker(upstream.url, **NO_CACHE, sockets={"compress_from": 0}) as worker,
        websockets.connect(url_of(worker)) as client,
    ):
        assert "Sec-WebSocket-Extensions" not in client.response.headers  # type: ignore[union-attr]
        await client.send(rpc("net_listening", [5000]).decode())
        assert len(orjson.loads(await client.recv())["result"]) == 5000


@on_uvloop
async def test_client_that_decompresses_in_the_background_sees_the_close_frame() -> None:
    async with Scripted(replies(random_by_size)) as upstream, running_worker(upstream.url, **NO_CACHE) as worker:
        task = {"socket_url": url_of(worker), "calls": 30, "size": 60_000, "code": 3500}
        seen = await asyncio.to_thread(run_script, "node_close.mjs", task, within_s=60)
    assert "permessage-deflate" in seen["extensions"]
    assert (seen["code"], seen["clean"]) == (3500, True)
