"""Progress output while the parts start."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


class Display:
    """Prints one line per part with its start time. On a terminal, the last line lists the parts that are still starting."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = out.isatty()
        self._waiting: list[str] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        self._waiting.append(name)
        self._redraw()
        ended = "failed"
        try:
            yield
            ended = "ready"
        finally:
            self._waiting.remove(name)
            self._line(f"  {name:<12} {ended} after {time.monotonic() - began:.1f} s")
            self._redraw()

    def note(self, name: str, text: str) -> None:
        self._line(f"  {name:<12} {text}")
        self._redraw()

    def _line(self, text: str) -> None:
        print(f"\r\033[K{text}" if self._live else text, file=self._out, flush=True)

    def _redraw(self) -> None:
        if self._live and self._waiting:
            print(f"\r\033[K  starting {', '.join(self._waiting)} …", end="", file=self._out, flush=True)
