"""The newest poll of each upstream, in memory that the processes of a host share.

The rank of a name (name_table) is the time at which its poll was written: the oldest one makes room for a new name.

There are no locks. Every record has a checksum, so one that is half written, because two processes write it at once or its
writer was killed, is not read. The next poll replaces it.
"""

from __future__ import annotations

import struct
import time
from typing import Literal
from zlib import crc32

import msgspec

from proxy.core.upstream_health import Standing
from proxy.store.shared_memory import name_table
from proxy.store.shared_memory.growing_file import map_part
from proxy.store.shared_memory.name_table import NameTable

SETS = 256
RECORD_BYTES = 512
# The number of changes, in a cache line before the records.
_COUNTER_BYTES = 64
TABLE_BYTES = _COUNTER_BYTES + name_table.bytes_of(SETS, RECORD_BYTES)
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
        self.names = NameTable(self.records, RECORD_BYTES, _FORMAT)

    def __repr__(self) -> str:
        return f"<PollTable after {self.changes} changes>"

    @property
    def changes(self) -> int:
        return self._counter[0]

    def count_change(self) -> None:
        """Two processes that count at once may count once. A process that reads in between sees the second poll after the next
        change."""
        self._counter[0] += 1

    def record(self, name: str) -> PollRecord:
        return PollRecord(self, name)


class PollRecord:
    """The record of one name."""

    def __init__(self, table: PollTable, name: str) -> None:
        self._table = table
        self._memory = table.records
        self._tag = table.names.tag_of(name)
        # The index at which it was last found.
        self._index = table.names.lowest(self._tag)
        # The checksum of the poll that was last read.
        self._seen = 0

    def __repr__(self) -> str:
        return f"<PollRecord at {self._index}>"

    def news(self) -> HeadPoll | None:
        """The poll, if it has changed since the last call."""
        if not self._is_found():
            return None
        _, _, checksum, length = _HEADER.unpack_from(self._memory, self._index * 8)
        if checksum == self._seen:
            return None
        start = self._index * 8 + _HEADER.size
        content = bytes(self._memory[start : start + min(length, ROOM)])
        if crc32(content) != checksum:
            return None
        self._seen = checksum
        return _decode(content)

    def write(self, poll: HeadPoll) -> None:
        """Write the poll. One that does not fit, because its hashes are not valid hashes, is left out: the other processes then
        poll for themselves."""
        content = _encode(poll)
        if len(content) > ROOM:
            return
        if not self._is_found():
            self._index = self._table.names.lowest(self._tag)
        start = self._index * 8
        _HEADER.pack_into(self._memory, start, self._tag, time.monotonic(), crc32(content), len(content))
        self._memory[start + _HEADER.size : start + _HEADER.size + len(content)] = content
        self._table.count_change()

    def _is_found(self) -> bool:
        """Look for the record, wherever it is now."""
        names = self._table.names
        if names.has(self._index, self._tag):
            return True
        index = names.find(self._tag)
        if index >= 0:
            self._index = index
        return index >= 0
