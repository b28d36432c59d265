"""Loops that fail: a bug is logged with its traceback, an outage in one line."""

from __future__ import annotations

import asyncio
import logging

import pytest
from prometheus_client import REGISTRY

from proxy import tasks as tasks_room
from proxy.errors import Unavailable
from proxy.tasks import Tasks
from tests.service import until


@pytest.mark.parametrize(("error", "lines"), [(Unavailable("away"), 1), (ValueError("a bug"), 4)])
async def test_loop_that_fails_again_and_again(
    error: Exception, lines: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks_room, "FIRST_PAUSE_S", 0.001)
    runs = 0

    async def fail() -> None:
        nonlocal runs
        runs += 1
        if runs < 5:
            raise error

    tasks = Tasks()
    tasks.start("failing", fail)
    await until(lambda: runs == 5)
    await tasks.close()
    records = [record for record in caplog.records if record.name == "penstock.process"]
    assert len(records) == lines
    assert {bool(record.exc_info) for record in records} == {isinstance(error, ValueError)}
    assert {record.levelno for record in records} <= {logging.WARNING, logging.ERROR}


async def test_loop_goes_on_after_something_that_it_awaits_was_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_room, "FIRST_PAUSE_S", 0.001)
    runs, before = 0, counted("awaiting")

    async def wait() -> None:
        nonlocal runs
        runs += 1
        other = asyncio.get_running_loop().create_future()
        if runs == 1:
            other.cancel()
        await other

    tasks = Tasks()
    tasks.start("awaiting", wait, of="something")
    await until(lambda: runs == 2)
    assert repr(tasks) == "<Tasks awaiting something>"
    await tasks.close()
    assert counted("awaiting") - before == 1


async def test_work_for_one_client_is_not_repeated_if_it_fails() -> None:
    runs, before = 0, counted("single")

    async def fail() -> None:
        nonlocal runs
        runs += 1
        raise KeyError("a bug")

    tasks = Tasks()
    tasks.start_once("single", fail, of=1)
    await until(lambda: repr(tasks) == "<Tasks >")
    assert (runs, counted("single") - before) == (1, 1)


def counted(loop: str) -> float:
    return REGISTRY.get_sample_value("penstock_loop_failures_total", {"loop": loop}) or 0.0
