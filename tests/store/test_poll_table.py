"""Polls in memory that processes share: what one writes, the others read, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from proxy.store.shared_memory import host_memory
from proxy.store.shared_memory.host_memory import HostMemory
from proxy.store.shared_memory.name_table import WAYS
from proxy.store.shared_memory.poll_table import RECORD_BYTES, ROOM, SETS, HeadPoll, PollTable

POLL = HeadPoll(7, 1.0, 2.0, 0.5, head=100, block_hash="0x" + "ab" * 32, parent_hash="0x" + "cd" * 32, standing="good")


@pytest.fixture
def fd() -> Iterator[int]:
    made = host_memory.create()
    yield made
    os.close(made)


@pytest.fixture
def table(fd: int) -> PollTable:
    return HostMemory(fd).polls


def test_poll_is_read_by_another_process(fd: int, table: PollTable) -> None:
    if not (child := os.fork()):
        HostMemory(fd).polls.record("one").write(POLL)
        os._exit(0)
    os.waitpid(child, 0)
    record = table.record("one")
    assert record.news() == POLL
    assert record.news() is None
    assert table.record("other").news() is None


def test_every_change_is_news_once(table: PollTable) -> None:
    writer, reader = table.record("one"), table.record("one")
    for head in (100, 101, 101, 99):
        before = table.changes
        writer.write(HeadPoll(7, 1.0, head=head))
        assert table.changes != before
    assert reader.news() == HeadPoll(7, 1.0, head=99)
    assert reader.news() is None


def test_poll_that_is_half_written_is_not_read(table: PollTable) -> None:
    writer, reader = table.record("one"), table.record("one")
    writer.write(POLL)
    at = writer._index * 8 + 60
    kept = bytes(table.records[at : at + 4])
    table.records[at : at + 4] = b"torn"
    assert reader.news() is None
    table.records[at : at + 4] = kept
    assert reader.news() == POLL


def test_poll_with_a_hash_that_is_none_is_not_written(table: PollTable) -> None:
    record = table.record("one")
    record.write(HeadPoll(7, 1.0, block_hash="x" * ROOM))
    assert record.news() is None
    assert table.changes == 0


def test_oldest_record_of_a_full_set_makes_room(table: PollTable) -> None:
    first = table.record("0")
    same_set = [
        each for each in (table.record(f"{n}") for n in range(1, 20_000)) if each._tag % SETS == first._tag % SETS
    ]
    every = [first, *same_set[:WAYS]]
    for number, record in enumerate(every):
        record.write(HeadPoll(number, 1.0))
    assert len({record._index for record in every[1:]}) == WAYS
    assert all(record._index * 8 % RECORD_BYTES == 0 for record in every)
    assert first.news() is None
    assert [record.news() for record in every[1:]] == [HeadPoll(number, 1.0) for number in range(1, WAYS + 1)]
