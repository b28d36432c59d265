"""How many sockets and subscriptions each account has open, over all workers of a host.

Every worker writes only its own numbers, in a region that it claims when it starts, and reads those of the others. The numbers
of a worker that was killed are not counted: a region whose owner has ended is skipped, and its next owner clears it. Numbers
are found by the account's bucket index (`BucketRates.bucket_index`).
"""

from __future__ import annotations

import mmap
import os
from typing import Literal

from proxy.store.shared_memory.robust_mutexes import Mutex, holding

# The most processes at once: during a reload a host has twice its workers.
PROCESSES = 128
# The memory is sparse: only pages of accounts with open sockets exist. Accounts beyond this share numbers.
BUCKETS = 1 << 20
REGION_BYTES = BUCKETS * 8
OWNER_BYTES = PROCESSES * 8

CountKind = Literal["sockets", "subscriptions"]
_PLACES: dict[CountKind, int] = {"sockets": 0, "subscriptions": 1}


class AccountCounts:
    """One process's view of the counts. `start` is where the regions begin in the file."""

    def __init__(self, fd: int, start: int, owners: memoryview, mutexes: list[Mutex]) -> None:
        self._fd = fd
        self._start = start
        self._owners = owners.cast("q")
        self._mutexes = mutexes
        self._regions: dict[int, memoryview[int]] = {}
        self._own = -1

    def __repr__(self) -> str:
        return f"<AccountCounts region {self._own}>"

    def take(self, kind: CountKind, bucket_index: int, most: int) -> int:
        """Count one more and return how many there are, or 0 if the account has as many already."""
        own = self._region(self._claimed())
        with holding(self._mutexes[bucket_index % len(self._mutexes)]):
            total = self.total(kind, bucket_index)
            if total >= most:
                return 0
            own[_place(kind, bucket_index)] += 1
            return total + 1

    def give_back(self, kind: CountKind, bucket_index: int) -> None:
        self._region(self._claimed())[_place(kind, bucket_index)] -= 1

    def total(self, kind: CountKind, bucket_index: int) -> int:
        place = _place(kind, bucket_index)
        return sum(self._region(index)[place] for index in range(PROCESSES) if self._is_owned(index))

    def _is_owned(self, index: int) -> bool:
        owner = self._owners[index]
        return owner != 0 and (index == self._own or _is_running(owner))

    def _claimed(self) -> int:
        if self._own < 0:
            with holding(self._mutexes[0]):
                self._own = self._claim()
        return self._own

    def _claim(self) -> int:
        """The first region without a living owner, cleared."""
        index = next(index for index in range(PROCESSES) if not self._is_owned(index))
        if self._owners[index]:
            self._map(index).madvise(mmap.MADV_REMOVE)
        self._owners[index] = os.getpid()
        return index

    def _region(self, index: int) -> memoryview[int]:
        region = self._regions.get(index)
        if region is None:
            region = self._regions[index] = memoryview(self._map(index)).cast("I")
        return region

    def _map(self, index: int) -> mmap.mmap:
        return mmap.mmap(self._fd, REGION_BYTES, offset=self._start + index * REGION_BYTES)


def _place(kind: CountKind, bucket_index: int) -> int:
    return bucket_index % BUCKETS * 2 + _PLACES[kind]


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
