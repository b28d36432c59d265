"""The newest poll of each upstream, in memory that the processes of a host share.

A record has a name, stored as a 64-bit tag. The table is set-associative: a tag has a few possible places, and the oldest
record makes room for a new name.

There are no locks. Every record has a checksum, so one that is half written, because two processes write it at once or its
writer was killed, is not read. The next poll replaces it.
"""

from __future__ import annotations

import struct
import time
from hashlib import blake2b
from typing import Literal
from zlib import crc32

import msgspec

from proxy.core.upstream_health import Standing
from proxy.store.shared_memory.growing_file import map_part

SETS, WAYS = 256, 8
RECORD_BYTES = 512
# The number of changes, in a cache line before the records.
_COUNTER_BYTES = 64
TABLE_BYTES = _COUNTER_BYTES + SETS * WAYS * RECORD_BYTES
# Processes of another version, whose polls have other fields, have other tags.
_FORMAT = b"poll 1"
# Before the poll itself: its tag, when it was written, its checksum and its length.
_HEADER = struct.Struct("<qdII")
ROOM = RECORD_BYTES - _HEADER.size


class HeadPoll(msgspec.Struct, frozen=True, array_like=True):
    """A poll of one upstream, and the findings of the last one that has ended. All times are of the host's monotonic clock."""

    # The tracker that polls.
    by: int
    began: float
    # The last poll that has ended: when it did, how long the upstream took, and its newest block; -1 for none.
    ended: float = 0.0
    took_s: float = 0.0
    is_silent: bool = False
    head: int = -1
    block_hash: str = ""
    parent_hash: str = ""
    # Empty while nothing is known.
    standing: Standing | Literal[""] = ""
    judged_at: float = 0.0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(HeadPoll).decode


class PollTable:
    """One process's view of the table."""

    def __init__(self, fd: int, start: int) -> None:
        memory = memoryview(map_part(fd, start, TABLE_BYTES))
        self._counter = memory[:8].cast("q")
        self.records = memory[_COUNTER_BYTES:]

    def __repr__(self) -> str:
        return f"<PollTable after {self.changes} changes>"

    @property
    def changes(self) -> int:
        return self._counter[0]

    def count_change(self) -> None:
        """Two processes that count at once may count once. Who reads between them finds the second poll after the next one."""
        self._counter[0] += 1

    def record(self, name: str) -> PollRecord:
        return PollRecord(self, name)


class PollRecord:
    """The record of one name."""

    def __init__(self, table: PollTable, name: str) -> None:
        self._table = table
        self._memory = table.records
        self._tag = _tag(name)
        first = self._tag % SETS * WAYS * RECORD_BYTES
        self._places = range(first, first + WAYS * RECORD_BYTES, RECORD_BYTES)
        self._at = first
        # The checksum of the poll that was last read.
        self._seen = 0

    def __repr__(self) -> str:
        return f"<PollRecord at {self._at}>"

    def news(self) -> HeadPoll | None:
        """The poll, if it has changed since the last call."""
        _, _, checksum, length = self._found() or (0, 0, self._seen, 0)
        if checksum == self._seen:
            return None
        start = self._at + _HEADER.size
        content = bytes(self._memory[start : start + min(length, ROOM)])
        if crc32(content) != checksum:
            return None
        self._seen = checksum
        return _decode(content)

    def write(self, poll: HeadPoll) -> None:
        """Without room for a poll, which then has hashes that are none, the others poll for themselves."""
        content = _encode(poll)
        if len(content) > ROOM:
            return
        if self._found() is None:
            self._at = min(self._places, key=self._written_at)
        _HEADER.pack_into(self._memory, self._at, self._tag, time.monotonic(), crc32(content), len(content))
        self._memory[self._at + _HEADER.size : self._at + _HEADER.size + len(content)] = content
        self._table.count_change()

    def _found(self) -> tuple[int, float, int, int] | None:
        """The header, wherever the record is now."""
        for place in (self._at, *self._places):
            header = _HEADER.unpack_from(self._memory, place)
            if header[0] == self._tag:
                self._at = place
                return header
        return None

    def _written_at(self, place: int) -> float:
        return float(_HEADER.unpack_from(self._memory, place)[1])


def _tag(name: str) -> int:
    """Positive and never 0, which marks an empty place."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8, person=_FORMAT).digest(), "little") >> 1 | 1
