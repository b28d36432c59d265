"""A TCP proxy between the service and a real upstream that injects faults, switched at run time.

It parses just enough HTTP to find the end of a message, so that a fault can be placed precisely: instead of a reply, in the
middle of one, or in one number of it.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal, get_args

import orjson

Mode = Literal[
    "pass", "dead", "black_hole", "slow", "reset", "garbage", "half", "high_head", "low_head", "lagging", "false_hash",
    "range_limit",
]  # fmt: skip
MODES: tuple[Mode, ...] = get_args(Mode)
# How far a false head is from the real one, in blocks.
HEAD_OFFSET = 1000
# The most blocks of a range in mode "range_limit", and geth's words for it.
MAX_RANGE = 10
_REFUSAL = {"code": -32602, "message": f"exceed maximum block range {MAX_RANGE}"}

# The calls that return the head: a method, and the first of its params.
_HEAD_CALLS: tuple[tuple[str, list[str]], ...] = (("eth_blockNumber", []), ("eth_getBlockByNumber", ["latest"]))
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
# Not HTTP; not JSON; not a JSON-RPC reply; a reply to another call; no result and no error; an HTTP error; two lengths; binary.
_GARBAGE = (
    b"SSH-2.0-OpenSSH_9.2p1\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 22\r\n\r\n<html>not here</html>\r\n",
    b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n["no reply",1]'[:-1],
    b'HTTP/1.1 200 OK\r\nContent-Length: 52\r\n\r\n{"jsonrpc":"2.0","id":"not yours","result":"0xdead"}',
    b'HTTP/1.1 200 OK\r\nContent-Length: 24\r\n\r\n{"jsonrpc":"2.0","id":1}',
    b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 11\r\n\r\nbad gateway",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}    ",
    bytes(range(256)),
)


class FaultProxy:
    """A proxy in front of one upstream. The service is configured with its `url`."""

    def __init__(self, target_port: int) -> None:
        self.mode: Mode = "pass"
        self.delay_s = 2.0
        # The bytes of a reply that pass before the connection is reset.
        self.reset_after = 40
        self.port = 0
        # Calls received, whether or not they were forwarded.
        self.methods: Counter[str] = Counter()
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._garbage = itertools.cycle(_GARBAGE)
        self._frozen_head: str | None = None
        self._times: int | None = None

    def __repr__(self) -> str:
        return f"<FaultProxy {self.mode} :{self.port}>"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def switch(self, mode: Mode, *, times: int | None = None) -> None:
        """Switch the mode from the next message on, for `times` messages. In mode "dead" the proxy does not listen, and open
        connections are reset."""
        was, self.mode, self._times = self.mode, mode, times
        if mode != "lagging":
            self._frozen_head = None
        if mode == "dead":
            await self.close()
        elif was == "dead":
            await self.open()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in tuple(self._writers):
            writer.transport.abort()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        target: asyncio.StreamWriter | None = None
        try:
            replies, target = await asyncio.open_connection("127.0.0.1", self._target_port)
            self._writers.add(target)
            while request := await _message(reader):
                self._note(request)
                mode = self._next_mode()
                if mode == "black_hole":
                    continue
                target.write(request)
                reply = await _message(replies)
                if not reply:  # The upstream has closed the connection, which was idle.
                    raise EOFError
                await self._pass_on(mode, request, reply, writer)
        except (OSError, EOFError):
            pass
        except asyncio.CancelledError:
            pass  # Only `close` cancels; asyncio's own callback would log a task that ends cancelled.
        finally:
            self._tasks.discard(task)
            for each in (writer, target):
                if each is not None:
                    self._writers.discard(each)
                    each.close()
                    with suppress(OSError):
                        await each.wait_closed()

    def _note(self, request: bytes) -> None:
        body = _body(request)
        self.methods.update(call["method"] for call in (body if isinstance(body, list) else [body]))

    def _next_mode(self) -> Mode:
        mode = self.mode
        if self._times is not None:
            self._times -= 1
            if self._times == 0:
                self.mode, self._times = "pass", None
        return mode

    async def _pass_on(self, mode: Mode, request: bytes, reply: bytes, writer: asyncio.StreamWriter) -> None:
        match mode:
            case "slow":
                await asyncio.sleep(self.delay_s)
            case "reset":
                writer.write(reply[: self.reset_after])
                await writer.drain()
                writer.transport.abort()
                return
            case "half":
                writer.write(reply[: len(reply) * 3 // 4])
                await writer.drain()
                raise EOFError
            case "garbage":
                reply = next(self._garbage)
            case "high_head" | "low_head" | "lagging":
                reply = self._with_other_head(mode, request, reply)
            case "false_hash":
                reply = _with_false_hash(request, reply)
            case "range_limit":
                reply = _refused_range(request) or reply
            case _:
                pass
        if writer.is_closing():
            raise EOFError  # The client has disconnected.
        writer.write(reply)
        await writer.drain()

    def _with_other_head(self, mode: Mode, request: bytes, reply: bytes) -> bytes:
        """Replace the block number in replies that contain the head."""
        call = _body(request)
        if not isinstance(call, dict) or (call["method"], call["params"][:1]) not in _HEAD_CALLS:
            return reply
        real = _body(reply)
        block = real["result"]
        head = int(block["number"] if isinstance(block, dict) else block, 16)
        if self._frozen_head is None:
            self._frozen_head = hex(head)
        false_heads = {
            "high_head": hex(head + HEAD_OFFSET),
            "low_head": hex(max(head - HEAD_OFFSET, 1)),
            "lagging": self._frozen_head,
        }
        shown = false_heads[mode]
        return _reply(real | {"result": {**block, "number": shown} if isinstance(block, dict) else shown})


def _with_false_hash(request: bytes, reply: bytes) -> bytes:
    """Replace the hash of each block that was asked for by its number."""
    call, real = _body(request), _body(reply)
    if not isinstance(call, dict) or call["method"] != "eth_getBlockByNumber" or not real.get("result"):
        return reply
    block = real["result"]
    return _reply(real | {"result": {**block, "hash": block["hash"][:-8] + "0badbeef"}})


def _refused_range(request: bytes) -> bytes:
    """The refusal of a range of logs, if it is too large. As geth does, refuse ranges that end at a tag."""
    call = _body(request)
    if not isinstance(call, dict) or call["method"] not in ("eth_getLogs", "eth_getFilterLogs"):
        return b""
    query = call["params"][0] if call["method"] == "eth_getLogs" else {"fromBlock": "0x0"}
    first, last = query.get("fromBlock", ""), query.get("toBlock", "latest")
    if "blockHash" in query or (last.startswith("0x") and int(last, 16) - int(first, 16) <= MAX_RANGE):
        return b""
    return _reply({"jsonrpc": "2.0", "id": call["id"], "error": _REFUSAL})


def _body(message: bytes) -> Any:
    return orjson.loads(message.partition(b"\r\n\r\n")[2])


def _reply(content: dict[str, Any]) -> bytes:
    body = orjson.dumps(content)
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


async def _message(reader: asyncio.StreamReader) -> bytes:
    """One complete message of known length; empty at the end of the stream."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""
    length = _LENGTH.search(head)
    return head + await reader.readexactly(int(length[1]) if length else 0)


@asynccontextmanager
async def fault_proxy(target_port: int) -> AsyncIterator[FaultProxy]:
    proxy = FaultProxy(target_port)
    await proxy.open()
    try:
        yield proxy
    finally:
        await proxy.close()
