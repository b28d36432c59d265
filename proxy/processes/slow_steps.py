"""Logs steps of the event loop that take long, for diagnosis and for the cost matrix (`tests/costs`).

A timer fires every millisecond and reads the clocks. Everything that ran since it last fired is one step: at most a millisecond
of short callbacks, and the one that made the timer late. CPU time of the loop's thread shows work on the loop, whatever else
the machine does. CPU time of the process shows work in threads that kept the interpreter to themselves.
"""

from __future__ import annotations

import asyncio
import logging
import time

log = logging.getLogger("penstock.process")

EVERY_S = 0.001


class SlowSteps:
    """`slow_ms`: steps with more CPU time are logged."""

    def __init__(self, loop: asyncio.AbstractEventLoop, slow_ms: float, name: str) -> None:
        self._loop = loop
        self._slow_s = slow_ms / 1000
        self._name = name
        self._wall = self._cpu = self._process = 0.0

    def __repr__(self) -> str:
        return f"<SlowSteps of {self._name} above {self._slow_s * 1000:g} ms>"

    def watch(self) -> None:
        """Watch the loop until it ends."""
        self._wall, self._cpu, self._process = time.monotonic(), time.thread_time(), time.process_time()
        self._loop.call_later(EVERY_S, self._end_step)

    def _end_step(self) -> None:
        wall_s = time.monotonic() - self._wall
        if wall_s - EVERY_S >= self._slow_s:
            cpu_s, process_s = time.thread_time() - self._cpu, time.process_time() - self._process
            if process_s >= self._slow_s:
                times = {"wall_ms": wall_s, "cpu_ms": cpu_s, "process_ms": process_s}
                shown = {name: round(value * 1000, 2) for name, value in times.items()}
                log.warning("slow step", extra={"of": self._name, **shown})
        self.watch()
