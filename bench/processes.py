"""Child processes of the bench: each pinned to given cores, in its own session, and always stopped."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class StartFailed(Exception):
    """A candidate did not start. The message gives the reason; the run continues without it."""


class Child:
    """A running program. `stop` ends its whole process group."""

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    def __repr__(self) -> str:
        return f"Child({self.name}, pid={self.process.pid}, returncode={self.process.returncode})"

    @property
    def pid(self) -> int:
        return self.process.pid

    def fault(self) -> str | None:
        """Exit status and last line of output if it has exited, else None."""
        if self.process.poll() is None:
            return None
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"exited with {self.process.returncode}: {lines[-1].strip() if lines else 'no output'}"

    def stop(self, *, grace_s: float = 10.0) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # start() made it a group leader
        self.process.wait()


def start(
    name: str,
    argv: list[str],
    *,
    cpus: Iterable[int],
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Child:
    """Start a program on the given cores, with its output in a log file."""
    wanted = set(cpus)

    def prepare() -> None:
        os.sched_setaffinity(0, wanted)
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # ends with the bench, even if that is killed

    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                cwd=cwd,
                start_new_session=True,
                preexec_fn=prepare,
            )
    except OSError as error:
        raise StartFailed(f"{argv[0]}: {error.strerror}") from error
    return Child(name, process, log)


def free_port() -> int:
    """Return an unused port, for programs that cannot bind port 0 and report the result."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_listening(child: Child, port: int, *, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if fault := child.fault():
            raise StartFailed(fault)
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    raise StartFailed(f"did not listen within {timeout_s:.0f} s")
