"""The fork server and the processes that it starts, seen from the supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import BinaryIO

import msgspec

from proxy.processes.fork_server import FAILED, MAX_MESSAGE, READY, RETIRE, ForkRequest
from proxy.tasks import send_signal

# Importing the code takes about a second.
READY_TIMEOUT_S = 60.0
# A fork takes milliseconds. A server that needs longer than this is replaced.
ANSWER_TIMEOUT_S = 20.0


class ForkedProcess:
    """A process that the server has started; the supervisor is not its parent. Call `watch` once. The pidfd identifies the
    process even after its number was given to another one."""

    def __init__(self, pid: int, pidfd: int, stdin: asyncio.WriteTransport, stdout: asyncio.StreamReader) -> None:
        self.pid = pid
        self.stdout = stdout
        self._stdin = stdin
        self._pidfd = pidfd
        self._ended = asyncio.Event()

    def __repr__(self) -> str:
        return f"<ForkedProcess {self.pid} {'ended' if self.has_ended else 'running'}>"

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def watch(self) -> None:
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        # The first process of a container inherits the children of a fork server that has died.
        with suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        self._stdin.close()
        self._ended.set()

    async def wait(self) -> None:
        await self._ended.wait()

    def write(self, data: bytes) -> None:
        self._stdin.write(data)

    def send_signal(self, number: int) -> None:
        if not self.has_ended:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)


class ForkServerLost(Exception):
    """The fork server did not start, has ended, or does not answer."""


class ForkServerProcess:
    """Make one request at a time. Call `retire` and, when its processes have ended, `end`."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process = process
        self._control = control
        # Answers to expect, including those to requests that were cancelled. The first says that the server is ready.
        self._due = 1

    def __repr__(self) -> str:
        return f"<ForkServerProcess {self._process.pid} {'ended' if self.has_ended else 'running'}>"

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def ready(self) -> None:
        message, _ = await self._answer(READY_TIMEOUT_S)
        if message != READY:
            raise ForkServerLost("the fork server is of another version")

    async def fork(self, request: ForkRequest, stderr: BinaryIO | None) -> ForkedProcess:
        """Raises OSError if the system does not allow another process."""
        with ExitStack() as stack:
            stdin, stdout, *theirs = map(stack.enter_context, _pipes())
            streams = [*theirs, stderr] if stderr else theirs
            message, fds = await self._ask(msgspec.json.encode(request), [each.fileno() for each in streams])
            if message.startswith(FAILED):
                raise OSError(message.removeprefix(FAILED).decode())
            for each in theirs:
                each.close()
            stack.pop_all()
        return await _connected(int(message), fds[0], stdin, stdout)

    async def retire(self) -> None:
        """Let the server end after its processes, and close the listening sockets that it holds."""
        await self._ask(RETIRE)

    async def end(self) -> None:
        """Close the connection: a server without processes ends at once."""
        self._control.close()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """End a server that may have processes. If it saw the end of the connection, it would end them too."""
        send_signal(self._process, signal.SIGKILL)
        await self._process.wait()
        self._control.close()

    async def _ask(self, data: bytes, fds: Sequence[int] = ()) -> tuple[bytes, list[int]]:
        try:
            socket.send_fds(self._control, [data], fds)
        except OSError as exc:
            raise ForkServerLost(str(exc)) from None
        self._due += 1
        return await self._answer(ANSWER_TIMEOUT_S)

    async def _answer(self, within_s: float) -> tuple[bytes, list[int]]:
        try:
            async with asyncio.timeout(within_s):
                while True:
                    message, fds = await self._next()
                    self._due -= 1
                    if not self._due:
                        return message, fds
                    for fd in fds:
                        os.close(fd)
        except TimeoutError:
            raise ForkServerLost("the fork server does not answer") from None

    async def _next(self) -> tuple[bytes, list[int]]:
        await _readable(self._control)
        try:
            message, fds, _, _ = socket.recv_fds(self._control, MAX_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as exc:
            raise ForkServerLost(str(exc)) from None
        if not message:
            raise ForkServerLost("the fork server has ended")
        return message, fds


async def start_fork_server(
    modules: Sequence[str], *, fds: Sequence[int], environment: Mapping[str, str], stderr: BinaryIO | None
) -> ForkServerProcess:
    """Start a server that has imported the modules. Raises ForkServerLost if it does not start."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with theirs:
        files = ("--control-fd", str(theirs.fileno()), "--fds", *map(str, fds))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "proxy", "preload", *modules, *files),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=(theirs.fileno(), *fds),
            env=environment,
            start_new_session=True,
        )
    server = ForkServerProcess(process, ours)
    try:
        await server.ready()
    except BaseException:
        await server.end()
        raise
    return server


def _pipes() -> tuple[BinaryIO, BinaryIO, BinaryIO, BinaryIO]:
    """The supervisor's ends of a process's standard input and output, and then those of the process."""
    stdin, ours_in = os.pipe()
    ours_out, stdout = os.pipe()
    return (
        os.fdopen(ours_in, "wb", 0),
        os.fdopen(ours_out, "rb", 0),
        os.fdopen(stdin, "rb", 0),
        os.fdopen(stdout, "wb", 0),
    )


async def _connected(pid: int, pidfd: int, stdin: BinaryIO, stdout: BinaryIO) -> ForkedProcess:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    writing, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, stdin)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), stdout)
    process = ForkedProcess(pid, pidfd, writing, reader)
    process.watch()
    return process


async def _readable(control: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(control, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(control)
