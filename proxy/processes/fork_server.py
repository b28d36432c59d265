"""The fork server: a process that has imported the modules of the supervisor's processes, and forks them.

A fork starts in milliseconds and shares the memory of the imported code. The server holds code and nothing else: no settings,
no threads, no event loop, no connections. The supervisor replaces it before each reload, so new processes run new code.

It is the parent of what it forks, and outlives the supervisor for a moment: processes that should have ended by then, and have
not, are killed. This includes those that are stopped or hang.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

# Messages on the connection to the supervisor, besides requests and process ids. After FAILED follows the reason.
READY, RETIRE, FAILED = b"ready", b"retire", b"failed: "
MAX_MESSAGE = 1 << 16
# Standard input, output and, if the supervisor has a log file, standard error of a process.
MAX_STREAMS = 3
# Names the directory in which prometheus-client creates a file for each process.
METRICS = "PROMETHEUS_MULTIPROC_DIR"
# The places of `arg_start` and `arg_end` in /proc/self/stat, after the name of the program.
ARGUMENTS = slice(45, 47)


class ForkRequest(msgspec.Struct, frozen=True):
    """A process to fork. Its standard streams come with the message."""

    words: list[str]
    # Which of the server's inherited files the process keeps.
    fds: list[int]
    # How long the process may run after the supervisor has ended.
    grace_s: float


def preload(modules: Iterable[str]) -> None:
    """Import the modules, let each preload its data, and exclude all of it from garbage collections, which would write to the
    shared memory.

    Metrics create files when they are imported. Those of this process are removed: it counts nothing.
    """
    gc.disable()
    directory = os.environ[METRICS]
    with TemporaryDirectory(dir=directory) as unused:
        os.environ[METRICS] = unused
        for name in modules:
            import_module(name).preload()
    os.environ[METRICS] = directory
    gc.collect()
    gc.freeze()
    gc.enable()


class ForkServer:
    """Forks one process for each request. Single-threaded, because a fork copies only the thread that calls it."""

    def __init__(self, control: socket.socket, inherited: Sequence[int]) -> None:
        """`inherited`: the files that processes may keep. They have the same numbers in the supervisor."""
        self._control = control
        self._inherited = set(inherited)
        # The running processes, by pidfd: their ids and how long they may outlive the supervisor.
        self._children: dict[int, tuple[int, float]] = {}
        self._poll = select.poll()
        self._is_retired = False
        self._ends_at = float("inf")

    def __repr__(self) -> str:
        return f"<ForkServer {len(self._children)} processes{', retired' if self._is_retired else ''}>"

    def run(self) -> list[str] | None:
        """Serve requests. Returns the command in every forked process, and None in the server when it ends."""
        self._poll.register(self._control, select.POLLIN)
        self._answer(READY)
        while not self._is_over():
            for fd, _ in self._poll.poll(self._wait_ms()):
                if fd != self._control.fileno():
                    self._reap(fd)
                elif words := self._on_message():
                    return words
        self._kill_rest()
        return None

    def _is_over(self) -> bool:
        return (self._is_retired and not self._children) or time.monotonic() > self._ends_at

    def _wait_ms(self) -> float | None:
        return None if self._ends_at == float("inf") else max(0.0, self._ends_at - time.monotonic()) * 1000 + 1

    def _on_message(self) -> list[str] | None:
        data, streams = self._received()
        if not data:
            self._on_lost_supervisor()
        elif data == RETIRE:
            self._retire()
            self._answer(RETIRE)
        else:
            request = msgspec.json.decode(data, type=ForkRequest)
            if self._fork(request, streams):
                return request.words
            for fd in streams:
                os.close(fd)
        return None

    def _retire(self) -> None:
        """Fork no more, and end after the last process. Open listening sockets would keep clients waiting."""
        self._is_retired = True
        for fd in self._inherited:
            os.close(fd)
        self._inherited.clear()

    def _on_lost_supervisor(self) -> None:
        self._poll.unregister(self._control)
        self._retire()
        self._ends_at = time.monotonic() + max((grace_s for _, grace_s in self._children.values()), default=0.0)

    def _fork(self, request: ForkRequest, streams: Sequence[int]) -> bool:
        """Return whether this is the new process."""
        try:
            pid = os.fork()
        except OSError as exc:  # the limit on processes, or no memory
            self._answer(FAILED + (exc.strerror or str(exc)).encode())
            return False
        if not pid:
            self._become(request, streams)
            return True
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = pid, request.grace_s
        self._poll.register(pidfd, select.POLLIN)
        self._answer(str(pid).encode(), pidfd)
        return False

    def _received(self) -> tuple[bytes, list[int]]:
        """The next message; an empty one if the supervisor has ended, also if it left an answer unread."""
        try:
            data, streams, _, _ = socket.recv_fds(self._control, MAX_MESSAGE, MAX_STREAMS)
        except ConnectionError:
            return b"", []
        return data, streams

    def _answer(self, message: bytes, *fds: int) -> None:
        """The next read shows if the supervisor has ended."""
        with suppress(ConnectionError):
            socket.send_fds(self._control, [message], fds)

    def _become(self, request: ForkRequest, streams: Sequence[int]) -> None:
        """Drop everything that a process started without the fork server would not have."""
        os.setsid()
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
        for fd in (*streams, *self._children, *self._inherited.difference(request.fds)):
            os.close(fd)
        self._control.close()
        show_command(request.words)

    def _reap(self, pidfd: int) -> None:
        pid, _ = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        os.waitpid(pid, 0)

    def _kill_rest(self) -> None:
        for pidfd in self._children:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def show_command(words: Sequence[str]) -> None:
    """Let `ps` show this process with its own command, as far as that fits into the memory of the server's."""
    start, end = map(int, Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[ARGUMENTS])
    line = "\0".join((*sys.orig_argv[:3], *words)).encode()
    ctypes.memmove(start, line[: end - start - 1].ljust(end - start, b"\0"), end - start)
