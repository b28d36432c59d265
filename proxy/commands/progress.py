"""Shows that a long command works: a line drawn again on a terminal, otherwise one every few seconds if it has changed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# How often a line is printed if the output is not a terminal, and drawn if it is.
PRINT_S, DRAW_S = 5.0, 0.5
ERASE = "\r\033[K"


class Progress:
    def __init__(self, *, shown: bool = True) -> None:
        """`shown`: not for commands that print JSON."""
        self._is_shown = shown
        self._is_live = shown and sys.stdout.isatty()
        self._started_at = self._printed_at = time.monotonic()
        self._printed = ""

    def __repr__(self) -> str:
        return f"<Progress for {self.took_s:.0f} s>"

    @property
    def took_s(self) -> float:
        return time.monotonic() - self._started_at

    def show(self, line: str, plain: str | None = None) -> None:
        """Draw the line; `plain`: its form in a pipe or a file."""
        now, text = time.monotonic(), line if plain is None else plain
        if self._is_live:
            print(f"{ERASE}{line}", end="", flush=True)
        elif self._is_shown and now - self._printed_at >= PRINT_S and text != self._printed:
            self._printed_at, self._printed = now, text
            print(text, flush=True)

    def write(self, text: str) -> None:
        """Print a line that stays."""
        print(f"{ERASE}{text}" if self._is_live else text, flush=True)

    def close(self) -> None:
        if self._is_live:
            print(ERASE, end="", flush=True)


@contextmanager
def ticking(line: Callable[[], str]) -> Iterator[None]:
    """Show a line with the time that has passed, from a thread, while the block waits for another program."""
    progress, end = Progress(), threading.Event()

    def draw() -> None:
        while not end.wait(DRAW_S):
            progress.show(f"{line()}, {duration(progress.took_s)}")

    thread = threading.Thread(target=draw, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        progress.close()


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
