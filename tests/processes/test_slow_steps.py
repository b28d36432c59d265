"""The log of slow steps of an event loop."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from proxy.processes.slow_steps import SlowSteps
from tests.service import until
from tests.web.worker import on_uvloop

SLOW_MS = 20.0


def work(ms: float) -> None:
    """Use the processor for so long, however busy the machine is."""
    end = time.thread_time() + ms / 1000
    while time.thread_time() < end:
        pass


def test_only_steps_above_the_limit_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "penstock.process")

    @on_uvloop
    async def main() -> None:
        SlowSteps(asyncio.get_running_loop(), SLOW_MS, "worker").watch()
        for _ in range(20):
            work(SLOW_MS / 10)
            await asyncio.sleep(0)
        quiet = len(caplog.records)
        work(3 * SLOW_MS)
        await until(lambda: len(caplog.records) > quiet)

    main()
    slow = max(caplog.records, key=lambda record: vars(record)["cpu_ms"])
    assert (slow.getMessage(), vars(slow)["of"]) == ("slow step", "worker")
    assert vars(slow)["cpu_ms"] >= 3 * SLOW_MS
    # The clocks are read one after the other.
    assert vars(slow)["wall_ms"] >= vars(slow)["cpu_ms"] - 1.0
    assert all(vars(record)["process_ms"] >= SLOW_MS for record in caplog.records)


def test_time_that_another_thread_keeps_the_interpreter_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "penstock.process")

    @on_uvloop
    async def main() -> None:
        SlowSteps(asyncio.get_running_loop(), SLOW_MS, "worker").watch()
        await asyncio.sleep(0.01)
        # One call in C that does not release the interpreter.
        await asyncio.to_thread(sum, range(10_000_000))
        await until(lambda: caplog.records)

    main()
    assert max(vars(record)["process_ms"] for record in caplog.records) >= 2 * SLOW_MS
