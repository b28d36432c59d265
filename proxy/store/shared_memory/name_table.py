"""Entries by name, in memory that the processes of a host share.

The table is set-associative: a name has a few possible places, and of those the entry with the lowest rank makes room for a
new name. So a flood of names takes no more memory and time.

An entry starts with a 64-bit tag of its name and its rank. The rest is for the owner of the table, who also locks entries if
necessary.
"""

from __future__ import annotations

from hashlib import blake2b

WAYS = 8
# Numbers of 8 bytes. Indexes of this module count them.
TAG, RANK = 0, 1


def bytes_of(sets: int, entry_bytes: int) -> int:
    return sets * WAYS * entry_bytes


class NameTable:
    def __init__(self, memory: memoryview, entry_bytes: int, person: bytes = b"") -> None:
        """`person`: tables with different ones have different tags for a name, so neither reads the other's entries."""
        self._tags = memory.cast("q")
        self.ranks = memory.cast("d")
        self._entry = entry_bytes // 8
        self._person = person
        self.sets = len(memory) // (WAYS * entry_bytes)

    def __repr__(self) -> str:
        return f"<NameTable {self.sets * WAYS} places>"

    def tag_of(self, name: str) -> int:
        """Positive and never 0, which marks an empty place."""
        digest = blake2b(name.encode(), digest_size=8, person=self._person).digest()
        return int.from_bytes(digest, "little") >> 1 | 1

    def find(self, tag: int, last: int = -1) -> int:
        """The index of the entry, or -1. `last`: where it was before, most likely still is, and is found at once."""
        if last >= 0 and self._tags[last] == tag:
            return last
        for index in self._places(tag):
            if self._tags[index] == tag:
                return index
        return -1

    def has(self, index: int, tag: int) -> bool:
        return self._tags[index] == tag

    def lowest(self, tag: int) -> int:
        """The index at which a new name belongs: an empty place, or the entry with the lowest rank."""
        return min(self._places(tag), key=lambda index: (self._tags[index] != 0, self.ranks[index + RANK]))

    def claim(self, tag: int, last: int = -1) -> int:
        """The index of the entry. A new one has the rank 0. `last`: see `find`."""
        index = self.find(tag, last)
        if index < 0:
            index = self.lowest(tag)
            self.ranks[index + RANK] = 0.0
            self._tags[index] = tag
        return index

    def _places(self, tag: int) -> range:
        first = tag % self.sets * WAYS * self._entry
        return range(first, first + WAYS * self._entry, self._entry)
