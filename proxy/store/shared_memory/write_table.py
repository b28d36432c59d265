"""The upstream that has received each recent write, in memory that the processes of a host share.

The rank of a name (name_table) is the time at which its write was noted: the oldest one makes room for a new name.

There are no locks. The id of the upstream is stored combined with the tag of the name, so a process that reads an entry which
two others write at once finds an id that no upstream has.
"""

from __future__ import annotations

from typing import Final

from proxy.store.shared_memory import name_table
from proxy.store.shared_memory.growing_file import map_part
from proxy.store.shared_memory.name_table import RANK, NameTable

# 262,144 names: 2,000 writes per second, with a transaction and a sender each, for a minute. With more, the oldest are
# forgotten earlier, and reads about them go to any upstream.
SETS: Final = 32_768
# The tag, the rank, the id, and room to make it a power of two.
ENTRY_BYTES: Final = 32
TABLE_BYTES: Final = name_table.bytes_of(SETS, ENTRY_BYTES)
_UPSTREAM_ID: Final = 2
# Longer than blocks take on most chains. After that, upstreams have exchanged the write or have it in a block.
KEPT_S: Final = 60.0


class WriteTable:
    """One process's view of the table."""

    def __init__(self, fd: int, start: int) -> None:
        memory = memoryview(map_part(fd, start, TABLE_BYTES))
        self._upstream_ids = memory.cast("Q")
        self._names = NameTable(memory, ENTRY_BYTES, b"write 1")

    def __repr__(self) -> str:
        return f"<WriteTable {self._names!r}>"

    def tag_of(self, name: str) -> int:
        return self._names.tag_of(name)

    def note(self, tag: int, upstream_id: int, now: float) -> None:
        """An upstream has received a write of this name."""
        index = self._names.claim(tag)
        self._upstream_ids[index + _UPSTREAM_ID] = upstream_id ^ tag
        self._names.ranks[index + RANK] = now

    def find(self, tag: int, now: float) -> int:
        """The id of the upstream that has received the last write of this name; 0 if there was none lately."""
        index = self._names.find(tag)
        if index < 0 or now - self._names.ranks[index + RANK] > KEPT_S:
            return 0
        return self._upstream_ids[index + _UPSTREAM_ID] ^ tag
