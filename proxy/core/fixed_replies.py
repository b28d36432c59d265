"""Replies of the settings to calls with given params, which no upstream gets.

Params are compared as JSON values: spaces and the order of members do not matter, the case of hex digits does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import orjson

# Params that are longer than those of the settings by more than this are not compared: spaces cannot explain it.
SPARE_BYTES: Final = 256


class FixedReplies:
    """The replies of one method: results, and errors of JSON-RPC."""

    __slots__ = ("_errors", "_longest", "_results")

    def __init__(self, given: Iterable[tuple[str, str, str]]) -> None:
        """`given`: params with a result or an error, each as JSON."""
        self._results: dict[bytes, bytes] = {}
        self._errors: dict[bytes, bytes] = {}
        for params, result, error in given:
            (self._results if result else self._errors)[_canonical(params.encode())] = (result or error).encode()
        self._longest = max([0, *map(len, self._results), *map(len, self._errors)]) + SPARE_BYTES

    def __repr__(self) -> str:
        return f"<FixedReplies {len(self._results)} results, {len(self._errors)} errors>"

    def find(self, params: bytes) -> tuple[bytes, bytes] | None:
        """The result and the error, one of which is empty; None if the params have no reply."""
        if len(params) > self._longest:
            return None
        try:
            key = _canonical(params or b"[]")
        except ValueError:
            return None
        result, error = self._results.get(key, b""), self._errors.get(key, b"")
        return (result, error) if result or error else None


def _canonical(params: bytes) -> bytes:
    return orjson.dumps(orjson.loads(params), option=orjson.OPT_SORT_KEYS)
