"""A worker process, from reading its settings to its drain."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, NamedTuple

import orjson
import uvloop

from proxy import settings as settings_room
from proxy import telemetry
from proxy.compose.app import App, preload_files
from proxy.compose.fleet import buckets_of
from proxy.errors import Unavailable
from proxy.processes import garbage_collection
from proxy.processes.control_messages import CERTIFICATES, LEAVING, UNATTENDED, ControlMessages
from proxy.processes.listening_sockets import ListeningSockets
from proxy.processes.slow_steps import SlowSteps
from proxy.processes.supervised_process import BEAT, BEAT_S, READY, STOP_GRACE_S
from proxy.settings import Certificates, Settings, Tables
from proxy.store.postgres.local_copy import CopyDirectory
from proxy.store.shared_memory.host_memory import HostMemory
from proxy.tasks import Tasks, unless_stopped

STDIN, STDOUT = 0, 1
# How long a thread may run while the event loop waits for the interpreter.
SWITCH_S = 0.0002
# Options of glibc's allocator, and what it sets them to by itself once an 8 MB body was freed.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES, MAPPED_FROM_BYTES = 16 << 20, 8 << 20


class SharedFiles(NamedTuple):
    """The descriptors of the memory that the processes of a host share."""

    buckets: int
    memory: int


def preload() -> None:
    settings_room.preload()
    preload_files()


def main(sockets: ListeningSockets, shared: SharedFiles, *, alone: bool, copies: CopyDirectory | None) -> int:
    memory = HostMemory(shared.memory)

    def build(settings: Settings, tables: Tables) -> App:
        certificates = Certificates.of_line(_next_line()) if settings.server.tls.is_used else None
        buckets = buckets_of(settings, shared.buckets, memory, alone=alone)
        return App(settings, tables, buckets, copies=copies, memory=memory, certificates=certificates)

    return run_child(lambda settings, tables: _serve(sockets, lambda: build(settings, tables)))


def run_child(run: Callable[[Settings, Tables], Coroutine[Any, Any, None]]) -> int:
    """Run a process of the supervisor: read its settings, start its log, run its event loop."""
    line = _next_line()
    if not line.endswith(b"\n"):  # The supervisor ended before it sent the settings.
        return 0
    telemetry.start_metrics()
    settings = settings_room.from_tree(orjson.loads(line))
    tables = settings_room.tables_for(settings)
    listener = telemetry.start_logging(settings.log.level)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(settings, tables))
    finally:
        listener.stop()
    return 0


def _next_line() -> bytes:
    """Read a line from standard input, byte by byte: the loop must still see the end of file that follows."""
    line = bytearray()
    while not line.endswith(b"\n") and (byte := os.read(STDIN, 1)):
        line += byte
    return bytes(line)


async def _serve(sockets: ListeningSockets, build: Callable[[], App]) -> None:
    app = build()
    lines = ControlMessages(
        {
            UNATTENDED: sockets.set_unattended,
            CERTIFICATES: lambda line: app.renew_certificates(Certificates.of_line(line)),
            LEAVING: lambda _: app.leave(),
        }
    )
    stop = watch_supervisor(app.settings, lines.feed)
    if not await unless_stopped(stop, _start(app, sockets.own())):
        await app.pool.close()
        return
    accepting = Tasks()
    accepting.start("accept for others", lambda: sockets.accept_for_others(app.accept_from))
    report_ready(app.tasks)
    watch_steps(app.settings, "worker")
    await stop.wait()
    await accepting.close()
    sockets.close_others()
    await app.stop()


async def _start(app: App, listener: socket.socket) -> bool:
    """Start the app, waiting for a database that is still starting. The supervisor enforces the deadline."""
    while True:
        try:
            await app.start(listener)
            return True
        except Unavailable:
            await app.pool.close()
            await asyncio.sleep(0.5)


def report_ready(tasks: Tasks) -> None:
    """Report to the supervisor that this process is ready, and from then on that its event loop runs."""
    garbage_collection.take_over()
    keep_freed_memory()
    yield_often()
    os.set_blocking(STDOUT, False)
    os.write(STDOUT, READY)
    tasks.start("heartbeat", _beat)
    tasks.start("collect garbage", garbage_collection.collect_rarely)


def keep_freed_memory() -> None:
    """Let the allocator keep what large bodies and results leave free. It gives more than 128 KB at the heap's end back to the
    kernel until a larger block happens to be freed, and until then each body of 100 KB costs a fifth more CPU for new pages."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc alone has it
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_MMAP_THRESHOLD, MAPPED_FROM_BYTES)


def yield_often() -> None:
    """Let threads that format exports and charts give way to the event loop soon. By default each keeps the interpreter for 5
    ms at a time, which would delay the calls of every client."""
    sys.setswitchinterval(SWITCH_S)


def watch_steps(settings: Settings, name: str) -> None:
    """Log slow steps of this process, if the operator asked for that."""
    if settings.log.slow_step_ms:
        SlowSteps(asyncio.get_running_loop(), settings.log.slow_step_ms, name).watch()


async def _beat() -> None:
    while True:
        await asyncio.sleep(BEAT_S)
        # The pipe of a supervisor that does not read may be full.
        with suppress(OSError):
            os.write(STDOUT, BEAT)


def watch_supervisor(settings: Settings, hear: Callable[[bytes], None] | None = None) -> asyncio.Event:
    """Return an event that is set when the supervisor sends SIGTERM or ends. `hear` gets all bytes written until then."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The supervisor handles Ctrl-C.
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    os.set_blocking(STDIN, False)
    loop.add_reader(STDIN, _on_stdin, stop, settings.server.drain_s + STOP_GRACE_S, hear)
    return stop


def _on_stdin(stop: asyncio.Event, within_s: float, hear: Callable[[bytes], None] | None) -> None:
    """At end of file, stop, and set a timer that kills the process if the drain hangs: the supervisor is gone."""
    if data := os.read(STDIN, 4096):
        if hear is not None:
            hear(data)
    else:
        asyncio.get_running_loop().remove_reader(STDIN)
        signal.setitimer(signal.ITIMER_REAL, within_s)
        stop.set()
