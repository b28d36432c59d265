"""Usage of a host's workers: one batch for all, counted once, whichever process dies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from proxy.core.usage import BUCKETS, UsageSums
from proxy.errors import Unavailable
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.usage import UsageSeries, UsageStore, UsageTable
from proxy.store.postgres.usage_spool import MOST_FILES, UsageSpool


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "usage"


def batch(requests: int = 1, key: str = "key_1") -> dict[tuple[UsageSeries, int], UsageSums]:
    return {(("acct_1", key, "net/one", "m"), 7): UsageSums(requests, 0, 2, 1, [requests] + [0] * (BUCKETS - 1))}


async def counted(pool: Pool) -> int:
    async with pool.connection() as connection:
        return int(
            await connection.fetchval("""
                select coalesce(sum(requests), 0) from usage join usage_series s on s.id = series
                where step = 'minute' and s.key_id <> '' and s.method <> ''""")
        )


async def batches(pool: Pool) -> int:
    async with pool.connection() as connection:
        return int(await connection.fetchval("select coalesce(sum(number), 0) from usage_batches"))


class LosesReplies(UsageStore):
    """A store that writes a batch and then reports that Postgres is away."""

    async def write(self, worker: str, number: int, rows: UsageTable) -> None:
        await super().write(worker, number, rows)
        raise Unavailable("away")


async def test_workers_of_a_host_write_one_batch(pool: Pool, directory: Path) -> None:
    spools = [UsageSpool(UsageStore(pool), directory) for _ in range(8)]
    for number in range(1, 4):
        for index, spool in enumerate(spools):
            await spool.write(f"w{index}", number, batch(2, f"key_{index % 3}"))
        await asyncio.gather(*[spool.send() for spool in spools])
    assert await counted(pool) == 3 * 8 * 2
    assert await batches(pool) == 3
    assert [repr(spool).endswith(", sender>") for spool in spools].count(True) == 1


async def test_batch_with_an_unknown_outcome_is_counted_once_by_the_next_sender(pool: Pool, directory: Path) -> None:
    """The sender wrote a batch and was killed before it could remove it."""
    first, second = UsageSpool(LosesReplies(pool), directory), UsageSpool(UsageStore(pool), directory)
    await first.write("w1", 1, batch(3))
    with pytest.raises(Unavailable):
        await first.send()
    assert await counted(pool) == 3
    await second.write("w2", 1, batch(5))
    await second.send()  # not the sender
    assert await counted(pool) == 3
    with pytest.raises(Unavailable):
        await first.close()
    await second.send()
    assert await counted(pool) == 8


async def test_repeated_file_replaces_itself(pool: Pool, directory: Path) -> None:
    spool = UsageSpool(UsageStore(pool), directory)
    for _ in range(3):
        await spool.write("w1", 1, batch(3))
    await spool.send()
    assert await counted(pool) == 3


async def test_worker_that_ends_last_sends_what_is_left(pool: Pool, directory: Path) -> None:
    spools = [UsageSpool(UsageStore(pool), directory) for _ in range(4)]
    await spools[0].send()
    for index, spool in enumerate(spools):
        await spool.write(f"w{index}", 1, batch())
    await asyncio.gather(*[spool.close() for spool in spools])
    assert await counted(pool) == 4


async def test_files_put_while_batches_are_sent_are_neither_lost_nor_doubled(pool: Pool, directory: Path) -> None:
    sender, others = (
        UsageSpool(UsageStore(pool), directory),
        [UsageSpool(UsageStore(pool), directory) for _ in range(3)],
    )
    done = asyncio.Event()

    async def put(worker: int, spool: UsageSpool) -> None:
        for number in range(1, 41):
            await spool.write(f"w{worker}", number, batch())

    async def send() -> None:
        while not done.is_set():
            await sender.send()
        await sender.send()

    async with asyncio.TaskGroup() as group:
        group.create_task(send())
        await asyncio.gather(*[put(index, spool) for index, spool in enumerate(others)])
        done.set()
    assert await counted(pool) == 3 * 40


async def test_full_inbox_leaves_usage_in_memory(pool: Pool, directory: Path) -> None:
    spool = UsageSpool(UsageStore(pool), directory)
    (directory / "inbox").mkdir(parents=True)
    for number in range(MOST_FILES):
        (directory / "inbox" / f"w-{number}").write_bytes(b"\x90")
    with pytest.raises(Unavailable):
        await spool.write("w1", 1, batch())
    await spool.send()
    await spool.write("w1", 1, batch())
    await spool.send()
    assert await counted(pool) == 1
