"""Finds the name that a mistyped one most likely stands for, in a few microseconds: anyone may send thousands of such names.

Case and underscores are ignored. Names are near if they are then equal or one edit apart: a letter that is missing, added,
changed or swapped with its neighbour. Two texts are one edit apart if they are equal after a letter is deleted from either or
both (SymSpell), so all deletions of the known names are kept in a table. Texts longer than MOST_CHARACTERS are near to no name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final

# The longest method of a node has 47 characters.
MOST_CHARACTERS: Final = 48


class NearNames:
    def __init__(self, names: Iterable[str]) -> None:
        self._exact = {_folded(name): name for name in names}
        self._by_deletion = {part: name for text, name in self._exact.items() for part in _deletions(text)}

    def __repr__(self) -> str:
        return f"<NearNames of {len(self._exact)}>"

    def nearest(self, text: str) -> str:
        """The name that the text is near to, or an empty string."""
        if len(text) > MOST_CHARACTERS:
            return ""
        folded = _folded(text)
        name = self._exact.get(folded) or self._by_deletion.get(folded)
        if name:
            return name
        parts = (self._exact.get(part) or self._by_deletion.get(part) for part in _deletions(folded))
        return next(filter(None, parts), "")


@lru_cache(maxsize=8)
def near_names(names: frozenset[str]) -> NearNames:
    """The table for these names, built when a name is first mistyped. Networks with the same names share it."""
    return NearNames(sorted(names))


def _folded(text: str) -> str:
    return text.lower().replace("_", "")


def _deletions(text: str) -> Iterator[str]:
    return (text[:index] + text[index + 1 :] for index in range(len(text)))
