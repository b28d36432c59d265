"""Events of a little chain: made with its blocks, completed afterwards, taken back with the blocks that it drops."""

from __future__ import annotations

import datetime
from functools import partial
from typing import Any

import asyncpg
import orjson
import pytest

from proxy.chains.evm.payloads import EventToken
from proxy.core import webhook_bodies
from proxy.core.paging import Page
from proxy.services.events import enrichment
from proxy.services.follower.sinks import StaleRead
from proxy.store.deliveries import DeliveryStore
from proxy.store.webhooks import AddressChange
from proxy.web.rest.deliveries import _shown
from tests.chain_upstream import TRANSFER, Event, erc20, erc721, erc1155_batch, word
from tests.database import connected
from tests.follower.scene import NETWORK, scene
from tests.follower.stage import ART, COIN, GAME, A, B, C, Stage, staged, with_transaction
from tests.service import until
from tests.shapes import conforms


async def test_log_webhook_is_told_of_matching_logs_with_their_place(stage: Stage) -> None:
    await stage.step()
    webhook = await stage.webhook("log", addresses=["0x" + COIN.hex()], topics=[TRANSFER, None, "0x" + word(B)])
    await stage.mine([erc20(COIN, A, B, 5), erc20(COIN, A, C, 6), erc20(ART, A, B, 7)], [erc20(COIN, C, B, 8)])
    first, second = await stage.told()
    assert first["event_type"] == "log"
    assert first["webhook_id"] == webhook.id
    assert [each["data"]["block_number"] for each in (first, second)] == [1, 2]
    assert [int(each["data"]["data"], 16) for each in (first, second)] == [5, 8]
    assert first["data"]["log_index"] == 0
    assert first["data"]["chain"] == "dev-testnet"


async def test_webhook_sees_the_blocks_after_it_and_none_before(stage: Stage) -> None:
    await stage.mine([erc721(ART, A, B, 1)])
    await stage.webhook("nft_transfer", contracts=["0x" + ART.hex()])
    await stage.mine([erc721(ART, B, C, 1)])
    (told,) = await stage.told()
    assert told["data"]["block_number"] == 2


async def test_webhook_that_comes_between_the_reading_and_the_writing_is_not_missed(stage: Stage) -> None:
    """Nobody wanted other logs when the blocks were read: they are read again."""
    await stage.step()
    approval = Event(COIN, ("0x" + "ab" * 32,), word(1))
    stage.scene.chain.mine([approval])
    piece = await stage.scene.running.reader(stage.scene.route, stage.following._sinks).block(1)
    assert not piece.logs
    await stage.webhook("log", addresses=["0x" + COIN.hex()])
    with pytest.raises(StaleRead):
        await stage.following._write(stage.term, [piece])
    await stage.step()
    assert len(await stage.told()) == 1


async def test_several_of_one_log_are_events_of_their_own(stage: Stage) -> None:
    await stage.webhook("nft_transfer", addresses=["0x" + B.hex()])
    await stage.mine([erc1155_batch(GAME, A, B, [(1, 10), (2, 20), (2, 20)])])
    told = await stage.told()
    assert sorted((each["data"]["token_id"], each["data"]["quantity"]) for each in told) == [
        ("1", 10), ("2", 20), ("2", 20),
    ]  # fmt: skip
    assert len({each["id"] for each in told}) == 3


async def test_token_that_is_known_is_told_at_once_and_another_when_it_is_found_out(stage: Stage) -> None:
    await stage.webhook("TOKEN_TRANSFER", contracts=["0x" + COIN.hex(), "0x" + ART.hex()], min_value="5")
    stage.events.composition.learn(COIN, EventToken("COIN", 2))
    await stage.mine([erc20(COIN, A, B, 4), erc20(COIN, A, B, 512), erc20(ART, A, B, 6)])
    (told,) = await stage.told()
    assert told["type"] == "TOKEN_TRANSFER"
    assert told["chainId"] == 31337
    assert told["data"]["token"]["symbol"] == "COIN"
    assert told["data"]["valueFormatted"] == "5.12"
    (lacking,) = await stage.rows("select lacks from events where lacks is not null")
    assert orjson.loads(lacking["lacks"]) == {"token": "0x" + ART.hex()}


async def test_address_that_sends_to_itself_has_two_events(stage: Stage) -> None:
    await stage.webhook("address_activity", addresses=["0x" + A.hex()])
    stage.events.composition.learn(COIN, EventToken("COIN", 2))
    await stage.mine([erc20(COIN, A, A, 4)])
    assert sorted(each["data"]["direction"] for each in await stage.told()) == ["incoming", "outgoing"]


async def test_new_block_is_told_once_for_each_block(stage: Stage) -> None:
    await stage.step()
    await stage.webhook("NEW_BLOCK")
    await stage.mine([], [])
    told = await stage.told()
    assert [each["data"]["blockNumber"] for each in told] == [1, 2]
    assert told[0]["data"]["blockHash"] == stage.scene.chain.blocks[1].hash
    assert told[0]["data"]["timestamp"] == "2023-11-14T22:13:21Z"


async def test_same_event_has_the_same_id_however_often_it_is_made(stage: Stage) -> None:
    """The first writer is killed before its transaction is through; the second makes the same."""
    await stage.webhook("nft_transfer", contracts=["0x" + ART.hex()])
    stage.scene.chain.mine([erc721(ART, A, B, 1)])
    reader = stage.scene.running.reader(stage.scene.route, stage.following._sinks)
    await stage.step()
    (before,) = await stage.told()
    pieces = [await reader.block(1)]
    assert stage.events.sink._events(pieces[0])[0].id == before["id"]
    assert before["id"] == webhook_bodies.event_id(
        before["webhook_id"],
        "nft_transfer",
        NETWORK,
        stage.scene.chain.blocks[1].hash,
        before["data"]["tx_hash"],
        "0x0",
    )


# Blocks that the chain drops


async def test_event_that_was_told_is_taken_back_by_name(stage: Stage) -> None:
    await stage.webhook("nft_transfer", contracts=["0x" + ART.hex()])
    await stage.mine([], [erc721(ART, A, B, 1)])
    (first,) = await stage.told()
    await stage.deliver()
    stage.scene.chain.drop(1)
    await stage.mine([erc721(ART, A, C, 1)], [])
    await stage.step()
    correction, second = await stage.told()
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
    rows = await stage.rows("select takes_back, taken_back from events where takes_back is not null or taken_back")
    assert sorted(map(str, (row["takes_back"] for row in rows))) == sorted(["None", first["id"]])


async def test_correction_of_format_b_names_what_it_takes_back(stage: Stage) -> None:
    await stage.webhook("NEW_BLOCK")
    await stage.mine([], [])
    before = {each["data"]["blockHash"]: each["id"] for each in await stage.told()}
    await stage.deliver()
    dropped = stage.scene.chain.blocks[-1].hash
    stage.scene.chain.drop(1)
    await stage.mine([], [])
    await stage.step()
    (correction,) = [each for each in await stage.told() if each["type"] == "CORRECTION"]
    assert correction["data"]["takesBack"] == before[dropped]
    assert correction["data"]["eventType"] == "NEW_BLOCK"


async def test_event_that_nobody_was_told_of_goes_without_a_word(stage: Stage) -> None:
    await stage.webhook("nft_transfer", contracts=["0x" + ART.hex()])
    await stage.mine([], [erc721(ART, A, B, 1)])
    stage.scene.chain.drop(1)
    await stage.mine([erc721(ART, A, C, 1)], [])
    await stage.step()
    (told,) = await stage.told()
    assert told["event_type"] == "nft_transfer"
    assert told["data"]["to"].lower() == "0x" + C.hex()


async def test_event_that_was_under_way_is_not_tried_again_once_it_is_taken_back(stage: Stage) -> None:
    await stage.webhook("nft_transfer", contracts=["0x" + ART.hex()])
    await stage.mine([], [erc721(ART, A, B, 1)])
    async with connected(stage.scene.database) as connection:
        await connection.execute("update deliveries set claim = 1")
    stage.scene.chain.drop(1)
    await stage.mine([], [])
    await stage.step()
    (correction,) = await stage.told()
    assert correction["event_type"] == "correction"
    assert len(await stage.told("dropped")) == 1


async def test_owner_sees_what_was_taken_back_and_cannot_have_it_sent_again(stage: Stage) -> None:
    """One event was under way and one was delivered when their block was dropped."""
    webhook = await stage.webhook("nft_transfer", contracts=["0x" + ART.hex()])
    await stage.mine([], [erc721(ART, A, B, 1), erc721(ART, A, B, 2)])
    told = [each["id"] for each in await stage.told()]
    async with connected(stage.scene.database) as connection:
        await connection.execute("update deliveries set claim = 1")
        await connection.execute("update deliveries set state = 'delivered' where event_id = $1", told[0])
    stage.scene.chain.drop(1)
    await stage.mine([], [])
    await stage.step()
    deliveries = DeliveryStore(stage.scene.running.pool)
    found, _ = await deliveries.page(webhook.id, Page(1, 25), state=None, since=None)
    shown = {each.event_id: _shown(each) for each in found}
    for each in shown.values():
        conforms(each, "Delivery")
    assert [shown[name]["status"] for name in told] == ["delivered", "taken_back"]
    assert [await deliveries.redeliver(webhook.id, name) for name in told] == [False, False]
    long_ago, present = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=n) for n in (-1, 1))
    for state in (None, "delivered", "dropped"):
        assert await deliveries.redeliver_since(webhook.id, long_ago, present, state=state) == 0
    await stage.deliver()
    assert await deliveries.redeliver_since(webhook.id, long_ago, present, state=None) == 2  # the corrections


async def test_event_that_comes_back_after_it_was_taken_back_has_another_name(stage: Stage) -> None:
    """The chain goes to another branch, and back again: under its first name receivers would take it for one they know."""
    await stage.webhook("nft_transfer", contracts=["0x" + ART.hex()])
    chain = stage.scene.chain
    await stage.mine([], [erc721(ART, A, B, 1)])
    branch = chain.blocks[-1]
    (first,) = await stage.told()
    await stage.deliver()
    chain.drop(1)
    await stage.mine([], [])
    await stage.step()
    chain.drop(2)
    chain.blocks.append(branch)
    await stage.mine([], [], [])
    await stage.step()
    again = [each for each in await stage.told() if each["event_type"] == "nft_transfer"]
    assert [each["data"] for each in again] == [first["data"]]
    assert again[0]["id"] != first["id"]


# Webhooks that change


async def test_events_of_a_paused_webhook_are_kept_until_it_is_resumed(stage: Stage) -> None:
    webhook = await stage.webhook("nft_transfer", contracts=["0x" + ART.hex()])
    await stage.store.move(webhook, "pause")
    await stage.mine([erc721(ART, A, B, 1)])
    assert await stage.told() == []
    assert len(await stage.told("parked")) == 1
    await stage.store.move(webhook, "activate")
    assert len(await stage.told()) == 1


@pytest.mark.parametrize("cause", ["delete", "gone"])
async def test_webhook_that_is_gone_gets_no_events(stage: Stage, cause: Any) -> None:
    webhook = await stage.webhook("nft_transfer", contracts=["0x" + ART.hex()])
    await stage.mine([erc721(ART, A, B, 1)])
    await stage.store.move(webhook, cause)
    await stage.mine([erc721(ART, B, C, 1)])
    assert len(await stage.rows("select from events")) == 1
    assert len(stage.events.watch.index) == 0


async def test_addresses_are_added_and_removed_between_two_blocks(stage: Stage) -> None:
    webhook = await stage.webhook("nft_transfer", addresses=["0x" + A.hex()])
    await stage.mine([erc721(ART, C, A, 1)])
    await stage.store.update(webhook, delta=AddressChange(add=[B], remove=[A], most=10))
    await stage.mine([erc721(ART, C, A, 2), erc721(ART, C, B, 3)])
    await stage.store.update(webhook, delta=AddressChange(add=[A], remove=[B], most=10))
    await stage.store.update(webhook, delta=AddressChange(add=[B], remove=[], most=10))
    await stage.mine([erc721(ART, C, A, 4), erc721(ART, C, B, 5)])
    assert [each["data"]["token_id"] for each in await stage.told()] == ["1", "3", "4", "5"]


async def test_webhooks_are_the_same_after_a_new_start(database: str) -> None:
    async with staged(database) as first:
        webhook = await first.webhook("nft_transfer", addresses=["0x" + A.hex()])
        await first.mine([])
        await first.store.update(webhook, delta=AddressChange(add=[B], remove=[A], most=10))
        chain = first.scene.chain
        await first.mine([])
    async with scene(database, chain=chain) as again:
        events = again.running.events(again.route)
        async with again.running.pool.connection() as connection, connection.transaction():
            await events.watch.hold(connection)
        assert [*events.watch.index.tables.nft_side] == [B]


async def test_webhooks_that_were_loaded_in_part_are_loaded_anew(stage: Stage) -> None:
    """Their addresses cannot be read at first: what follows must not believe that they have none."""
    await stage.step()
    await stage.webhook("nft_transfer", addresses=["0x" + A.hex()])
    watch = stage.events.watch
    async with connected(stage.scene.database) as connection:
        await connection.execute("alter table watched_addresses rename to elsewhere")
        async with stage.scene.running.pool.connection() as reading:
            with pytest.raises(asyncpg.UndefinedTableError):
                await watch.hold(reading)
        assert len(watch.index) == 0
        await connection.execute("alter table elsewhere rename to watched_addresses")
    await stage.mine([erc721(ART, B, A, 1)])
    assert len(await stage.told()) == 1


async def test_loop_that_follows_notices_reads_changes_between_blocks(stage: Stage) -> None:
    watch = stage.events.watch
    tasks = stage.scene.running.tasks
    tasks.start("webhooks", lambda: watch.follow(stage.scene.running.pool, stage.scene.running.bell))
    await stage.webhook("nft_transfer", contracts=["0x" + ART.hex()])
    await until(lambda: len(watch.index))


async def test_notice_reaches_everybody_who_waits_for_it_whoever_clears_his_own(stage: Stage) -> None:
    bell = stage.scene.running.bell
    one, other = bell.of("penstock_events", NETWORK), bell.of("penstock_events", NETWORK)
    await until(lambda: one.is_set() and other.is_set())  # when it begins to listen
    one.clear()
    other.clear()
    await stage.rows(f"select pg_notify('penstock_events', '{NETWORK}')")
    await until(one.is_set)
    one.clear()
    await until(other.is_set)
    assert not one.is_set()


# What events lack


async def test_event_waits_for_the_receipt_of_its_own_block(stage: Stage) -> None:
    name = "0x" + "77" * 32
    with_transaction(stage, name)
    await stage.step()
    await stage.webhook("mined_transaction", tx_hashes=[name])
    await stage.mine([])
    composing = stage.events.composing
    answers = stage.scene.upstream.answers
    own = {"blockHash": stage.scene.chain.blocks[1].hash, "blockNumber": "0x1", "status": "0x0", "gasUsed": "0x5208"}
    for receipt in (None, {**own, "blockHash": "0x" + "00" * 32}):
        answers["eth_getTransactionReceipt"] = partial(lambda receipt, _: receipt, receipt)
        composing.start_over()
        await composing.compose()
        assert await stage.told() == []
    answers["eth_getTransactionReceipt"] = lambda _: own
    composing.start_over()
    await composing.compose()
    (told,) = await stage.told()
    assert (told["data"]["status"], told["data"]["gas_used"]) == ("failed", 21_000)


async def test_events_that_cannot_be_completed_are_passed_over_and_hold_up_nobody(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than are looked at together, and older: what comes after them is told, and they are when they can be."""
    monkeypatch.setattr(enrichment, "BATCH", 2)
    name = "0x" + "77" * 32
    with_transaction(stage, name)
    await stage.step()
    await stage.webhook("mined_transaction", tx_hashes=[name])
    await stage.mine(*[[]] * 5)
    await stage.webhook("TOKEN_TRANSFER", contracts=["0x" + COIN.hex()])
    answers = stage.scene.upstream.answers
    answers["eth_getTransactionReceipt"] = lambda _: None
    answers["eth_call"] = lambda _: "0x"
    await stage.mine([erc20(COIN, A, B, 5)])
    rounds = 1
    while await stage.events.composing.compose():
        rounds += 1
    assert rounds == 4
    assert [each["type"] for each in await stage.told()] == ["TOKEN_TRANSFER"]
    assert repr(stage.events.composing).endswith("some left>")
    # The transaction is in the last block, as far as its receipt says; the others go on waiting.
    last = stage.scene.chain.blocks[-1].hash
    own = {"blockHash": last, "blockNumber": "0x6", "status": "0x1", "gasUsed": "0x5208"}
    answers["eth_getTransactionReceipt"] = lambda _: own
    stage.events.composing.start_over()
    while await stage.events.composing.compose():
        pass
    assert len(await stage.told()) == 2
    assert len(await stage.rows("select from events where lacks is not null")) == 5


async def test_activity_of_a_transaction_that_failed_is_dropped(stage: Stage) -> None:
    name = "0x" + "78" * 32
    with_transaction(stage, name)
    await stage.step()
    await stage.webhook("address_activity", addresses=["0x" + B.hex()])
    await stage.mine([])
    hash_ = stage.scene.chain.blocks[1].hash
    stage.scene.upstream.answers["eth_getTransactionReceipt"] = lambda _: {
        "blockHash": hash_, "blockNumber": "0x1", "status": "0x0", "gasUsed": "0x5208",
    }  # fmt: skip
    await stage.events.composing.compose()
    assert await stage.rows("select from events") == []


async def test_token_that_says_nothing_of_itself_is_told_without_a_name(stage: Stage) -> None:
    await stage.webhook("token_transfer", contracts=["0x" + COIN.hex()])
    stage.scene.upstream.answers["eth_call"] = lambda _: "0x"
    await stage.mine([erc20(COIN, A, B, 5)])
    await stage.events.composing.compose()
    (told,) = await stage.told()
    assert (told["data"]["symbol"], told["data"]["decimals"]) == (None, None)
