"""Copies of rows on this host: whole after any kill, current, and removed if they cannot be kept current."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from proxy.store.postgres import local_copy
from proxy.store.postgres.local_copy import CopyDirectory, LocalCopy


def copy_at(path: Path) -> LocalCopy:
    """A copy that reads what it has written."""
    return LocalCopy(path, source=path)


async def test_successor_reads_what_its_predecessor_wrote(tmp_path: Path) -> None:
    copy = CopyDirectory(tmp_path).copy_of("keys")
    assert not copy.exists
    assert await copy.read() == {}
    await copy.replace({"a": {"digest": b"\0\xff", "left": None}, "b": 1})
    await copy.append({"b": 2, "c": 3})
    successor = CopyDirectory(tmp_path, predecessor=os.getpid()).copy_of("keys")
    assert successor.exists
    assert await successor.read() == {"a": {"digest": b"\0\xff", "left": None}, "b": 2, "c": 3}
    CopyDirectory(tmp_path).remove(os.getpid())
    assert not successor.exists


@pytest.mark.parametrize("lost", range(1, 12))
async def test_frame_that_was_cut_off_is_ignored(tmp_path: Path, lost: int) -> None:
    path = tmp_path / "keys.copy"
    copy = copy_at(path)
    await copy.replace({"a": 1})
    before = path.stat().st_size
    await copy.append({"b": "long enough"})
    os.truncate(path, max(before, path.stat().st_size - lost))
    assert await copy.read() == {"a": 1}


async def test_new_file_begins_whole(tmp_path: Path) -> None:
    """Until it is complete, a successor reads the old one."""
    path = tmp_path / "keys.copy"
    first, second = copy_at(path), copy_at(path)
    await first.replace({"a": 1})
    await second.replace({str(number): number for number in range(2 * local_copy.FRAME_ROWS)})
    assert len(await first.read()) == 2 * local_copy.FRAME_ROWS
    assert [file.name for file in tmp_path.iterdir()] == ["keys.copy"]


async def test_file_that_grows_is_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_copy, "SLACK_BYTES", 1_000)
    path = tmp_path / "keys.copy"
    copy = copy_at(path)
    await copy.replace({"a": 0, "b": 0})
    for number in range(1_000):
        await copy.append({"a": number})
    assert path.stat().st_size < 3_000
    assert await copy.read() == {"a": 999, "b": 0}


async def test_copy_that_cannot_be_written_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "keys.copy"
    copy = copy_at(path)
    await copy.replace({"a": 1})
    (tmp_path / "keys.part").mkdir()
    await copy.replace({"a": 2})
    assert not path.exists()
    await copy.append({"a": 3})
    assert repr(copy) == "<LocalCopy keys.copy not kept>"
