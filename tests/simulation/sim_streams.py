"""The WebSocket port of a simulated upstream: calls as messages, and subscriptions to its heads.

Heads are announced as nodes do: every block of the new branch, oldest first, that the one before did not have. A stream may
also stop announcing while its connection stays open, announce a block twice, or close its sockets.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from typing import TYPE_CHECKING, Any

import orjson

from tests.simulation.block_tree import Block
from tests.simulation.memory_network import MemoryTransport

if TYPE_CHECKING:
    from tests.simulation.sim_upstream import Asked, SimUpstream

STREAM_PORT = 8546
# How soon a node announces a head that it has.
LOOKS_EVERY_S = 0.05
TEXT, CLOSE, PING, PONG = 1, 8, 9, 10
# A reply that took longer than this may have come after the asker stopped waiting.
PROMPT_S = 0.1
OVERLOADED = {"code": -32005, "message": "limit exceeded"}
# No call has this result: as a balance it is one of another chain, and as a block it is far beyond the network's.
FOREIGN = hex(1 << 240)
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def frame_of(payload: bytes, opcode: int = TEXT) -> bytes:
    """A frame from a server, which is not masked."""
    size = len(payload)
    if size < 126:
        length = bytes([size])
    elif size <= 0xFFFF:
        length = b"\x7e" + size.to_bytes(2, "big")
    else:
        length = b"\x7f" + size.to_bytes(8, "big")
    return bytes([0x80 | opcode]) + length + payload


def masked_with(mask: bytes, payload: bytes) -> bytes:
    """Masking twice gives the payload again."""
    size = len(payload)
    long = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(payload, "big") ^ int.from_bytes(long, "big")).to_bytes(size, "big")


def foreign_to(reply: Any) -> Any:
    """The reply to another call: its id and its result are not those of this one."""
    if isinstance(reply, list):
        return [foreign_to(each) for each in reply]
    return {"jsonrpc": "2.0", "id": 1 if reply["id"] != 1 else 2, "result": FOREIGN}


class StreamConnection(asyncio.Protocol):
    """One socket of an upstream."""

    _transport: MemoryTransport

    def __init__(self, upstream: SimUpstream) -> None:
        self._upstream = upstream
        self._buffer = b""
        self._is_open = False
        self._loop = asyncio.get_running_loop()
        self._subscription = ""
        self._announced: Block = upstream.head
        self._is_mute = False
        self._held: list[Asked] = []
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<StreamConnection of {self._upstream.name} at {self._announced!r}>"

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._upstream.joined(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._upstream.left(self)
        if self._timer is not None:
            self._timer.cancel()

    def drop(self) -> None:
        self._transport.abort()

    # Messages

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._is_open:
            head, end, rest = self._buffer.partition(b"\r\n\r\n")
            if not end:
                return
            self._buffer = rest
            self._accept(head)
        while (found := self._next_frame()) is not None:
            self._on_frame(*found)

    def _accept(self, head: bytes) -> None:
        lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        # Only the name of the header may be lowered: the key is taken from the head as it was sent.
        at = head.lower().index(b"sec-websocket-key: ") + len(b"sec-websocket-key: ")
        key = head[at : at + len(lines[b"sec-websocket-key"])]
        accepts = base64.b64encode(hashlib.sha1(key + _GUID).digest())
        self._transport.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: %b\r\n\r\n" % accepts
        )
        self._is_open = True

    def _next_frame(self) -> tuple[int, bytes] | None:
        """The opcode and the payload of the next whole frame. Clients mask theirs."""
        buffer = self._buffer
        if len(buffer) < 6:
            return None
        size, at = buffer[1] & 0x7F, 2
        if size == 126:
            size, at = int.from_bytes(buffer[2:4], "big"), 4
        if len(buffer) < at + 4 + size:
            return None
        mask, masked = buffer[at : at + 4], buffer[at + 4 : at + 4 + size]
        self._buffer = buffer[at + 4 + size :]
        return buffer[0] & 0x0F, masked_with(mask, masked)

    def _on_frame(self, opcode: int, payload: bytes) -> None:
        if self._upstream.is_silent or self._transport.is_closing():
            return
        if opcode == PING:
            self._transport.write(frame_of(payload, PONG))
        elif opcode == CLOSE:
            self._transport.write(frame_of(payload[:2], CLOSE))
            self._transport.close()
        elif opcode == TEXT:
            self._answer_later(self._upstream.arrived(orjson.loads(payload)))

    def _answer_later(self, asked: Asked) -> None:
        self._loop.call_later(self._upstream.takes_s(asked.body), self._answer, asked)

    def answer_held(self) -> None:
        """Answer the calls that have waited for the end of a pause."""
        held, self._held = self._held, []
        for asked in held:
            self._answer_later(asked)

    def _answer(self, asked: Asked) -> None:
        upstream, body = self._upstream, asked.body
        if self._transport.is_closing() or upstream.is_silent:
            return
        if upstream.is_paused:
            self._held.append(asked)
            return
        if isinstance(body, dict) and body["method"] == "eth_subscribe":
            self._subscription = f"0x{upstream.next_subscription():x}"
            self._announced = upstream.head
            self._send({"jsonrpc": "2.0", "id": body["id"], "result": self._subscription})
            self._look_later()
            return
        calls = body if isinstance(body, list) else [body]
        methods = ",".join(call["method"] for call in calls)
        fault = upstream.draw_fault()
        if fault:
            upstream.failed(f"reply {fault}", methods)
        if fault == "hang":
            return
        if fault == "hang_up":
            self._transport.close()
            return
        if fault in ("http_500", "http_429", "overloaded"):
            replies = [{"jsonrpc": "2.0", "id": call["id"], "error": OVERLOADED} for call in calls]
        else:
            replies = [upstream.answer(call, self._transport, asked.seen) for call in calls]
            if not fault and methods == "eth_chainId" and upstream.now_s - asked.at_s < PROMPT_S:
                upstream.named_chain(self._transport)
            upstream.history.note(upstream.name, f"answers {methods} on a socket")
        self._reply(replies if isinstance(body, list) else replies[0], fault)

    def _reply(self, reply: Any, fault: str) -> None:
        if fault == "reply_lost":
            self._transport.close()
        elif fault == "cut_off":
            data = frame_of(orjson.dumps(reply))
            self._transport.write(data[: self._upstream.rng.randint(1, len(data) - 1)])
            self._transport.close()
        elif fault == "garbage":
            self._transport.write(frame_of(b'{"jsonrpc":"2.0","id":1,"resu'))
        elif fault == "foreign":
            self._send(foreign_to(reply))
        else:
            self._send(reply)
            if fault == "twice":
                self._send(reply)

    def _send(self, message: Any) -> None:
        self._transport.write(frame_of(orjson.dumps(message)))

    # Announcements

    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(LOOKS_EVERY_S, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._transport.is_closing():
            return
        upstream = self._upstream
        head = upstream.head
        if head is not self._announced and not upstream.is_silent and not upstream.is_paused:
            fault = upstream.draw_stream_fault()
            if fault == "stream closed":
                self._transport.write(frame_of(b"\x03\xe9", CLOSE))
                self._transport.close()
                return
            if fault == "stream mute":
                self._is_mute = True
            if not self._is_mute:
                self._announce(head, twice=fault == "stream repeats")
            self._announced = head
        self._look_later()

    def _announce(self, head: Block, *, twice: bool) -> None:
        blocks: list[Block] = []
        block: Block | None = head
        while block is not None and not block.is_on(self._announced):
            blocks.append(block)
            block = block.parent
        self._upstream.reports(head.number, self._transport.asker[0])
        for each in reversed(blocks or [head]):
            params = {"subscription": self._subscription, "result": self._upstream.shown_head(each)}
            for _ in range(2 if twice else 1):
                self._send({"jsonrpc": "2.0", "method": "eth_subscription", "params": params})
