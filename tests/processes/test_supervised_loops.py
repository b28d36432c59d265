"""Loops that fail: a bug is logged with its traceback, an outage in one line."""

from __future__ import annotations

import logging

import pytest

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
