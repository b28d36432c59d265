"""The table of recent writes: shared by processes, bounded, and forgotten after a minute."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from proxy.store.shared_memory.name_table import WAYS
from proxy.store.shared_memory.write_table import KEPT_S, SETS, WriteTable

MARK, OTHER = (1 << 63) + 1, 2


@pytest.fixture
def fd() -> Iterator[int]:
    found = os.memfd_create("writes")
    yield found
    os.close(found)


def test_write_is_found_by_another_process(fd: int) -> None:
    writer, reader = WriteTable(fd, 0), WriteTable(fd, 0)
    tag = writer.tag_of("ethereum/mainnet acc_1 0xab")
    assert reader.find(tag, 100.0) == 0
    writer.note(tag, MARK, 100.0)
    assert reader.find(tag, 100.0) == MARK
    writer.note(tag, OTHER, 101.0)
    assert reader.find(tag, 101.0) == OTHER
    assert reader.find(reader.tag_of("ethereum/mainnet acc_2 0xab"), 101.0) == 0


def test_write_is_forgotten_after_a_minute(fd: int) -> None:
    table = WriteTable(fd, 0)
    tag = table.tag_of("a")
    table.note(tag, MARK, 100.0)
    assert table.find(tag, 100.0 + KEPT_S) == MARK
    assert table.find(tag, 100.0 + KEPT_S + 0.001) == 0


def test_oldest_write_of_a_full_set_makes_room(fd: int) -> None:
    table = WriteTable(fd, 0)
    tags = [1 + SETS * index for index in range(WAYS + 1)]
    for at, tag in enumerate(tags):
        table.note(tag, MARK, 100.0 + at)
    assert [table.find(tag, 110.0) for tag in tags] == [0, *[MARK] * WAYS]
