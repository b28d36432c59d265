"""Compiles the hot path while the service runs, once for each version, if this machine has the tools for it.

The compiler runs at the lowest priority, and one at a time for each user of the machine. Processes that start afterwards use
the result. Without the tools the service runs from its sources, which one line of the log says.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from proxy import compiled
from proxy.tasks import send_signal

log = logging.getLogger("penstock.compiler")

COMMAND = ("nice", "-n", "19", sys.executable, "-m", "proxy", "compile")


async def compile_once() -> bool:
    """Return whether there is a compiled form now that this process does not use."""
    if compiled.in_use() or compiled.SOURCE_ONLY in os.environ:
        return False
    with _lock() as is_first:
        if not is_first:
            return False
        code, output = await _run()
    if code:
        log.info("running from the sources", extra={"reason": (output.strip().splitlines() or ["no reason given"])[0]})
        return False
    log.info("the hot path is compiled")
    return True


async def _run() -> tuple[int, str]:
    try:
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=compiled.ROOT.parent,
            start_new_session=True,
        )
    except OSError as exc:
        return 1, str(exc)
    try:
        output, _ = await process.communicate()
    finally:
        # If this service stops, so does the compiler with all that it started.
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            send_signal(process, signal.SIGKILL)
    return process.returncode or 0, output.decode("utf-8", "replace")


@contextmanager
def _lock() -> Iterator[bool]:
    path = Path(tempfile.gettempdir(), f"penstock-compile-{os.getuid()}.lock")
    with os.fdopen(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600), "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
