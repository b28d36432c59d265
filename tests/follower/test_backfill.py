"""Back-fills index blocks from before the follower's first, each once, even after interruptions."""

from __future__ import annotations

import asyncio
import random
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.commands.index import _forget as forget_all
from proxy.commands.index import line
from proxy.errors import InvalidRequest, Unavailable
from proxy.services.follower.backfill import Backfill, BackfillProgress
from proxy.services.follower.block_reader import ReadFailed
from proxy.services.follower.network_follower import forget
from proxy.services.follower.sinks import HoldingsSink
from proxy.services.rpc.traces import TraceReader
from proxy.store.postgres.blocks import BlockStore, Followed
from proxy.store.postgres.pool import DatabaseConnection
from proxy.tasks import Tasks
from tests.chain_upstream import LittleChain, address
from tests.database import connected
from tests.follower.harness import NETWORK, PEPPER, FollowerHarness, everything, follower_harness
from tests.service import command, command_here, until

COIN, ART = address(100), address(101)
START = 90


def old_chain() -> LittleChain:
    chain = LittleChain()
    chain.mine(*(everything() * 20))
    return chain


@asynccontextmanager
async def followed(database: str, start: int = START) -> AsyncIterator[FollowerHarness]:
    """A network that is followed from block 90 of 100."""
    async with follower_harness(database, chain=old_chain(), start={NETWORK: start}) as harness:
        async with harness.leading(start=start) as (follower, term):
            await follower.step(term)
        yield harness


def backfill(harness: FollowerHarness, contract: bytes = b"") -> Backfill:
    from proxy.chains.evm.facts import TOPICS
    from proxy.services.follower.block_reader import BlockReader

    reader = BlockReader(harness.route, topics=TOPICS, contract="0x" + contract.hex() if contract else "")
    traces = TraceReader(harness.route.network, harness.running.internal_calls)
    categories = harness.running.transfers(harness.route).categories
    return Backfill(reader, traces, harness.running.blocks, START, contract, categories)


async def fill(
    harness: FollowerHarness, first: int, last: int | None = None, contract: bytes = b""
) -> BackfillProgress:
    return await backfill(harness, contract).run(first, last, lambda progress: None)


async def test_backfill_adds_the_blocks_before_the_followers_first(database: str) -> None:
    async with followed(database) as harness:
        assert await harness.is_complete(START)
        done = await fill(harness, 0)
        assert (done.total, done.done, done.last) == (START, START, START - 1)
        assert await harness.is_complete(0)


async def test_second_backfill_has_nothing_to_do(database: str) -> None:
    async with followed(database) as harness:
        await fill(harness, 0)
        again = await fill(harness, 0)
        one = await fill(harness, 0, None, COIN)
        beyond = await fill(harness, START, 1000)
        assert [done.total for done in (again, one, beyond)] == [0, 0, 0]
        assert await harness.is_complete(0)


@pytest.mark.parametrize("seed", range(4))
async def test_overlapping_backfills_count_each_block_once(database: str, seed: int) -> None:
    """Ranges in any order, for all contracts and for single ones."""
    rng = random.Random(seed)
    async with followed(database) as harness:
        for _ in range(8):
            first = rng.randrange(0, START)
            last = rng.choice((None, first, first + rng.randrange(40)))
            await fill(harness, first, last, rng.choice((b"", COIN, ART)))
        await fill(harness, 0)
        assert await harness.is_complete(0)


async def test_backfill_of_one_contract_adds_only_its_events(database: str) -> None:
    async with followed(database) as harness:
        await fill(harness, 0, None, COIN)
        whole, late = harness.chain.holdings(0), harness.chain.holdings(START)
        assert await harness.indexed() == {
            **{key: amount for key, amount in whole.items() if key[1] == COIN},
            **{key: amount for key, amount in late.items() if key[1] != COIN},
        }


async def test_interrupted_backfill_resumes_where_it_stopped(database: str) -> None:
    async with followed(database) as harness:
        harness.upstream.max_range = 3
        for stop_after in (5, 11, 40):
            seen: list[int] = []

            def report(progress: BackfillProgress, stop_after: int = stop_after, seen: list[int] = seen) -> None:
                seen.append(progress.done)
                if progress.done >= stop_after:
                    raise ReadFailed("stopped here")

            with pytest.raises(ReadFailed):
                await backfill(harness).run(0, None, report)
            assert seen == sorted(set(seen))
        done = await fill(harness, 0)
        assert 0 < done.total < START - 50
        assert await harness.is_complete(0)


async def test_backfill_beside_a_running_follower(database: str) -> None:
    """Both write the same rows: there is no deadlock, and nothing is lost."""
    async with followed(database) as harness:
        harness.upstream.max_range = 2
        tasks = Tasks()
        tasks.start("follower", harness.follower(start=START).run)
        async with asyncio.TaskGroup() as group:
            group.create_task(fill(harness, 0))
            for _ in range(10):
                harness.chain.mine(*everything())
                await asyncio.sleep(0.03)
        await until(lambda: harness.is_complete(0), within_s=40.0)
        await tasks.close()


async def test_only_one_backfill_of_a_network_runs_at_a_time(database: str) -> None:
    async with followed(database) as harness, harness.running.blocks.backfill(NETWORK):
        with pytest.raises(InvalidRequest, match="another back-fill"):
            await fill(harness, 0)


async def test_backfill_of_a_new_network_sets_the_first_block_of_its_follower(database: str) -> None:
    async with follower_harness(database, chain=old_chain()) as harness:
        await fill(harness, 0)
        assert await harness.cursor() == (START - 1, harness.chain.blocks[START - 1].hash)
        async with harness.leading(start=0) as (follower, term):
            await follower.step(term)
        assert await harness.is_complete(0)


# The command


def settings_file(harness: FollowerHarness, path: Path) -> str:
    path.write_text(f"""
[database]
url = "{harness.database}"
[keys]
pepper = "{PEPPER}"
[follower.start]
"{NETWORK}" = {START}
[[upstreams]]
network = "{NETWORK}"
url = "{harness.upstream.url}"
""")
    return str(path)


async def index(*arguments: str) -> tuple[int, str]:
    done = await asyncio.to_thread(command, "index", *arguments)
    return done.returncode, done.stdout + done.stderr


async def test_command_fills_reports_and_has_nothing_to_do_afterwards(database: str, tmp_path: Path) -> None:
    async with followed(database) as harness:
        arguments = ("--config", settings_file(harness, tmp_path / "penstock.toml"), "--chain", NETWORK, "--from", "0")
        code, output = await index(*arguments, "--to", "49")
        assert (code, re.findall(r"50 blocks of dev/testnet indexed", output)) == (
            0,
            ["50 blocks of dev/testnet indexed"],
        )
        code, output = await index(*arguments)
        assert (code, "40 blocks" in output) == (0, True), output
        assert await harness.is_complete(0)
        code, output = await index(*arguments, "--contract", "0x" + COIN.hex())
        assert (code, output.startswith("nothing to do")) == (0, True), output
        assert await harness.is_complete(0)


async def test_command_deletes_the_whole_index(database: str, tmp_path: Path) -> None:
    async with followed(database) as harness:
        code, output = await index(
            "--config", settings_file(harness, tmp_path / "penstock.toml"), "--chain", NETWORK, "--forget"
        )
        assert code == 0, output
        assert await harness.indexed() == {}
        assert await harness.cursor() is None


async def test_top_shows_a_backfill_under_way(database: str, tmp_path: Path) -> None:
    async with followed(database) as harness:
        config = settings_file(harness, tmp_path / "penstock.toml")
        words = ("--config", config, "--chain", NETWORK, "--from", "0", "--calls-per-second", "2")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "proxy", "index", *words, stdout=asyncio.subprocess.DEVNULL
        )

        async def is_shown() -> bool:
            done = await asyncio.to_thread(command_here, "top", "--once", "--config", config)
            assert done.returncode == 0, done.stderr
            lines = [line.split() for line in done.stdout.splitlines()]
            heads = [line for line in lines if line[:3] == ["network", "block", "done"]]
            rows = [line for line in lines if line[:1] == [NETWORK]]
            # The total is known: it has begun.
            return bool(heads and rows and rows[0][heads[0].index("total")] == str(START))

        try:
            await until(is_shown, within_s=60.0, every_s=0.2)
            assert process.returncode is None
        finally:
            process.kill()
            await process.wait()


class SlowSink(HoldingsSink):
    """A sink whose deletion takes longer than the statement timeout."""

    async def forget(self, connection: DatabaseConnection, network: Followed) -> None:
        await connection.execute("select pg_sleep(0.6)")


async def test_deleting_the_index_has_no_statement_timeout(database: str) -> None:
    async with followed(database) as harness:
        harness.running.sinks.append(SlowSink())
        harness.running.blocks = BlockStore(harness.running.pool, statement_s=0.3)
        async with harness.running.blocks.backfill(NETWORK) as term:
            with pytest.raises(Unavailable):
                await forget(term, [*harness.running.sinks, harness.running.transfers(harness.route)])
        assert await harness.cursor() is not None
        await forget_all(harness.running, harness.route)
        assert await harness.cursor() is None


async def test_deleting_the_index_deletes_undelivered_events(database: str) -> None:
    async with followed(database) as harness, connected(database) as connection:
        await connection.execute(
            "insert into events (id, webhook_id, network, type, block, body, after_block) values"
            " ('evt_later', 'wh', $1, 'token_transfer', 95, '', 105),"
            " ('evt_delivered', 'wh', $1, 'token_transfer', 95, '', null)",
            NETWORK,
        )
        await forget_all(harness.running, harness.route)
        assert [row["id"] for row in await connection.fetch("select id from events")] == ["evt_delivered"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--chain", NETWORK), "--from"),
        (("--chain", "nowhere", "--from", "0"), "--chain nowhere"),
        (("--chain", NETWORK, "--from", "5", "--to", "4"), "--to 4"),
        (("--chain", NETWORK, "--from", "x"), "'x' is not a block number"),
        (("--chain", NETWORK, "--from", "0", "--contract", "0x12"), "'0x12' is not an address"),
        (("--chain", "base", "--from", "0"), "no upstream"),
        (("--chain", "solana", "--from", "0"), "family"),
    ],
)
async def test_command_names_the_invalid_argument(
    database: str, tmp_path: Path, arguments: tuple[str, ...], named: str, capsys: Any
) -> None:
    from proxy.__main__ import main

    async with follower_harness(database) as harness:
        config = settings_file(harness, tmp_path / "penstock.toml")
        try:
            code = await asyncio.to_thread(main, ["index", "--config", config, *arguments])
        except SystemExit as exc:
            code = int(str(exc.code))
        assert code == 2
        assert named in capsys.readouterr().err


def test_progress_line_shows_share_rate_and_time_left() -> None:
    progress = BackfillProgress(last=999, total=1000, done=250, block=249, transfers=5_000, calls=12)
    rates = "25 blocks/s  500 transfers/s"
    assert line(progress, 10.0) == f"[{'=' * 6}{' ' * 18}] 25%  block 249  {rates}  30 s left  12 calls"
    progress.lag = 4
    assert line(progress, 10_000.0, width=0).endswith("0 blocks/s  0 transfers/s  8.3 h left  12 calls  4 behind")
    progress.paused = "the disk of the database is full"
    assert line(progress, 10.0).endswith("calls  paused: the disk of the database is full")
    assert "0%" in line(BackfillProgress(total=10), 0.0)
