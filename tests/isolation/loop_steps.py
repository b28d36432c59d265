"""Measures the longest step of the event loop, in CPU time of its thread, so that a busy machine does not count.

CPU time itself depends on the machine: a core that shares its units with a busy one takes up to twice as long for the same
work. So times are divided by the time that a known piece of work takes just then, relative to a quiet core.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import time
from collections.abc import Iterator

import orjson

from tests.http_client import Reply

# No step of a worker's loop may take longer, whatever one client sends.
LONGEST_STEP_S = 0.005
# What the known piece of work takes on a quiet core of the machine for which the bounds were set.
QUIET_S = 0.0011
_WORK = orjson.dumps([{"address": f"0x{number:040x}", "value": number} for number in range(200)])


class LoopSteps:
    """While it runs, one callback in each turn of the loop notes how much the turn has cost."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._last_s = time.thread_time()
        self._runs = True

    def __repr__(self) -> str:
        return f"<LoopSteps longest {self.longest_s * 1e3:.2f} ms>"

    def _tick(self) -> None:
        if not self._runs:
            return
        now_s = time.thread_time()
        self.longest_s = max(self.longest_s, now_s - self._last_s)
        self._last_s = now_s
        asyncio.get_running_loop().call_soon(self._tick)

    @classmethod
    @contextlib.contextmanager
    def measured(cls) -> Iterator[LoopSteps]:
        """A worker collects garbage rarely and never looks at what was there at its start: neither does this."""
        gc.collect()
        gc.freeze()
        gc.disable()
        steps = cls()
        steps._tick()
        try:
            yield steps
        finally:
            steps._runs = False
            gc.enable()
            steps.longest_s /= slowness()


def slowness() -> float:
    """How many times slower than a quiet core this one is at the moment, at least 1. Another thread or process may disturb one
    measurement, so the shortest of several counts."""
    return max(1.0, min(_known_work_s() for _ in range(5)) / QUIET_S)


def _known_work_s() -> float:
    """Work like that of a worker: it parses JSON, and makes numbers, texts and tables of them."""
    began_s = time.thread_time()
    for _ in range(2):
        found: dict[object, object] = {}
        for each in orjson.loads(_WORK):
            found[each["address"].lower()] = int(each["address"], 16) + each["value"]
        for number in range(4000):
            found[number] = str(number)
    return time.thread_time() - began_s


async def send_apart(port: int, raw: bytes) -> Reply:
    """Send a request from another thread: the client's own work is not the loop's."""
    return await asyncio.to_thread(_send, port, raw)


def _send(port: int, raw: bytes) -> Reply:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        # The service may answer and close before it has read everything.
        with contextlib.suppress(ConnectionError):
            connection.sendall(raw)
        read = b""
        while b"\r\n\r\n" not in read:
            if not (part := connection.recv(1 << 20)):
                raise ConnectionResetError
            read += part
        head, _, body = read.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        while len(body) < int(headers.get("content-length", 0)):
            body += connection.recv(1 << 20)
        return Reply(int(lines[0].split(" ")[1]), headers, body)
