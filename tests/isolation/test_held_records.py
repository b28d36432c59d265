"""Records of requests that wait to be written count in the memory of their account, and leave it when they are written."""

from __future__ import annotations

import pytest

from tests.http_client import rpc
from tests.rpc_harness import rpc_harness
from tests.web.worker import on_uvloop


@pytest.mark.parametrize("ends", ["written", "dropped"])
@on_uvloop
async def test_records_take_memory_until_they_are_written_or_dropped(ends: str) -> None:
    async with rpc_harness(1) as harness:
        worker, recorder = harness.worker, harness.worker.app.recorder
        worker.add_key("other")
        memory = worker.app.budget.of("records")
        for key, count in (("main", 5), ("other", 3)):
            for _ in range(count):
                await worker.send(rpc("eth_nonsense"), key=key)
        assert len(recorder.waiting) == 8
        assert memory.total > 8 * 800
        if ends == "dropped":
            recorder.drop_waiting()
        else:
            recorder.forget(6)
            assert 2 * 800 < memory.total < 3 * 1500
            recorder.forget(2)
        assert (memory.total, worker.app.budget.total, len(recorder.waiting)) == (0, 0, 0)


@on_uvloop
async def test_record_without_room_in_memory_is_dropped_and_counted() -> None:
    async with rpc_harness(1, server={"max_held_bytes": 30_000}) as harness:
        recorder = harness.worker.app.recorder
        for _ in range(40):
            await harness.worker.send(rpc("eth_nonsense"))
        kept = len(recorder.waiting)
        assert 4 < kept < 12
        assert recorder.take_dropped() == 40 - kept
        recorder.forget(kept)
        await harness.worker.send(rpc("eth_nonsense"))
        assert len(recorder.waiting) == 1
