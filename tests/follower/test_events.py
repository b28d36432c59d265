"""Events of a little chain: made with its blocks, held until they are final, taken back with the blocks that it drops."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jsonschema_rs
import orjson
import pytest

from proxy.chains.evm.payloads import Token
from proxy.core import bodies
from proxy.hooks import Events
from proxy.services.follower.following import Following
from proxy.services.follower.sinks import Stale
from proxy.services.webhooks import read_config
from proxy.settings import SCHEMAS
from proxy.store import events as store
from proxy.store.blocks import Term
from proxy.store.webhooks import NewWebhook, Webhook, WebhookStore
from proxy.web import contract
from tests.chain_upstream import TRANSFER, Event, address, erc20, erc721, erc1155_batch, word
from tests.database import connected
from tests.follower.scene import NETWORK, Scene, scene
from tests.rpc_upstreams import Refused
from tests.service import until

A, B, C = address(1), address(2), address(3)
COIN, ART, GAME = address(100), address(101), address(102)
DOCUMENT = contract.load(SCHEMAS).document


class Stage:
    """A scene with webhooks, whose follower takes its steps when it is told to."""

    def __init__(self, scene: Scene, events: Events, following: Following, term: Term) -> None:
        self.scene = scene
        self.events = events
        self.following = following
        self.term = term
        self.store = WebhookStore(scene.running.pool)
        self.account = ""

    async def webhook(self, event_type: str, **config: Any) -> Webhook:
        if not self.account:
            async with connected(self.scene.database) as connection:
                await connection.execute(
                    "insert into accounts (id, name, email, plan) values ('acct', 'A', 'a@example.com', 'growth')"
                )
            self.account = "acct"
        addresses = await read_config(event_type, config)
        new = NewWebhook(
            account="acct",
            network=NETWORK,
            live=False,
            url="https://hooks.example.com/",
            event_type=event_type,
            config={name: value for name, value in config.items() if name != "addresses"},
        )
        return await self.store.create(WebhookStore.new_id(), new, addresses=addresses, secret=b"sealed", most=100)

    async def step(self) -> None:
        """As the follower's own loop does it."""
        try:
            await self.following.step(self.term)
        except Stale:
            await self.following.step(self.term)

    async def mine(self, *blocks: list[Event]) -> None:
        self.scene.chain.mine(*blocks)
        await self.step()

    async def rows(self, query: str) -> list[Any]:
        async with connected(self.scene.database) as connection:
            return [dict(row) for row in await connection.fetch(query)]

    async def told(self, state: str = "due") -> list[dict[str, Any]]:
        """The bodies that are to be delivered, in the order in which they were found."""
        rows = await self.rows(
            "select body from events join deliveries on event_id = events.id "
            f"where state = '{state}' order by deliveries.created_at, block, events.id"
        )
        found = [orjson.loads(row["body"]) for row in rows]
        for body in found:
            check(body)
        return found

    async def deliver(self) -> None:
        """Somebody has taken all that is due."""
        async with connected(self.scene.database) as connection:
            await connection.execute(
                "update deliveries set claim = 1, state = 'delivered', finished_at = now() where state = 'due'"
            )


def check(body: dict[str, Any]) -> None:
    """That what is told has the published shape."""
    event_type = body.get("event_type") or body["type"]
    schema = DOCUMENT["webhooks"][event_type]["post"]["requestBody"]["content"]["application/json"]["schema"]
    whole = {**schema, "components": DOCUMENT["components"]}
    jsonschema_rs.Draft202012Validator(whole, validate_formats=True).validate(body)


@asynccontextmanager
async def staged(database: str, **options: Any) -> AsyncIterator[Stage]:
    async with scene(database) as stage:
        events = stage.running.events(stage.route)
        async with stage.leading(events.sink, **options) as (following, term):
            yield Stage(stage, events, following, term)


@pytest.fixture
async def stage(database: str) -> AsyncIterator[Stage]:
    async with staged(database) as found:
        yield found


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
    with pytest.raises(Stale):
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
    stage.events.composition.learn(COIN, Token("COIN", 2))
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
    stage.events.composition.learn(COIN, Token("COIN", 2))
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
    assert before["id"] == bodies.event_id(
        before["webhook_id"],
        "nft_transfer",
        NETWORK,
        stage.scene.chain.blocks[1].hash,
        before["data"]["tx_hash"],
        "0x0",
    )


# Finality


@pytest.mark.parametrize(
    ("config", "depth"),
    [({"confirmations": 1}, 0), ({"confirmations": 3}, 2), ({"finality": "safe"}, 2), ({"finality": "finalized"}, 4)],
)
async def test_event_waits_for_as_many_blocks_as_it_should(stage: Stage, config: dict[str, Any], depth: int) -> None:
    """The network is final after four blocks."""
    await stage.webhook("nft_transfer", contracts=["0x" + ART.hex()], **config)
    await stage.mine([erc721(ART, A, B, 1)])
    for _ in range(depth):
        assert await stage.told() == []
        await stage.mine([])
    (told,) = await stage.told()
    assert told["data"]["block_number"] == 1
    await stage.mine([], [])
    assert len(await stage.told()) == 1


async def test_event_that_waits_and_whose_block_is_dropped_is_never_told(stage: Stage) -> None:
    await stage.webhook("nft_transfer", contracts=["0x" + ART.hex()], confirmations=3)
    await stage.mine([], [erc721(ART, A, B, 1)])
    stage.scene.chain.drop(1)
    await stage.mine([erc721(ART, A, C, 1)], [], [])
    await stage.step()
    (told,) = await stage.told()
    assert told["data"]["to"].lower() == "0x" + C.hex()


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
    await stage.store.watch(webhook, add=[B], remove=[A], most=10)
    await stage.mine([erc721(ART, C, A, 2), erc721(ART, C, B, 3)])
    await stage.store.watch(webhook, add=[A], remove=[B], most=10)
    await stage.store.watch(webhook, add=[B], remove=[], most=10)
    await stage.mine([erc721(ART, C, A, 4), erc721(ART, C, B, 5)])
    assert [each["data"]["token_id"] for each in await stage.told()] == ["1", "3", "4", "5"]


async def test_webhooks_are_the_same_after_a_new_start(database: str) -> None:
    async with staged(database) as first:
        webhook = await first.webhook("nft_transfer", addresses=["0x" + A.hex()])
        await first.mine([])
        await first.store.watch(webhook, add=[B], remove=[A], most=10)
        chain = first.scene.chain
        await first.mine([])
    async with scene(database, chain=chain) as again:
        events = again.running.events(again.route)
        async with again.running.pool.connection() as connection, connection.transaction():
            await events.watch.hold(connection)
        assert [*events.watch.index.tables.nft_side] == [B]


async def test_loop_that_follows_notices_reads_changes_between_blocks(stage: Stage) -> None:
    watch = stage.events.watch
    stage.scene.running.bell.of("penstock_webhooks", NETWORK)
    tasks = stage.scene.running.tasks
    tasks.start("webhooks", lambda: watch.follow(stage.scene.running.pool, stage.scene.running.bell))
    tasks.start("notices", stage.scene.running.bell.run)
    await stage.webhook("nft_transfer", contracts=["0x" + ART.hex()])
    await until(lambda: len(watch.index))


# What events lack


def transaction(name: str, sender: bytes, recipient: bytes, value: int) -> dict[str, Any]:
    return {
        "hash": name,
        "from": "0x" + sender.hex(),
        "to": "0x" + recipient.hex(),
        "value": hex(value),
        "nonce": "0x0",
        "input": "0x",
        "transactionIndex": "0x0",
    }


def with_transaction(stage: Stage, name: str) -> None:
    """Every block has this transaction from A to B."""
    upstream = stage.scene.upstream

    def block(params: list[Any]) -> Any:
        found = upstream._eth_getBlockByNumber(params)
        given = transaction(name, A, B, 5)
        return found and {**found, "transactions": [given if params[1] else name]}

    upstream.answers["eth_getBlockByNumber"] = block


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
        answers["eth_getTransactionReceipt"] = lambda _, receipt=receipt: receipt
        composing._later.clear()
        await composing.compose()
        assert await stage.told() == []
    answers["eth_getTransactionReceipt"] = lambda _: own
    composing._later.clear()
    await composing.compose()
    (told,) = await stage.told()
    assert (told["data"]["status"], told["data"]["gas_used"]) == ("failed", 21_000)


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


async def test_block_that_is_dropped_while_it_waits_to_be_traced_makes_no_events(stage: Stage) -> None:
    await stage.step()
    await stage.webhook("INTERNAL_TRANSFER", addresses=["0x" + B.hex()])
    await stage.mine([], [])
    first, second = (block.hash for block in stage.scene.chain.blocks[1:])
    asked: list[str] = []

    def trace(params: list[Any]) -> Any:
        asked.append(params[0])
        call = {"type": "CALL", "from": "0x" + A.hex(), "to": "0x" + B.hex(), "value": "0x5"}
        return [{"txHash": "0x" + "79" * 32, "result": {**call, "calls": [call]}}]

    stage.scene.upstream.answers["debug_traceBlockByHash"] = trace
    async with stage.scene.running.pool.connection() as connection:
        jobs = await store.jobs(connection, NETWORK, limit=10)
    calls = await stage.events.tracing._calls(jobs[1])
    stage.scene.chain.drop(1)
    await stage.mine([], [])
    await stage.step()
    await stage.events.tracing._write(jobs[1], calls)
    assert await stage.told() == []
    assert await stage.events.tracing.look()
    assert {first} < {*asked}
    told = await stage.told()
    assert second not in {block.hash for block in stage.scene.chain.blocks}
    assert sorted(each["data"]["blockNumber"] for each in told) == [1, 2, 3]
    assert told[0]["data"]["traceAddress"] == [0]


async def test_event_of_a_trace_is_taken_back_with_its_block(stage: Stage) -> None:
    await stage.step()
    await stage.webhook("INTERNAL_TRANSFER", addresses=["0x" + B.hex()])
    call = {"type": "CALL", "from": "0x" + A.hex(), "to": "0x" + B.hex(), "value": "0x5"}
    stage.scene.upstream.answers["debug_traceBlockByHash"] = lambda _: [
        {"txHash": "0x" + "79" * 32, "result": {**call, "calls": [call]}}
    ]
    await stage.mine([], [])
    await stage.events.tracing.look()
    await stage.deliver()
    stage.scene.chain.drop(1)
    await stage.mine([], [])
    await stage.step()
    assert [each["type"] for each in await stage.told()] == ["CORRECTION"]


async def test_upstream_that_cannot_trace_blocks_is_asked_in_another_way(stage: Stage) -> None:
    await stage.step()
    await stage.webhook("INTERNAL_TRANSFER", addresses=["0x" + B.hex()])
    await stage.mine([])

    def refuse(_: list[Any]) -> Any:
        raise Refused(-32601, "the method does not exist/is not available")

    answers = stage.scene.upstream.answers
    answers["debug_traceBlockByHash"] = refuse
    answers["trace_block"] = lambda _: [
        {
            "type": "call",
            "traceAddress": [0],
            "transactionHash": "0x" + "79" * 32,
            "blockHash": stage.scene.chain.blocks[1].hash,
            "action": {"callType": "call", "from": "0x" + A.hex(), "to": "0x" + B.hex(), "value": "0x9"},
        }
    ]
    assert await stage.events.tracing.look()
    (told,) = await stage.told()
    assert told["data"]["value"] == "9"
    assert repr(stage.events.tracing).endswith("by _by_list>")
