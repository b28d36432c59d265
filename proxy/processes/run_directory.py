"""The directory of a running service: the metrics of its processes, and their copies of what a successor needs.

It is locked (flock) through a file descriptor that every process of the service inherits, so the lock lasts until the last of
them has ended. A killed supervisor leaves its directory behind; the next start removes directories that no process locks.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "penstock-run-"


class RunDirectory:
    """A locked directory that only this user can read. Call `open`, then `remove`."""

    def __init__(self) -> None:
        self.path = Path()
        # Inherited by every process of the service.
        self.lock_fd = -1

    def __repr__(self) -> str:
        return f"<RunDirectory {self.path}>"

    def open(self) -> None:
        """Create the directory, and remove those of services that have ended."""
        for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            _remove_if_unused(left)
        while self.lock_fd < 0:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            self.lock_fd = _locked(self.path, wait=True)

    def remove(self) -> None:
        if self.lock_fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.lock_fd)
            self.lock_fd = -1


def _locked(path: Path, *, wait: bool) -> int:
    """Return a descriptor that holds the lock on this user's directory; -1 if another process has it or has removed it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return -1
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        # Between its creation and this lock, another start may have taken the directory for an unused one.
        if os.fstat(fd).st_uid == os.geteuid() and os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    os.close(fd)
    return -1


def _remove_if_unused(path: Path) -> None:
    if (fd := _locked(path, wait=False)) >= 0:
        shutil.rmtree(path, ignore_errors=True)
        os.close(fd)
