"""A copy of rows from Postgres on this host, for a worker that has to start while Postgres is away.

Each worker writes its own file and reads its predecessor's. A file consists of frames, each with rows by id; the last row of
an id counts. Changes are appended. A frame that a kill cut off is ignored. A rewritten file is renamed over the old one, so a
reader sees either of them whole. If the copy cannot be kept current, it is removed: without one a successor waits for Postgres,
with an old one it could accept a revoked key.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

log = logging.getLogger("penstock.copy")

CopiedRows = dict[str, Any]
# Rows per frame: decoding one frame blocks other threads.
FRAME_ROWS = 500
# The file is rewritten when its appended part exceeds its first part by this much.
SLACK_BYTES = 4 << 20
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class CopyDirectory:
    """The copies of a host's workers. `predecessor` is the process id of the worker that this one replaces, or 0."""

    path: Path
    predecessor: int = 0

    def copy_of(self, name: str) -> LocalCopy:
        return LocalCopy(self._file(name, os.getpid()), source=self._file(name, self.predecessor))

    def _file(self, name: str, pid: int) -> Path:
        return self.path / f"{name}-{pid}.copy"

    def remove(self, pid: int) -> None:
        """Remove the copies of an ended worker."""
        for file in self.path.glob(f"*-{pid}.copy"):
            file.unlink(missing_ok=True)


class LocalCopy:
    def __init__(self, path: Path, *, source: Path) -> None:
        self._path = path
        self._source = source
        self._is_kept = False
        self._rewrite_at = 0
        self._writing = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<LocalCopy {self._path.name} {'kept' if self._is_kept else 'not kept'}>"

    @property
    def exists(self) -> bool:
        """Whether there is a predecessor's file."""
        return self._source.exists()

    async def read(self) -> CopiedRows:
        """Return the predecessor's rows by id; empty if there is no file."""
        return await asyncio.to_thread(_read, self._source)

    async def replace(self, rows: Mapping[str, Any]) -> None:
        """Begin a new file with these rows."""
        await self._attempt(self._replace, rows)

    async def append(self, rows: Mapping[str, Any]) -> None:
        """Add rows, or replace those with the same id."""
        if rows and self._is_kept:
            await self._attempt(self._append, rows)

    async def _attempt(self, write: Callable[[Mapping[str, Any]], None], rows: Mapping[str, Any]) -> None:
        try:
            async with self._writing:
                await asyncio.to_thread(write, rows)
            self._is_kept = True
        except OSError as exc:
            self._is_kept = False
            self._path.unlink(missing_ok=True)
            log.error(
                "cannot keep the local copy: a worker could not start while Postgres is away",
                extra={"copy": self._path.name, "reason": str(exc)},
            )

    def _replace(self, rows: Mapping[str, Any]) -> None:
        part = self._path.with_suffix(".part")
        self._rewrite_at = 2 * _write(part, "wb", rows) + SLACK_BYTES
        part.replace(self._path)

    def _append(self, rows: Mapping[str, Any]) -> None:
        if _write(self._path, "ab", rows) > self._rewrite_at:
            self._replace(_read(self._path))


def _write(path: Path, mode: Literal["ab", "wb"], rows: Mapping[str, Any]) -> int:
    """Write the rows and return the size of the file."""
    with path.open(mode) as file:
        file.writelines(_frames(rows.items()))
        return file.tell()


def _frames(rows: Iterable[tuple[str, Any]]) -> Iterator[bytes]:
    rest = iter(rows)
    while some := dict(itertools.islice(rest, FRAME_ROWS)):
        data = msgspec.msgpack.encode(some)
        yield _LENGTH.pack(len(data)) + data


def _read(path: Path) -> CopiedRows:
    rows: CopiedRows = {}
    try:
        with path.open("rb") as file:
            while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
                (size,) = _LENGTH.unpack(head)
                if len(data := file.read(size)) < size:
                    break
                rows.update(msgspec.msgpack.decode(data))
    except FileNotFoundError:
        return {}
    return rows
