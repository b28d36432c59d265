"""Webhook events: created with their blocks, enriched afterwards, and corrected when the chain drops blocks."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import asyncpg
import orjson
import pytest

from proxy.chains.evm.payloads import EventToken
from proxy.chains.registry import Network
from proxy.compose.webhooks import EventFeature
from proxy.core import webhook_bodies
from proxy.core.paging import Page
from proxy.services.events import enrichment
from proxy.services.events.mined_lookups import CALLS_PER_LOOKUP
from proxy.services.events.watch import WebhookWatch
from proxy.services.follower.sinks import StaleRead
from proxy.store.postgres.deliveries import DeliveryStore
from proxy.store.postgres.webhooks import AddressChange
from proxy.web.rest.deliveries import _shown
from tests.chain_upstream import TRANSFER, Event, erc20, erc721, erc1155_batch, word
from tests.database import connected
from tests.follower.event_harness import (
    ART,
    COIN,
    GAME,
    A,
    B,
    C,
    EventHarness,
    event_harness,
    transaction,
    with_transaction,
)
from tests.follower.harness import NETWORK, follower_harness
from tests.isolation.loop_steps import LONGEST_STEP_S, LoopSteps
from tests.service import until
from tests.shapes import conforms


async def test_log_webhook_gets_matching_logs_with_their_position(harness: EventHarness) -> None:
    await harness.step()
    webhook = await harness.webhook("log", addresses=["0x" + COIN.hex()], topics=[TRANSFER, None, "0x" + word(B)])
    await harness.mine([erc20(COIN, A, B, 5), erc20(COIN, A, C, 6), erc20(ART, A, B, 7)], [erc20(COIN, C, B, 8)])
    first, second = await harness.bodies()
    assert first["event_type"] == "log"
    assert first["webhook_id"] == webhook.id
    assert [each["data"]["block_number"] for each in (first, second)] == [1, 2]
    assert [int(each["data"]["data"], 16) for each in (first, second)] == [5, 8]
    assert first["data"]["log_index"] == 0
    assert first["data"]["chain"] == "dev-testnet"


async def test_webhook_gets_events_of_blocks_after_its_creation_only(harness: EventHarness) -> None:
    await harness.mine([erc721(ART, A, B, 1)])
    await harness.webhook("nft_transfer", contracts=["0x" + ART.hex()])
    await harness.mine([erc721(ART, B, C, 1)])
    (body,) = await harness.bodies()
    assert body["data"]["block_number"] == 2


async def test_webhook_created_between_reading_and_writing_is_not_missed(harness: EventHarness) -> None:
    """The block was read without its logs, because no webhook needed them, so it is read repeated."""
    await harness.step()
    approval = Event(COIN, ("0x" + "ab" * 32,), word(1))
    harness.inner.chain.mine([approval])
    piece = await harness.inner.running.reader(harness.inner.route, harness.follower._sinks).block(1)
    assert not piece.logs
    await harness.webhook("log", addresses=["0x" + COIN.hex()])
    with pytest.raises(StaleRead):
        await harness.follower._write(harness.term, [piece])
    await harness.step()
    assert len(await harness.bodies()) == 1


async def test_several_transfers_of_one_log_are_separate_events(harness: EventHarness) -> None:
    await harness.webhook("nft_transfer", addresses=["0x" + B.hex()])
    await harness.mine([erc1155_batch(GAME, A, B, [(1, 10), (2, 20), (2, 20)])])
    bodies = await harness.bodies()
    assert sorted((each["data"]["token_id"], each["data"]["quantity"]) for each in bodies) == [
        ("1", 10), ("2", 20), ("2", 20),
    ]  # fmt: skip
    assert len({each["id"] for each in bodies}) == 3


async def test_event_of_a_cached_token_is_due_immediately_and_of_another_after_enrichment(
    harness: EventHarness,
) -> None:
    await harness.webhook("TOKEN_TRANSFER", contracts=["0x" + COIN.hex(), "0x" + ART.hex()], min_value="5")
    harness.events.drafter.tokens[COIN] = EventToken("COIN", 2)
    await harness.mine([erc20(COIN, A, B, 4), erc20(COIN, A, B, 512), erc20(ART, A, B, 6)])
    (body,) = await harness.bodies()
    assert body["type"] == "TOKEN_TRANSFER"
    assert body["chainId"] == 31337
    assert body["data"]["token"]["symbol"] == "COIN"
    assert body["data"]["valueFormatted"] == "5.12"
    (lacking,) = await harness.rows("select lacks from events where lacks is not null")
    assert orjson.loads(lacking["lacks"]) == {"token": "0x" + ART.hex()}


async def test_address_that_sends_to_itself_has_two_events(harness: EventHarness) -> None:
    await harness.webhook("address_activity", addresses=["0x" + A.hex()])
    harness.events.drafter.tokens[COIN] = EventToken("COIN", 2)
    await harness.mine([erc20(COIN, A, A, 4)])
    assert sorted(each["data"]["direction"] for each in await harness.bodies()) == ["incoming", "outgoing"]


async def test_new_block_event_is_created_once_for_each_block(harness: EventHarness) -> None:
    await harness.step()
    await harness.webhook("NEW_BLOCK")
    await harness.mine([], [])
    bodies = await harness.bodies()
    assert [each["data"]["blockNumber"] for each in bodies] == [1, 2]
    assert bodies[0]["data"]["blockHash"] == harness.inner.chain.blocks[1].hash
    assert bodies[0]["data"]["timestamp"] == "2023-11-14T22:13:21Z"


async def test_same_event_always_gets_the_same_id(harness: EventHarness) -> None:
    """A writer that repeats the work of one that died before the commit creates the same events."""
    await harness.webhook("nft_transfer", contracts=["0x" + ART.hex()])
    harness.inner.chain.mine([erc721(ART, A, B, 1)])
    reader = harness.inner.running.reader(harness.inner.route, harness.follower._sinks)
    await harness.step()
    (before,) = await harness.bodies()
    pieces = [await reader.block(1)]
    assert harness.events.sink._events(pieces[0])[0].id == before["id"]
    assert before["id"] == webhook_bodies.event_id(
        before["webhook_id"],
        "nft_transfer",
        NETWORK,
        harness.inner.chain.blocks[1].hash,
        before["data"]["tx_hash"],
        "0x0",
    )


# Reorganisations


async def test_delivered_event_of_a_dropped_block_is_corrected(harness: EventHarness) -> None:
    await harness.webhook("nft_transfer", contracts=["0x" + ART.hex()])
    await harness.mine([], [erc721(ART, A, B, 1)])
    (first,) = await harness.bodies()
    await harness.deliver()
    harness.inner.chain.drop(1)
    await harness.mine([erc721(ART, A, C, 1)], [])
    await harness.step()
    correction, second = await harness.bodies()
    assert correction["event_type"] == "correction"
    assert correction["data"] == {
        "chain": "dev-testnet",
        "takes_back": first["id"],
        "event_type": "nft_transfer",
        "reason": "reorg",
        "event": first["data"],
    }
    assert second["event_type"] == "nft_transfer"
    assert second["id"] != first["id"]
    rows = await harness.rows("select takes_back, taken_back from events where takes_back is not null or taken_back")
    assert sorted(map(str, (row["takes_back"] for row in rows))) == sorted(["None", first["id"]])


async def test_correction_in_format_b_names_the_withdrawn_event(harness: EventHarness) -> None:
    await harness.webhook("NEW_BLOCK")
    await harness.mine([], [])
    before = {each["data"]["blockHash"]: each["id"] for each in await harness.bodies()}
    await harness.deliver()
    dropped = harness.inner.chain.blocks[-1].hash
    harness.inner.chain.drop(1)
    await harness.mine([], [])
    await harness.step()
    (correction,) = [each for each in await harness.bodies() if each["type"] == "CORRECTION"]
    assert correction["data"]["takesBack"] == before[dropped]
    assert correction["data"]["eventType"] == "NEW_BLOCK"


async def test_undelivered_event_of_a_dropped_block_is_removed_without_a_correction(harness: EventHarness) -> None:
    await harness.webhook("nft_transfer", contracts=["0x" + ART.hex()])
    await harness.mine([], [erc721(ART, A, B, 1)])
    harness.inner.chain.drop(1)
    await harness.mine([erc721(ART, A, C, 1)], [])
    await harness.step()
    (body,) = await harness.bodies()
    assert body["event_type"] == "nft_transfer"
    assert body["data"]["to"].lower() == "0x" + C.hex()


async def test_event_in_delivery_is_not_retried_once_it_is_withdrawn(harness: EventHarness) -> None:
    await harness.webhook("nft_transfer", contracts=["0x" + ART.hex()])
    await harness.mine([], [erc721(ART, A, B, 1)])
    async with connected(harness.inner.database) as connection:
        await connection.execute("update deliveries set claim = 1")
    harness.inner.chain.drop(1)
    await harness.mine([], [])
    await harness.step()
    (correction,) = await harness.bodies()
    assert correction["event_type"] == "correction"
    assert len(await harness.bodies("dropped")) == 1


async def test_owner_sees_withdrawn_events_and_cannot_redeliver_them(harness: EventHarness) -> None:
    """One event was in delivery and one was delivered when their block was dropped."""
    webhook = await harness.webhook("nft_transfer", contracts=["0x" + ART.hex()])
    await harness.mine([], [erc721(ART, A, B, 1), erc721(ART, A, B, 2)])
    bodies = [each["id"] for each in await harness.bodies()]
    async with connected(harness.inner.database) as connection:
        await connection.execute("update deliveries set claim = 1")
        await connection.execute("update deliveries set state = 'delivered' where event_id = $1", bodies[0])
    harness.inner.chain.drop(1)
    await harness.mine([], [])
    await harness.step()
    deliveries = DeliveryStore(harness.inner.running.pool)
    found, _ = await deliveries.page(webhook.id, Page(1, 25), state=None, since=None)
    shown = {each.event_id: _shown(each) for each in found}
    for each in shown.values():
        conforms(each, "Delivery")
    assert [shown[name]["status"] for name in bodies] == ["delivered", "taken_back"]
    assert [await deliveries.redeliver(webhook.id, name) for name in bodies] == [False, False]
    long_ago, present = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=n) for n in (-1, 1))
    for state in (None, "delivered", "dropped"):
        assert await deliveries.redeliver_since(webhook.id, long_ago, present, state=state) == 0
    await harness.deliver()
    assert await deliveries.redeliver_since(webhook.id, long_ago, present, state=None) == 2  # the corrections


async def test_event_that_returns_after_it_was_withdrawn_gets_a_new_id(harness: EventHarness) -> None:
    """The chain switches to another fork and back. With the first id receivers would discard it as a duplicate."""
    await harness.webhook("nft_transfer", contracts=["0x" + ART.hex()])
    chain = harness.inner.chain
    await harness.mine([], [erc721(ART, A, B, 1)])
    branch = chain.blocks[-1]
    (first,) = await harness.bodies()
    await harness.deliver()
    chain.drop(1)
    await harness.mine([], [])
    await harness.step()
    chain.drop(2)
    chain.blocks.append(branch)
    await harness.mine([], [], [])
    await harness.step()
    repeated = [each for each in await harness.bodies() if each["event_type"] == "nft_transfer"]
    assert [each["data"] for each in repeated] == [first["data"]]
    assert repeated[0]["id"] != first["id"]


# Changes of webhooks


async def test_events_of_a_paused_webhook_are_kept_until_it_is_resumed(harness: EventHarness) -> None:
    webhook = await harness.webhook("nft_transfer", contracts=["0x" + ART.hex()])
    await harness.store.move(webhook, "pause")
    await harness.mine([erc721(ART, A, B, 1)])
    assert await harness.bodies() == []
    assert len(await harness.bodies("parked")) == 1
    await harness.store.move(webhook, "activate")
    assert len(await harness.bodies()) == 1


@pytest.mark.parametrize("cause", ["delete", "gone"])
async def test_deleted_or_disabled_webhook_gets_no_events(harness: EventHarness, cause: Any) -> None:
    webhook = await harness.webhook("nft_transfer", contracts=["0x" + ART.hex()])
    await harness.mine([erc721(ART, A, B, 1)])
    await harness.store.move(webhook, cause)
    await harness.mine([erc721(ART, B, C, 1)])
    assert len(await harness.rows("select from events")) == 1
    assert len(harness.events.watch.index) == 0


async def test_addresses_are_added_and_removed_between_two_blocks(harness: EventHarness) -> None:
    webhook = await harness.webhook("nft_transfer", addresses=["0x" + A.hex()])
    await harness.mine([erc721(ART, C, A, 1)])
    await harness.store.update(webhook, delta=AddressChange(add=[B], remove=[A], most=10))
    await harness.mine([erc721(ART, C, A, 2), erc721(ART, C, B, 3)])
    await harness.store.update(webhook, delta=AddressChange(add=[A], remove=[B], most=10))
    await harness.store.update(webhook, delta=AddressChange(add=[B], remove=[], most=10))
    await harness.mine([erc721(ART, C, A, 4), erc721(ART, C, B, 5)])
    assert [each["data"]["token_id"] for each in await harness.bodies()] == ["1", "3", "4", "5"]


async def test_webhooks_are_loaded_after_a_restart(database: str) -> None:
    async with event_harness(database) as first:
        webhook = await first.webhook("nft_transfer", addresses=["0x" + A.hex()])
        await first.mine([])
        await first.store.update(webhook, delta=AddressChange(add=[B], remove=[A], most=10))
        chain = first.inner.chain
        await first.mine([])
    async with follower_harness(database, chain=chain) as repeated:
        events = repeated.running.events(repeated.route)
        async with repeated.running.pool.connection() as connection, connection.transaction():
            await events.watch.hold(connection)
        assert [*events.watch.index.tables.nft_side] == [B]


async def test_partially_loaded_webhooks_are_loaded_again(harness: EventHarness) -> None:
    """Their addresses cannot be read at first. Afterwards they must not count as having none."""
    await harness.step()
    await harness.webhook("nft_transfer", addresses=["0x" + A.hex()])
    watch = harness.events.watch
    async with connected(harness.inner.database) as connection:
        await connection.execute("alter table watched_addresses rename to elsewhere")
        async with harness.inner.running.pool.connection() as reading:
            with pytest.raises(asyncpg.UndefinedTableError):
                await watch.hold(reading)
        assert len(watch.index) == 0
        await connection.execute("alter table elsewhere rename to watched_addresses")
    await harness.mine([erc721(ART, B, A, 1)])
    assert len(await harness.bodies()) == 1


async def test_notifications_refresh_the_webhooks_between_blocks(harness: EventHarness) -> None:
    watch = harness.events.watch
    tasks = harness.inner.running.tasks
    tasks.start("webhooks", lambda: watch.follow(harness.inner.running.pool, harness.inner.running.notifications))
    await harness.webhook("nft_transfer", contracts=["0x" + ART.hex()])
    await until(lambda: len(watch.index))


async def test_notification_sets_every_event_even_if_another_was_cleared(harness: EventHarness) -> None:
    notifications = harness.inner.running.notifications
    one, other = (
        notifications.event_for("penstock_events", NETWORK),
        notifications.event_for("penstock_events", NETWORK),
    )
    await until(lambda: one.is_set() and other.is_set())  # set once when listening starts
    one.clear()
    other.clear()
    await harness.rows(f"select pg_notify('penstock_events', '{NETWORK}')")
    await until(one.is_set)
    one.clear()
    await until(other.is_set)
    assert not one.is_set()


# Enrichment


async def test_event_waits_for_the_receipt_of_its_own_block(harness: EventHarness) -> None:
    name = "0x" + "77" * 32
    with_transaction(harness, name)
    await harness.step()
    await harness.webhook("mined_transaction", tx_hashes=[name])
    await harness.mine([])
    enricher = harness.events.enricher
    answers = harness.inner.upstream.answers
    # Replies are cached once the head is known. The receipts must not be: no further block discards them.
    await until(lambda: harness.inner.route.heads.tip == 1)
    own = {"blockHash": harness.inner.chain.blocks[1].hash, "blockNumber": "0x1", "status": "0x0", "gasUsed": "0x5208"}
    for receipt in (None, {**own, "blockHash": "0x" + "00" * 32}):
        answers["eth_getTransactionReceipt"] = partial(lambda receipt, _: receipt, receipt)
        enricher.start_over()
        await enricher.enrich()
        assert await harness.bodies() == []
    answers["eth_getTransactionReceipt"] = lambda _: own
    enricher.start_over()
    await enricher.enrich()
    (body,) = await harness.bodies()
    assert (body["data"]["status"], body["data"]["gas_used"]) == ("failed", 21_000)


async def test_incomplete_events_are_skipped_and_do_not_block_later_ones(
    harness: EventHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more of them than fit into a batch, and they are older. Later events are due before them."""
    monkeypatch.setattr(enrichment, "BATCH", 2)
    name = "0x" + "77" * 32
    with_transaction(harness, name)
    await harness.step()
    await harness.webhook("mined_transaction", tx_hashes=[name])
    await harness.mine(*[[]] * 5)
    await harness.webhook("TOKEN_TRANSFER", contracts=["0x" + COIN.hex()])
    answers = harness.inner.upstream.answers
    answers["eth_getTransactionReceipt"] = lambda _: None
    answers["eth_call"] = lambda _: "0x"
    await harness.mine([erc20(COIN, A, B, 5)])
    rounds = 1
    while await harness.events.enricher.enrich():
        rounds += 1
    assert rounds == 4
    assert [each["type"] for each in await harness.bodies()] == ["TOKEN_TRANSFER"]
    assert repr(harness.events.enricher).endswith("some skipped>")
    # According to its receipt the transaction is in the last block; the other events keep waiting.
    last = harness.inner.chain.blocks[-1].hash
    own = {"blockHash": last, "blockNumber": "0x6", "status": "0x1", "gasUsed": "0x5208"}
    answers["eth_getTransactionReceipt"] = lambda _: own
    harness.events.enricher.start_over()
    while await harness.events.enricher.enrich():
        pass
    assert len(await harness.bodies()) == 2
    assert len(await harness.rows("select from events where lacks is not null")) == 5


async def test_slow_metadata_of_one_account_does_not_delay_events_of_another(
    harness: EventHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enrichment, "METADATA_S", 60.0)
    gate = asyncio.Event()

    class HangingNfts:
        async def read(self, network: Network, contract: bytes, token_id: int) -> dict[str, Any]:
            if contract == ART:
                await gate.wait()
            return {"name": "Found", "description": None, "image_url": None, "image_gateway_url": None, "traits": []}

    running = harness.inner.running
    events = EventFeature(
        harness.inner.route, running.pool, running.notifications, running.internal_calls,
        tokens=harness.inner.running.data.contracts, nfts=HangingNfts(), plans=running.tables.plans,
    )  # fmt: skip
    await harness.step()
    await harness.webhook("NFT_ACTIVITY", account="slow", contracts=["0x" + ART.hex()])
    await harness.webhook("NFT_ACTIVITY", account="other", contracts=["0x" + GAME.hex()])
    many = 3 * enrichment.NFT_BATCH
    await harness.mine([erc721(ART, B, A, token) for token in range(many)])
    running.tasks.start("metadata", lambda: events.metadata.run(running.notifications, lambda: True), of="test")

    async def due() -> list[str]:
        return [each["data"]["contract"].lower() for each in await harness.bodies()]

    for count in (1, 2):
        await harness.mine([erc721(GAME, B, A, count)])
        await until(lambda count=count: is_count(due, count))
    assert await due() == 2 * ["0x" + GAME.hex()]
    gate.set()
    await until(lambda: is_count(due, many + 2))


async def is_count(found: Callable[[], Awaitable[list[str]]], count: int) -> bool:
    return len(await found()) == count


MINED = "0x" + "79" * 32


def with_receipts(harness: EventHarness, block: int) -> None:
    """The transaction is in this block."""
    mined = harness.inner.chain.blocks[block]
    at = {"blockHash": mined.hash, "blockNumber": hex(block)}
    answers = harness.inner.upstream.answers
    answers["eth_getTransactionByHash"] = lambda _: {**transaction(MINED, A, B, 5), **at}
    answers["eth_getTransactionReceipt"] = lambda _: {**at, "status": "0x1", "gasUsed": "0x5208"}


async def test_transaction_that_was_mined_before_its_webhook_is_sent_once(harness: EventHarness) -> None:
    await harness.mine([], [])
    with_receipts(harness, 1)
    await harness.webhook("mined_transaction", tx_hashes=[MINED.upper().replace("X", "x")])
    for _ in range(2):
        assert await harness.events.mined_lookups.look_up()
        await harness.events.enricher.enrich()
    (body,) = await harness.bodies()
    assert (body["data"]["tx_hash"], body["data"]["block_number"], body["data"]["status"]) == (MINED, 1, "success")
    assert not await harness.rows("select from mined_lookups")


async def test_confirmations_of_a_transaction_that_was_mined_before_are_counted(harness: EventHarness) -> None:
    await harness.mine([], [])
    with_receipts(harness, 2)
    await harness.webhook("MINED_TRANSACTION", tx_hashes=[MINED], confirmations=2)
    await harness.webhook("MINED_TRANSACTION", tx_hashes=[MINED], confirmations=1)
    await harness.events.mined_lookups.look_up()
    await harness.events.enricher.enrich()
    assert [body["data"]["confirmations"] for body in await harness.bodies()] == [1]
    await harness.mine([])
    assert sorted(body["data"]["confirmations"] for body in await harness.bodies()) == [1, 2]


async def test_transaction_in_a_block_that_arrives_meanwhile_is_sent_once(harness: EventHarness) -> None:
    """The lookup finds it in a block that the follower has not written, or has written with the webhook."""
    await harness.mine([])
    await harness.webhook("mined_transaction", tx_hashes=[MINED])
    harness.inner.chain.mine([])
    with_receipts(harness, 2)
    with_transaction(harness, MINED, only=2)
    assert await harness.events.mined_lookups.look_up()
    assert not await harness.rows("select from events")
    await harness.step()
    async with connected(harness.inner.database) as connection:
        await connection.execute("insert into mined_lookups select id, network, $1 from webhooks", MINED)
    assert await harness.events.mined_lookups.look_up()
    await harness.events.enricher.enrich()
    assert len(await harness.bodies()) == 1


async def test_lookup_on_another_fork_waits_and_an_unknown_transaction_is_given_up(harness: EventHarness) -> None:
    await harness.mine([], [])
    with_receipts(harness, 2)
    answers = harness.inner.upstream.answers
    fork = {**transaction(MINED, A, B, 5), "blockHash": "0x" + "12" * 32, "blockNumber": "0x2"}
    answers["eth_getTransactionByHash"] = lambda _: fork
    await harness.webhook("mined_transaction", tx_hashes=[MINED])
    assert not await harness.events.mined_lookups.look_up()
    answers["eth_getTransactionByHash"] = lambda _: None
    assert not await harness.events.mined_lookups.look_up()
    async with connected(harness.inner.database) as connection:
        await connection.execute("update mined_lookups set created_at = now() - interval '1 minute'")
    assert await harness.events.mined_lookups.look_up()
    assert not await harness.rows("select from events")


async def test_unknown_transactions_are_asked_for_twice_however_often_the_loop_wakes(harness: EventHarness) -> None:
    await harness.mine([])
    asked: list[object] = []
    harness.inner.upstream.answers["eth_getTransactionByHash"] = lambda params: asked.append(params)
    await harness.webhook("mined_transaction", tx_hashes=[f"0x{number:064x}" for number in range(60)])
    for _ in range(5):
        assert not await harness.events.mined_lookups.look_up()
    assert len(asked) == 60
    async with connected(harness.inner.database) as connection:
        await connection.execute("update mined_lookups set created_at = now() - interval '9 seconds'")
    for _ in range(3):
        assert await harness.events.mined_lookups.look_up()
    assert len(asked) == 60 * CALLS_PER_LOOKUP


async def test_lookups_of_many_transactions_leave_turns_to_other_accounts(harness: EventHarness) -> None:
    await harness.mine([])
    asked: list[str] = []
    harness.inner.upstream.answers["eth_getTransactionByHash"] = lambda params: asked.append(params[0])
    for _ in range(3):
        await harness.webhook("mined_transaction", tx_hashes=[f"0x{number:064x}" for number in range(100)])
    async with connected(harness.inner.database) as connection:
        await connection.execute(
            "insert into accounts (id, name, email, plan) values ('acct_other', 'N', 'other@example.com', 'free')"
        )
    hook = await harness.webhook("mined_transaction", tx_hashes=[MINED])
    async with connected(harness.inner.database) as connection:
        await connection.execute("update webhooks set account_id = 'acct_other' where id = $1", hook.id)
    await harness.events.mined_lookups.look_up()
    assert len(asked) == 301
    assert asked.index(MINED) < 50, "in the first batch"


async def test_new_config_looks_up_only_its_new_transactions(harness: EventHarness) -> None:
    hook = await harness.webhook("mined_transaction", tx_hashes=[MINED, "0x" + "01" * 32])
    assert await harness.rows("delete from mined_lookups where tx_hash like '0x79%' returning 1")
    await harness.store.update(hook, config={"tx_hashes": [MINED, "0x" + "02" * 32]})
    assert await harness.rows("select tx_hash from mined_lookups") == [{"tx_hash": "0x" + "02" * 32}]


async def test_failed_transaction_is_no_activity_in_format_b(harness: EventHarness) -> None:
    name = "0x" + "78" * 32
    with_transaction(harness, name)
    await harness.step()
    await harness.webhook("ADDRESS_ACTIVITY", addresses=["0x" + B.hex()])
    await harness.mine([])
    hash_ = harness.inner.chain.blocks[1].hash
    harness.inner.upstream.answers["eth_getTransactionReceipt"] = lambda _: {
        "blockHash": hash_, "blockNumber": "0x1", "status": "0x0", "gasUsed": "0x5208",
    }  # fmt: skip
    await harness.events.enricher.enrich()
    assert await harness.rows("select from events") == []


async def test_event_of_a_token_without_symbol_has_no_symbol(harness: EventHarness) -> None:
    await harness.webhook("token_transfer", contracts=["0x" + COIN.hex()])
    harness.inner.upstream.answers["eth_call"] = lambda _: "0x"
    await harness.mine([erc20(COIN, A, B, 5)])
    await harness.events.enricher.enrich()
    (body,) = await harness.bodies()
    assert (body["data"]["symbol"], body["data"]["decimals"]) == (None, None)


async def test_long_list_of_addresses_is_loaded_in_short_steps(harness: EventHarness) -> None:
    """Blocks of other networks, and webhooks of others, do not wait for one list."""
    pool = harness.inner.running.pool
    named = [f"0x{number:040x}" for number in range(1, 50_000)]
    await harness.webhook("address_activity", addresses=named)
    watch = WebhookWatch(harness.inner.route.network)
    async with pool.connection(for_s=60.0) as connection, connection.transaction():
        with LoopSteps.measured() as steps:
            await watch.hold(connection)
    assert f"{len(named)} addresses" in repr(watch)
    assert steps.longest_s < 4 * LONGEST_STEP_S
