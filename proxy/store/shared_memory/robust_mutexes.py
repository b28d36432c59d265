"""Mutexes in memory that several processes share.

They are POSIX robust and process-shared: if a holder is killed, the kernel passes the lock on and the next lock call returns
EOWNERDEAD. The calls go through PyDLL, which keeps the GIL: a lock is held for about a microsecond and never across an await.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

# One cache line per mutex: pthread_mutex_t takes 40 bytes on x86-64 and 48 on aarch64.
STRIPE_BYTES = 64

_PROCESS_SHARED = 1
_ROBUST = 1

_libc = ctypes.PyDLL(None)
lock = _libc.pthread_mutex_lock
unlock = _libc.pthread_mutex_unlock
Mutex = ctypes.Array[ctypes.c_char]


def initialise(memory: mmap.mmap, count: int) -> None:
    """Create mutexes at the start of new memory."""
    attributes = ctypes.create_string_buffer(64)
    _libc.pthread_mutexattr_init(attributes)
    _libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED)
    _libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
    for mutex in mutexes_of(memory, count):
        if failed := _libc.pthread_mutex_init(mutex, attributes):
            raise OSError(failed, os.strerror(failed))


def mutexes_of(memory: mmap.mmap, count: int) -> list[Mutex]:
    kind = ctypes.c_char * STRIPE_BYTES
    return [kind.from_buffer(memory, stripe * STRIPE_BYTES) for stripe in range(count)]


def adopt(mutex: Mutex, held: int) -> None:
    """Recover a mutex whose holder was killed. This process holds it now."""
    if held != errno.EOWNERDEAD:
        raise OSError(held, os.strerror(held))
    _libc.pthread_mutex_consistent(mutex)


@contextmanager
def holding(mutex: Mutex) -> Iterator[None]:
    if held := lock(mutex):
        adopt(mutex, held)
    try:
        yield
    finally:
        unlock(mutex)
