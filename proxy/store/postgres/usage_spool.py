"""Usage of a host's workers on its way to Postgres: one batch per host, however many workers there are.

Each worker puts its batches as files into the *inbox*, a directory of the running service. One worker, which holds a lock, is
the *sender*: it renames the inbox, which is atomic, adds up the files and writes them as one numbered batch. A batch whose
outcome is unknown keeps its directory, and therefore its content and its number: it is sent again, also by the next sender, and
is not counted twice. A killed worker loses what it had not put into a file.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path

import msgspec

from proxy.core.usage import UsageSums
from proxy.errors import Unavailable
from proxy.store.postgres.bad_rows import BadRows
from proxy.store.postgres.usage import UsageSeries, UsageStore, UsageTable

# Files in the inbox; above this limit, while Postgres is away, workers keep their usage in memory, which is bounded.
MOST_FILES = 1000
# How long a worker that shuts down waits to become the sender, so that it can send the rest.
CLOSE_S, CLOSE_STEP_S = 1.0, 0.02


class SpooledRow(msgspec.Struct, frozen=True, array_like=True):
    """Usage of one series in one minute. Files of the previous version have no `upstream_faults`."""

    series: UsageSeries
    minute: int
    requests: int
    errors: int
    units: int
    hits: int
    took: list[int]
    faults: int = 0
    upstream_faults: int = 0


_decoder = msgspec.msgpack.Decoder(list[SpooledRow])


class UsageSpool:
    def __init__(self, store: UsageStore, directory: Path) -> None:
        self._store = store
        self._directory = directory
        self._host = f"{socket.gethostname()}/{directory.parent.name}"
        self._lock_fd = -1
        self._bad = BadRows("usage")

    def __repr__(self) -> str:
        return f"<UsageSpool {self._directory}, {'sender' if self._lock_fd >= 0 else 'not sender'}>"

    async def write(self, worker: str, number: int, rows: UsageTable) -> None:
        """Put a batch into the inbox. Repeating it replaces it."""
        try:
            await asyncio.to_thread(self._put, f"{worker}-{number}", rows)
        except OSError as exc:
            raise Unavailable("usage cannot be written to the service's directory") from exc

    async def send(self) -> None:
        """Write the contents of the inbox to Postgres, if this worker is the sender."""
        if not self._leads():
            return
        while (batch := await asyncio.to_thread(self._next)) is not None:
            rows = await asyncio.to_thread(self._read, batch)
            await self._store.write(self._host, int(batch.name.partition("-")[2]), rows)
            await asyncio.to_thread(shutil.rmtree, batch)

    async def close(self) -> None:
        """Send the rest, unless another worker is the sender and keeps running."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while not self._leads():  # noqa: ASYNC110 - a lock of another process has no event
                    await asyncio.sleep(CLOSE_STEP_S)
        try:
            await self.send()
        finally:
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
                self._lock_fd = -1

    def _put(self, name: str, rows: UsageTable) -> None:
        inbox = self._directory / "inbox"
        inbox.mkdir(parents=True, exist_ok=True)
        (new := self._directory / f"new-{name}").write_bytes(self._encoded(rows))
        while True:
            try:
                if len(os.listdir(inbox)) >= MOST_FILES:
                    raise Unavailable("usage waits for the database")
                new.rename(inbox / name)
                return
            except FileNotFoundError:  # The sender has just renamed the inbox.
                inbox.mkdir(exist_ok=True)

    def _leads(self) -> bool:
        """Whether this worker is the sender; it becomes so if there is none."""
        if self._lock_fd >= 0:
            return True
        self._directory.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return False
        self._lock_fd = fd
        return True

    def _next(self) -> Path | None:
        """The directory of the batch to send: one with an unknown outcome, or else what is in the inbox."""
        for left in self._directory.glob("batch-*"):
            return left
        inbox = self._directory / "inbox"
        if not inbox.exists() or not os.listdir(inbox):
            return None
        batch = self._directory / f"batch-{self._new_number()}"
        inbox.rename(batch)
        return batch

    def _encoded(self, rows: UsageTable) -> bytes:
        """The rows as a file. Those that cannot be encoded are left out."""
        listed: list[SpooledRow] = [
            SpooledRow(
                series,
                minute,
                used.requests,
                used.errors,
                used.units,
                used.hits,
                used.took,
                used.faults,
                used.upstream_faults,
            )
            for (series, minute), used in rows.items()
        ]
        try:
            return msgspec.msgpack.encode(listed)
        except Exception:
            good = list[SpooledRow]()
            for row in listed:
                with self._bad.skipped():
                    msgspec.msgpack.encode(row)
                    good.append(row)
            return msgspec.msgpack.encode(good)

    def _read(self, batch: Path) -> dict[tuple[UsageSeries, int], UsageSums]:
        """The sums of all files of a batch. A file that cannot be read is left out."""
        totals: dict[tuple[UsageSeries, int], UsageSums] = {}
        for path in batch.iterdir():
            rows: list[SpooledRow] = []
            with self._bad.skipped(file=path.name):
                rows = _decoder.decode(path.read_bytes())
            for row in rows:
                sums = (row.requests, row.errors, row.units, row.hits, row.took, row.faults, row.upstream_faults)
                used = UsageSums(*sums)
                if (have := totals.get((row.series, row.minute))) is None:
                    totals[row.series, row.minute] = used
                else:
                    have.merge(used)
        return totals

    def _new_number(self) -> int:
        """A number above all earlier ones. It is recorded before it is used, so a worker that is killed skips one number at
        most."""
        path = self._directory / "number"
        number = int(path.read_text()) + 1 if path.exists() else 1
        (new := path.with_suffix(".new")).write_text(str(number))
        new.rename(path)
        return number
