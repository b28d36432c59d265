"""The index of a network against its chain: growth, forks, resets, refused and false replies, unusual contracts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import cast

import asyncpg
import pytest

from proxy import telemetry
from proxy.chains.evm.facts import BlockFacts
from proxy.services.accounts.keyring import Keyring
from proxy.services.follower import network_follower
from proxy.services.follower.block_reader import ReadFailed
from proxy.services.follower.network_follower import NoCommonBlock, forget
from proxy.services.readiness import Readiness
from proxy.store.postgres.blocks import BlockId, Followed, LeadershipLost
from proxy.store.postgres.index_databases import MAIN
from proxy.store.postgres.pool import DatabaseConnection
from proxy.tasks import Tasks
from tests.chain_upstream import (
    BATCH,
    DEPOSIT,
    SINGLE,
    TRANSFER,
    ZERO,
    Event,
    LittleChain,
    deposit,
    erc20,
    erc721,
    erc1155,
    word,
)
from tests.database import connected
from tests.follower.harness import (
    ART,
    COIN,
    GAME,
    HUGE,
    NETWORK,
    WETH,
    A,
    B,
    C,
    FollowerHarness,
    everything,
    follower_harness,
)
from tests.rpc_upstreams import REFUSALS
from tests.service import until


class BlockRecorder:
    """A sink that needs every block on its own and writes it to a table in the same transaction."""

    topics: frozenset[str] | None = None
    blocks = True
    transactions = True
    receipts = False

    async def create(self, database: str) -> None:
        async with connected(database) as connection:
            await connection.execute("create table recorded_blocks (block bigint primary key, hash bytea not null)")

    async def write(self, connection: DatabaseConnection, network: Followed, facts: Sequence[BlockFacts]) -> None:
        rows = [(piece.last, piece.hash) for piece in facts]
        assert all(piece.header is not None and piece.blocks == 1 for piece in facts)
        await connection.executemany("insert into recorded_blocks values ($1, $2)", rows)

    async def undo(
        self, connection: DatabaseConnection, network: Followed, stays: BlockId, removed: Sequence[BlockId]
    ) -> None:
        gone = await connection.fetch(
            "delete from recorded_blocks where block > $1 returning block, hash", stays.number
        )
        assert sorted(map(tuple, gone), reverse=True) == [(mark.number, mark.hash) for mark in removed]

    async def settle(self, connection: DatabaseConnection, network: Followed, below: int) -> None: ...

    async def forget(self, connection: DatabaseConnection, network: Followed) -> None:
        await connection.execute("delete from recorded_blocks")


async def test_index_matches_the_chain_for_every_kind_of_token(database: str) -> None:
    async with follower_harness(database) as harness, harness.leading() as (follower, term):
        harness.chain.mine(*everything())
        await follower.step(term)
        assert await harness.is_complete()
        assert await harness.indexed() == {
            (A, COIN): 700,
            (B, COIN): 200,
            (A, ART, HUGE.to_bytes(32, "big")): 1,
            (A, GAME, word_of(5)): 7,
            (A, WETH): 25,
            (C, WETH): 5,
        }


def word_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


async def test_new_network_starts_at_its_newest_final_block(database: str) -> None:
    chain = LittleChain()
    chain.mine(*([erc20(COIN, ZERO, A, 1)] for _ in range(200)))
    async with follower_harness(database, chain=chain) as harness, harness.leading(start=None) as (follower, term):
        await follower.step(term)
        finality = harness.route.network.facts.finality_blocks
        found = await harness.holdings.as_of(NETWORK)
        assert found is not None
        assert (found.first_block, found.block) == (200 - finality + 1, 200)
        assert await harness.indexed() == {(A, COIN): finality}


@pytest.mark.parametrize("depth", [1, 2, 7, 16])
async def test_dropped_blocks_are_undone(database: str, depth: int) -> None:
    async with follower_harness(database) as harness, harness.leading() as (follower, term):
        harness.chain.mine(*everything(), *everything(), *everything(), *everything())
        await follower.step(term)
        harness.chain.drop(depth)
        harness.chain.mine(*([erc20(COIN, ZERO, C, n + 1), erc721(ART, ZERO, C, 77 + n)] for n in range(depth + 1)))
        await follower.step(term)
        assert follower.cursor.number == 20 - depth
        await follower.step(term)
        assert await harness.is_complete()


async def test_shortened_chain_is_followed(database: str) -> None:
    """A different block at a lower height must be reported twice. A truncated chain must be reported `patience` times."""
    async with follower_harness(database) as harness, harness.leading() as (follower, term):
        harness.chain.mine(*everything(), *everything())
        await follower.step(term)
        harness.chain.drop(4)
        harness.chain.mine([erc20(COIN, ZERO, C, 1)])
        await follower.step(term)
        assert follower.cursor.number == 10, "one report may come from an upstream on an abandoned fork"
        await follower.step(term)
        await follower.step(term)
        assert await harness.is_complete()
        follower.patience = 20
        harness.chain.drop(3)
        for _ in range(follower.patience):
            await follower.step(term)
        assert follower.cursor.number == 7, "the upstream may only be behind"
        await follower.step(term)
        await follower.step(term)
        assert await harness.is_complete()


async def test_chain_counts_as_shortened_after_ten_minutes_at_least(database: str) -> None:
    async with follower_harness(database) as harness:
        follower = harness.follower()
        assert follower.patience * follower.rhythm.interval_s >= 590
        assert harness.follower(renews=True).patience < follower.patience


async def test_upstream_that_is_behind_undoes_nothing(database: str) -> None:
    async with follower_harness(database) as harness, harness.leading() as (follower, term):
        harness.chain.mine(*everything(), *everything())
        await follower.step(term)
        harness.upstream.behind = 3
        for _ in range(5):
            await follower.step(term)
        assert await harness.is_complete()


async def test_chain_can_be_replaced_down_to_its_first_block(database: str) -> None:
    async with follower_harness(database) as harness, harness.leading() as (follower, term):
        harness.chain.mine(*everything())
        await follower.step(term)
        fresh = LittleChain()
        harness.chain.blocks[:] = fresh.blocks
        harness.chain.mine(*(everything() * 2))
        await follower.step(term)
        await follower.step(term)
        assert await harness.is_complete()


async def test_reorganisation_deeper_than_can_be_undone_stops_the_network(database: str) -> None:
    async with follower_harness(database) as harness, harness.leading(keep=4) as (follower, term):
        harness.chain.mine(*(everything() * 12))
        await follower.step(term)
        before = await harness.indexed()
        harness.chain.drop(40)
        harness.chain.mine(*(everything() * 10))
        with pytest.raises(NoCommonBlock, match="--forget"):
            await follower.step(term)
        assert await harness.indexed() == before, "data that cannot be undone must stay"


async def follow_beyond_the_kept_blocks(harness: FollowerHarness) -> Tasks:
    """Start a follower, and reorganise more blocks than it can undo."""
    follower = harness.follower(keep=4)
    harness.chain.mine(*(everything() * 12))
    tasks = Tasks()
    tasks.start("follower", follower.run)
    await until(harness.is_complete, within_s=40.0)
    harness.chain.drop(40)
    harness.chain.mine(*(everything() * 10))
    return tasks


async def test_stopped_network_is_reported_in_fault_and_metrics(database: str) -> None:
    async with follower_harness(database) as harness:
        tasks = await follow_beyond_the_kept_blocks(harness)

        async def stopped() -> bool:
            found = await harness.holdings.as_of(NETWORK)
            return found is not None and found.fault is not None and "--forget" in found.fault

        await until(stopped, within_s=40.0)
        await until(lambda: telemetry.follower_stopped.labels(NETWORK)._value.get() == 1)
        await tasks.close()


async def test_follower_without_progress_is_stuck_until_it_moves(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = telemetry.follower_stuck.labels(NETWORK)._value
    async with follower_harness(database) as harness:
        tasks = Tasks()
        tasks.start("follower", harness.follower().run)
        harness.chain.mine(*everything())
        await until(harness.is_complete)
        readiness = Readiness(cast(Keyring, ()), {MAIN: harness.running.pool})
        readiness.start(tasks)
        assert readiness.state().degraded == ()
        harness.upstream.answers["eth_getLogs"] = lambda params: "no list"
        for _ in range(network_follower.STUCK_BLOCKS + 5):
            harness.chain.mine([erc20(COIN, A, B, 1)])
        await until(lambda: stuck.get() == 1, within_s=20.0)
        assert [*await until(harness.running.blocks.halted)] == [NETWORK]
        await until(lambda: readiness.state().degraded == (f"follower {NETWORK}",))
        del harness.upstream.answers["eth_getLogs"]
        await until(harness.is_complete)
        await until(lambda: stuck.get() == 0)
        assert await harness.running.blocks.halted() == {}
        await until(lambda: readiness.state().degraded == ())
        await tasks.close()
    messages = [record.message for record in caplog.records if record.name == "penstock.follower"]
    assert messages.count("follower is stuck") == messages.count("follower moves again") == 1
    assert messages.count("cannot read blocks") == 1


async def test_stuck_follower_that_steps_down_stays_stuck(
    database: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It steps down to let another process lead. Without one, it leads again, and nothing has changed."""
    for name, value in (("PAUSE_S", 0.05), ("LONGEST_PAUSE_S", 0.1), ("STEP_DOWN_S", 0.3)):
        monkeypatch.setattr(network_follower, name, value)
    caplog.set_level(logging.INFO, "penstock.follower")
    stuck = telemetry.follower_stuck.labels(NETWORK)._value
    async with follower_harness(database) as harness:
        tasks = Tasks()
        tasks.start("follower", harness.follower().run)
        harness.chain.mine(*everything())
        await until(harness.is_complete)
        harness.upstream.answers["eth_getLogs"] = lambda params: "no list"
        for _ in range(network_follower.STUCK_BLOCKS + 5):
            harness.chain.mine([erc20(COIN, A, B, 1)])

        def terms() -> int:
            return [record.message for record in caplog.records].count("following network")

        await until(lambda: stuck.get() == 1, within_s=20.0)
        then = terms()
        await until(lambda: terms() > then + 3, within_s=20.0)
        assert [*await harness.running.blocks.halted()] == [NETWORK]
        await until(lambda: stuck.get() == 1)
        del harness.upstream.answers["eth_getLogs"]
        await until(harness.is_complete)
        await until(lambda: stuck.get() == 0)
        assert await harness.running.blocks.halted() == {}
        await tasks.close()
    messages = [record.message for record in caplog.records if record.name == "penstock.follower"]
    assert messages.count("follower is stuck") == messages.count("follower moves again") == 1


def test_follower_that_has_just_started_is_not_stuck() -> None:
    progress = network_follower.FollowerProgress()
    progress.reason = "no upstream answers"
    assert not progress.is_stuck(0, 1e6)
    progress.began(1e6)
    assert not progress.is_stuck(5_000_000, 1e6 + network_follower.STUCK_S - 1)
    assert progress.is_stuck(0, 1e6 + network_follower.STUCK_S)
    progress.began(1e6 + 500)
    assert progress.is_stuck(0, 1e6 + 500)
    progress.reached(7, 9, 1e6 + 600)
    assert not progress.is_stuck(9, 1e6 + 600)
    progress.reason = "no logs"
    head = 9 + network_follower.STUCK_BLOCKS
    assert progress.is_stuck(head, 1e6 + 601)
    progress.reached(8, head, 1e6 + 602)  # one block of a batch that contained a bad one
    assert progress.is_stuck(head, 1e6 + 602)
    progress.reached(7 + network_follower.STUCK_BLOCKS, head, 1e6 + 603)
    assert not progress.is_stuck(head, 1e6 + 603)


async def test_parent_that_the_upstream_does_not_know_is_read_by_number(database: str) -> None:
    """`hardhat_mine` makes blocks that report no parent."""
    async with follower_harness(database) as harness, harness.leading() as (follower, term):
        harness.chain.mine(*everything())
        await follower.step(term)
        harness.chain.mine(*everything())
        harness.chain.hide_parents(7)
        await follower.step(term)
        assert await harness.is_complete()
        harness.chain.drop(4)
        harness.chain.mine(*everything())
        harness.chain.hide_parents(7)
        await follower.step(term)
        await follower.step(term)
        assert await harness.is_complete()


async def test_stopped_network_is_followed_again_once_its_index_is_deleted(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_follower, "STOPPED_S", 0.2)
    async with follower_harness(database) as harness:
        tasks = await follow_beyond_the_kept_blocks(harness)
        await until(lambda: telemetry.follower_stopped.labels(NETWORK)._value.get() == 1, within_s=40.0)
        async with harness.running.blocks.backfill(NETWORK) as term:
            await forget(term, [*harness.running.sinks, harness.running.transfers(harness.route)])
        await until(harness.is_complete, within_s=40.0)
        found = await harness.holdings.as_of(NETWORK)
        assert found is not None
        assert found.fault is None
        await tasks.close()


async def test_index_that_was_deleted_is_noticed_without_a_new_block(database: str) -> None:
    async with follower_harness(database) as harness, harness.leading() as (follower, term):
        harness.chain.mine(*everything())
        await follower.step(term)
        for _ in range(2 * network_follower.HEADS_PER_READ):
            await follower.step(term)
        await forget(term, [*harness.running.sinks, harness.running.transfers(harness.route)])

        async def go_on() -> None:
            for _ in range(2 * network_follower.HEADS_PER_READ):
                await follower.step(term)

        with pytest.raises(LeadershipLost):
            await go_on()


async def test_development_service_resets_the_index_instead(database: str) -> None:
    async with follower_harness(database) as harness, harness.leading(keep=4, renews=True) as (follower, term):
        harness.chain.mine(*(everything() * 12))
        await follower.step(term)
        harness.chain.blocks[:] = LittleChain().blocks
        harness.chain.mine(*everything())
        for _ in range(2):
            try:
                await follower.step(term)
            except NoCommonBlock as exc:
                await follower._stop(term, str(exc))
        await follower.step(term)
        assert await harness.is_complete()


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_far_head_is_reached_in_ranges_despite_refusals(database: str, refusal: str) -> None:
    chain = LittleChain()
    chain.mine(*(everything() * 24))
    async with follower_harness(database, chain=chain) as harness, harness.leading(keep=10) as (follower, term):
        harness.upstream.max_range, harness.upstream.refusal = 5, refusal
        await follower.step(term)
        assert await harness.is_complete()
        requested = [call.params[0] for call in harness.upstream.calls if call.method == "eth_getLogs"]
        ranges = [params for params in requested if "fromBlock" in params]
        assert 110 // 5 <= len(ranges) <= 110 // 2 + 8
        assert len(requested) - len(ranges) == 10 or all("blockHash" in params for params in requested[-10:])
        harness.chain.drop(10)
        harness.chain.mine(*(everything() * 3))
        await follower.step(term)
        await follower.step(term)
        assert await harness.is_complete()


async def test_ranges_grow_while_logs_are_few_and_shrink_when_there_are_too_many(database: str) -> None:
    chain = LittleChain()
    chain.mine(
        *([] for _ in range(2000)), *([erc20(COIN, ZERO, A, 1)] * 9 for _ in range(40)), *([] for _ in range(10))
    )
    async with follower_harness(database, chain=chain) as harness, harness.leading(keep=10) as (follower, term):
        harness.upstream.max_logs = 50
        await follower.step(term)
        assert await harness.is_complete()
        ranges = [
            call for call in harness.upstream.calls if call.method == "eth_getLogs" and "fromBlock" in call.params[0]
        ]
        assert len(ranges) < 80


async def test_sink_of_single_blocks_gets_each_once_in_order_and_each_removal(database: str) -> None:
    recorder = BlockRecorder()
    await recorder.create(database)
    async with follower_harness(database) as harness, harness.leading(recorder, keep=8) as (follower, term):
        harness.chain.mine(*(everything() * 8))
        await follower.step(term)
        for depth in (1, 5, 8):
            harness.chain.drop(depth)
            harness.chain.mine(*(everything() * 2))
            await follower.step(term)
            await follower.step(term)
            assert await harness.is_complete()
            async with connected(database) as connection:
                rows = await connection.fetch("select block, hash from recorded_blocks order by block")
            assert [("0x" + row["hash"].hex()) for row in rows] == [block.hash for block in harness.chain.blocks]


class FailingSink(BlockRecorder):
    """Fails after it has written."""

    fails = True

    async def write(self, connection: DatabaseConnection, network: Followed, facts: Sequence[BlockFacts]) -> None:
        await super().write(connection, network, facts)
        if self.fails:
            raise asyncpg.IntegrityConstraintViolationError("no")


async def test_failing_sink_rolls_back_the_whole_block(database: str) -> None:
    sink = FailingSink()
    await sink.create(database)
    async with follower_harness(database) as harness, harness.leading(sink) as (follower, term):
        harness.chain.mine(*everything())
        with pytest.raises(asyncpg.IntegrityConstraintViolationError):
            await follower.step(term)
        assert await harness.indexed() == {}
        assert (await harness.cursor() or (0,))[0] == -1
        sink.fails = False
        await follower.step(term)
        assert await harness.is_complete()


def malformed_logs() -> list[Event]:
    who = "0x" + word(A)
    dirty = "0x" + "f" * 64
    return [
        Event(COIN, ()),
        Event(COIN, (TRANSFER,), word(1) * 3),
        Event(COIN, (TRANSFER, who), word(1)),
        Event(COIN, (TRANSFER, who, who), ""),
        Event(COIN, (TRANSFER, who, who), "ff"),
        Event(COIN, (TRANSFER, dirty, who), word(1)),
        Event(ART, (TRANSFER, who, dirty, dirty)),
        Event(GAME, (SINGLE, who, who), word(1) * 2),
        Event(GAME, (SINGLE, who, who, who), word(1)),
        Event(GAME, (BATCH, who, who, who), ""),
        Event(GAME, (BATCH, who, who, who), word(HUGE) + word(HUGE)),
        Event(GAME, (BATCH, who, who, who), word(64) + word(64) + word(HUGE)),
        Event(GAME, (BATCH, who, who, who), word(64) + word(96) + word(0) + word(1) + word(9)),
        Event(GAME, (BATCH, who, who, who), word(65) + word(64) + word(0)),
        Event(WETH, (DEPOSIT, who, who), word(1)),
        Event(WETH, (DEPOSIT, who), ""),
        Event(COIN, ("0x" + "ab" * 32, who, who), word(1)),
    ]


async def test_malformed_logs_are_skipped(database: str) -> None:
    async with follower_harness(database) as harness, harness.leading() as (follower, term):
        harness.chain.mine(malformed_logs(), [*malformed_logs(), erc20(COIN, ZERO, A, 3)])
        await follower.step(term)
        assert await harness.indexed() == {(A, COIN): 3}


async def test_amounts_beyond_256_bits_and_below_zero_are_kept_exactly(database: str) -> None:
    async with follower_harness(database) as harness, harness.leading() as (follower, term):
        harness.chain.mine([erc20(COIN, ZERO, A, HUGE)], [erc20(COIN, ZERO, A, HUGE), erc20(COIN, B, C, 10**77)])
        harness.chain.mine([erc1155(GAME, ZERO, A, HUGE, HUGE), erc1155(GAME, ZERO, A, HUGE, HUGE)])
        await follower.step(term)
        assert await harness.is_complete()
        harness.chain.drop(2)
        harness.chain.mine([], [], [])
        await follower.step(term)
        await follower.step(term)
        assert await harness.indexed() == {(A, COIN): HUGE}


async def test_wrapped_coin_that_emits_a_transfer_as_well_is_counted_once(database: str) -> None:
    """Both logs are in the same transaction and have its hash."""
    async with follower_harness(database) as harness, harness.leading() as (follower, term):
        both = [erc20(WETH, ZERO, A, 9), deposit(WETH, A, 9)]
        harness.chain.mine(both, [deposit(WETH, A, 4)])
        logs = harness.chain.blocks[1].logs()
        for log in logs:
            log["transactionHash"] = "0x" + "77" * 32
        others = harness.chain.blocks[2].logs()
        found = {harness.chain.blocks[1].hash: logs, harness.chain.blocks[2].hash: others}
        harness.upstream.answers["eth_getLogs"] = lambda params: found.get(params[0]["blockHash"], [])
        await follower.step(term)
        assert await harness.indexed() == {(A, WETH): 13}


async def test_two_writers_cannot_both_write_a_block(database: str) -> None:
    """Even without the lock: a transaction that expects another cursor changes nothing."""
    async with follower_harness(database) as harness, harness.leading() as (one, term):
        harness.chain.mine(*everything())
        other = harness.follower()
        await one.step(term)
        await other.step(term)
        harness.chain.mine(*everything())
        await one.step(term)
        with pytest.raises(LeadershipLost):
            await other.step(term)
        assert await harness.is_complete()


async def test_each_commit_sends_a_notification(database: str) -> None:
    async with (
        follower_harness(database) as harness,
        harness.leading() as (follower, term),
        connected(database) as connection,
    ):
        received: list[object] = []
        await connection.add_listener("penstock_blocks", lambda *given: received.append(given[3]))
        harness.chain.mine(*everything())
        await follower.step(term)
        await connection.execute("select 1")
        assert received[-1] == f"{NETWORK} 5"


async def test_index_completes_with_one_upstream_dead_and_one_behind(database: str) -> None:
    async with follower_harness(database, upstreams=3) as harness, harness.leading() as (follower, term):
        harness.upstreams[2].behind = 2
        await harness.upstreams[1].close()
        harness.chain.mine(*(everything() * 4))
        await _until_complete(harness, follower, term)
        harness.chain.drop(3)
        harness.chain.mine(*(everything() * 2))
        await _until_complete(harness, follower, term)


async def _until_complete(harness: FollowerHarness, follower: object, term: object, steps: int = 60) -> None:
    for _ in range(steps):
        try:
            await follower.step(term)  # type: ignore[attr-defined]
        except ReadFailed:
            await asyncio.sleep(0.1)
        if await harness.is_complete():
            return
    raise AssertionError("the index never matched the chain")
