"""Maps a part of an anonymous file that processes share, and lengthens the file if it ends before that part."""

from __future__ import annotations

import fcntl
import mmap
import os


def map_part(fd: int, start: int, size: int) -> mmap.mmap:
    """The file only grows. Record locks, not flock: the processes share one open file description."""
    fcntl.lockf(fd, fcntl.LOCK_EX)
    try:
        if os.fstat(fd).st_size < start + size:
            os.ftruncate(fd, start + size)
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)
    return mmap.mmap(fd, size, offset=start)
