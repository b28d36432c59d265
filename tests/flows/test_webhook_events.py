"""Events of every type on the development chain, from the transaction to the POST."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
from eth_account import Account
from web3 import Web3

from proxy.services.webhooks.backtest import MAX_FULL_BLOCKS
from tests.delivery.harness import Inbox, inbox
from tests.dev.onchain import Reverted, rpc
from tests.service import Service, until
from tests.shapes import conforms

CHECKED = {
    "address_activity": "AddressActivityEvent",
    "ADDRESS_ACTIVITY": "AddressActivityEventB",
    "token_transfer": "TokenTransferEvent",
    "TOKEN_TRANSFER": "TokenTransferEventB",
    "nft_transfer": "NftTransferEvent",
    "NFT_ACTIVITY": "NftActivityEventB",
    "mined_transaction": "MinedTransactionEvent",
    "MINED_TRANSACTION": "MinedTransactionEventB",
    "log": "LogEvent",
    "INTERNAL_TRANSFER": "InternalTransferEventB",
    "NEW_BLOCK": "NewBlockEventB",
    "PENDING_TRANSACTION": "PendingTransactionEventB",
}
ETHER = 10**18
_rng = random.Random(40414)


def random_address() -> str:
    """A random address that no other test uses."""
    return Web3.to_checksum_address(_rng.randbytes(20).hex())


def call(signature: str, *values: Any) -> str:
    types = signature[signature.index("(") + 1 : -1]
    encoded = Web3().codec.encode(types.split(",") if types else [], values)
    return "0x" + (Web3.keccak(text=signature)[:4] + encoded).hex()


@dataclass
class Chain:
    """Calls the development chain directly."""

    service: Service

    async def call(self, method: str, *params: Any) -> Any:
        return await rpc(self.service.ready["upstream_url"], self.service, method, *params)

    def account(self, index: int = 5) -> str:
        return str(self.service.ready["accounts"][index]["address"])

    def contract(self, symbol: str) -> str:
        found = [*self.service.ready["tokens"], *self.service.ready["nfts"]]
        return str(next(each["address"] for each in found if each.get("symbol") == symbol))

    async def send(self, to: str | None, data: str = "0x", value: int = 0, sender: str = "") -> dict[str, Any]:
        """Send a transaction and return its receipt."""
        transaction = {"from": sender or self.account(), "data": data, "value": hex(value), "gas": hex(500_000)}
        name = await self.call("eth_sendTransaction", transaction | ({"to": to} if to else {}))
        return dict(await until(lambda: self.call("eth_getTransactionReceipt", name)))

    async def fail(self, to: str, data: str, sender: str = "") -> str:
        """Send a transaction that fails and return its hash. The chain reports the failure and mines it anyway."""
        before = int(await self.call("eth_blockNumber"), 16)
        transaction = {"from": sender or self.account(), "to": to, "data": data, "gas": hex(200_000)}
        try:
            await self.call("eth_sendTransaction", transaction)
        except Reverted:
            pass

        async def mined() -> str | None:
            head = int(await self.call("eth_blockNumber"), 16)
            for number in range(before + 1, head + 1):
                block = await self.call("eth_getBlockByNumber", hex(number), True)
                for each in block["transactions"]:
                    if each["to"] == to.lower() and each["input"] == data:
                        return str(each["hash"])
            return None

        found = str(await until(mined))
        assert (await self.call("eth_getTransactionReceipt", found))["status"] == "0x0"
        return found


class Hook:
    def __init__(self, box: Inbox, made: dict[str, Any], path: str) -> None:
        self.made = made
        self.box = box
        self.path = path

    def bodies(self) -> list[dict[str, Any]]:
        found = {post.event_id: orjson.loads(post.body) for post in self.box.at(self.path)}
        for body in found.values():
            conforms(body, CHECKED[body.get("event_type") or body["type"]])
        return [*found.values()]

    async def received(self, count: int) -> list[dict[str, Any]]:
        """Wait for this many events and return their data."""
        bodies = await until(lambda: len(self.bodies()) >= count and self.bodies(), within_s=30.0)
        assert len(bodies) == count, bodies
        assert len({body["id"] for body in bodies}) == count
        return [body["data"] for body in bodies]


@pytest.fixture
async def box() -> AsyncIterator[Inbox]:
    async with inbox() as found:
        yield found


@pytest.fixture
def chain(service: Service) -> Chain:
    return Chain(service)


@asynccontextmanager
async def hooked(service: Service, box: Inbox, event_type: str, **config: Any) -> AsyncIterator[Hook]:
    path = f"/{_rng.randbytes(8).hex()}"
    body = {"url": box.url(path), "chain": "dev", "event_type": event_type, "config": config}
    status, made = await service.send("POST", "/webhooks", body)
    assert status == 201, made
    seen = made
    while seen["status"] == "starting":  # The test's own time limit ends this.
        await asyncio.sleep(0.1)
        _, seen = await service.send("GET", f"/webhooks/{made['id']}")
    yield Hook(box, made, path)
    assert (await service.send("DELETE", f"/webhooks/{made['id']}"))[0] == 200


def sort(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(found, key=lambda each: (each.get("block_number") or each.get("blockNumber") or 0, str(each)))


async def test_address_activity_covers_coins_tokens_and_nfts(service: Service, box: Inbox, chain: Chain) -> None:
    holder = random_address()
    async with hooked(service, box, "address_activity", addresses=[holder]) as hook:
        coins = await chain.send(holder, value=3 * ETHER)
        tokens = await chain.send(chain.contract("DUSD"), call("mint(address,uint256)", holder, 1_500_000))
        nft = await chain.send(
            chain.contract("PIC"), call("mint(address,uint256,string)", holder, 7_000_001, "ipfs://x")
        )
        native, token, picture = sort(await hook.received(3))
    assert native == {
        "chain": "dev",
        "block_number": int(coins["blockNumber"], 16),
        "tx_hash": coins["transactionHash"],
        "from": chain.account(),
        "to": holder,
        "value": str(3 * ETHER),
        "asset": "ETH",
        "contract": None,
        "direction": "incoming",
        "status": "success",
    }
    assert (token["asset"], token["value"], token["contract"]) == ("DUSD", "1500000", chain.contract("DUSD"))
    assert token["tx_hash"] == tokens["transactionHash"]
    assert (picture["asset"], picture["value"], picture["token_id"]) == ("PIC", "1", "7000001")
    assert picture["tx_hash"] == nft["transactionHash"]


async def test_failed_transaction_is_no_activity(service: Service, box: Inbox, chain: Chain) -> None:
    sender, token = chain.account(6), chain.contract("PEN")
    async with hooked(
        service, box, "ADDRESS_ACTIVITY", addresses=[sender], direction="outgoing", categories=["native"]
    ) as hook:
        failed = await chain.fail(token, call("transfer(address,uint256)", random_address(), 2**200), sender)
        went = await chain.send(random_address(), value=5, sender=sender)
        (data,) = await hook.received(1)
    assert data["transactionHash"] == went["transactionHash"] != failed
    assert (data["category"], data["valueFormatted"], data["direction"]) == (
        "native",
        "0.000000000000000005",
        "outgoing",
    )


async def test_failed_transaction_of_an_address_is_sent_with_its_status(
    service: Service, box: Inbox, chain: Chain
) -> None:
    """Format A reports any transaction; a filter by value reports only what moved."""
    sender, token = chain.account(6), chain.contract("PEN")
    config: dict[str, Any] = {"addresses": [sender], "direction": "outgoing", "categories": ["native"]}
    async with (
        hooked(service, box, "address_activity", **config) as every,
        hooked(service, box, "address_activity", **config, min_value="1") as moved,
    ):
        failed = await chain.fail(token, call("transfer(address,uint256)", random_address(), 2**200), sender)
        went = await chain.send(random_address(), value=5, sender=sender)
        (only,) = await moved.received(1)
        first, second = sort(await every.received(2))
    assert (first["tx_hash"], first["status"], first["value"], first["to"]) == (failed, "failed", "0", token)
    assert (second["tx_hash"], second["status"], second["value"]) == (went["transactionHash"], "success", "5")
    assert only == second


async def test_contract_creation_has_the_new_contract_as_recipient(service: Service, box: Inbox, chain: Chain) -> None:
    sender = chain.account(7)
    async with hooked(service, box, "address_activity", addresses=[sender], categories=["native"]) as hook:
        made = await chain.send(None, "0x6001600c60003960016000f300", sender=sender)
        (data,) = await hook.received(1)
    assert data["to"].lower() == made["contractAddress"].lower()


async def test_token_transfers_are_filtered_and_sent_in_both_formats(
    service: Service, box: Inbox, chain: Chain
) -> None:
    holder, token = random_address(), chain.contract("DUSD")
    async with (
        hooked(service, box, "token_transfer", to=[holder]) as a,
        hooked(service, box, "TOKEN_TRANSFER", contracts=[token], to=[holder], min_value="2000000") as b,
    ):
        small = await chain.send(token, call("mint(address,uint256)", holder, 1_999_999))
        large = await chain.send(token, call("mint(address,uint256)", holder, 2_500_000))
        first, second = sort(await a.received(2))
        (only,) = await b.received(1)
    assert [first["tx_hash"], second["tx_hash"]] == [small["transactionHash"], large["transactionHash"]]
    assert first == {
        "chain": "dev",
        "block_number": int(small["blockNumber"], 16),
        "tx_hash": small["transactionHash"],
        "contract": token,
        "from": "0x" + "00" * 20,
        "to": holder,
        "value": "1999999",
        "symbol": "DUSD",
        "decimals": 6,
    }
    assert only == {
        "blockNumber": int(large["blockNumber"], 16),
        "transactionHash": large["transactionHash"],
        "logIndex": int(large["logs"][0]["logIndex"], 16),
        "from": "0x" + "00" * 20,
        "to": holder,
        "token": {"address": token, "symbol": "DUSD", "decimals": 6},
        "value": "2500000",
        "valueFormatted": "2.5",
    }


async def test_nft_mint_transfer_and_burn_are_sent_with_metadata(service: Service, box: Inbox, chain: Chain) -> None:
    owner, contract, token = chain.account(8), chain.contract("PIC"), 7_100_000 + _rng.randrange(10**6)
    document = {"name": "Seen", "description": "By all", "image": "ipfs://" + "Qm" + "a" * 44, "attributes": []}
    uri = "data:application/json," + orjson.dumps(document).decode()
    async with (
        hooked(service, box, "NFT_ACTIVITY", contracts=[contract], token_ids=[str(token)]) as b,
        hooked(service, box, "nft_transfer", contracts=[contract], token_ids=[str(token)]) as a,
    ):
        await chain.send(contract, call("mint(address,uint256,string)", owner, token, uri))
        (minted,) = await b.received(1)
        await chain.send(
            contract, call("transferFrom(address,address,uint256)", owner, chain.account(9), token), sender=owner
        )
        await b.received(2)
        await chain.send(contract, call("burn(uint256)", token), sender=chain.account(9))
        received = sort(await b.received(3))
        plain = sort(await a.received(3))
    assert [each["activity"] for each in received] == ["mint", "transfer", "burn"]
    assert minted["metadata"]["name"] == "Seen"
    assert minted["metadata"]["description"] == "By all"
    assert received[2]["metadata"] is None
    assert [(each["token_id"], each["standard"], each["quantity"]) for each in plain] == [(str(token), "ERC721", 1)] * 3
    assert [each["from"] for each in plain] == ["0x" + "00" * 20, owner, chain.account(9)]


@pytest.mark.parametrize("event_type", ["mined_transaction", "MINED_TRANSACTION"])
async def test_mined_transaction_is_sent_after_its_confirmations(
    service: Service, box: Inbox, chain: Chain, event_type: str
) -> None:
    signer = Account.create(_rng.randbytes(32))
    await chain.send(signer.address, value=ETHER)
    raw = signer.sign_transaction(
        {"nonce": 0, "to": random_address(), "value": 5, "gas": 21_000, "gasPrice": 10**11, "chainId": 31337}
    )
    name = "0x" + raw.hash.hex().removeprefix("0x")
    async with hooked(service, box, event_type, tx_hashes=[name.upper().replace("0X", "0x")], confirmations=3) as hook:
        await chain.call("eth_sendRawTransaction", "0x" + raw.raw_transaction.hex().removeprefix("0x"))
        receipt = await until(lambda: chain.call("eth_getTransactionReceipt", name))
        while int(await chain.call("eth_blockNumber"), 16) < int(receipt["blockNumber"], 16) + 2:
            assert hook.bodies() == []
            await chain.call("hardhat_mine", "0x1")
        (data,) = await hook.received(1)
    gas, number = ("gas_used", "block_number") if event_type.islower() else ("gasUsed", "blockNumber")
    assert (data["status"], data[gas], data["confirmations"]) == ("success", 21_000, 3)
    assert data[number] == int(receipt["blockNumber"], 16)
    assert data["from"] == signer.address


@pytest.mark.parametrize("is_changed", [False, True])
async def test_transaction_that_is_mined_already_is_sent(
    service: Service, box: Inbox, chain: Chain, is_changed: bool
) -> None:
    sent = await chain.send(random_address(), value=5)
    await chain.call("hardhat_mine", "0x3")
    name = sent["transactionHash"]
    async with hooked(service, box, "mined_transaction", tx_hashes=["0x" + "0a" * 32 if is_changed else name]) as hook:
        if is_changed:
            change = {"config": {"tx_hashes": [name], "confirmations": 2}}
            assert (await service.send("PATCH", f"/webhooks/{hook.made['id']}", change))[0] == 200
        (data,) = await hook.received(1)
    assert (data["tx_hash"], data["status"], data["confirmations"]) == (name, "success", 1 + is_changed)
    assert data["block_number"] == int(sent["blockNumber"], 16)


async def test_log_is_filtered_by_contract_and_topics(service: Service, box: Inbox, chain: Chain) -> None:
    holder, token = random_address(), chain.contract("PEN")
    transfer = "0x" + Web3.keccak(text="Transfer(address,address,uint256)").hex().removeprefix("0x")
    word = "0x" + "00" * 12 + holder[2:].lower()
    async with hooked(service, box, "log", addresses=[token], topics=[[transfer], None, word]) as hook:
        await chain.send(token, call("mint(address,uint256)", random_address(), 1))
        receipt = await chain.send(token, call("mint(address,uint256)", holder, 9))
        (data,) = await hook.received(1)
    assert data["tx_hash"] == receipt["transactionHash"]
    assert data["contract"] == token
    assert data["topics"] == receipt["logs"][0]["topics"]
    assert data["data"] == receipt["logs"][0]["data"]


async def test_format_b_filters_by_topic_and_function(service: Service, box: Inbox, chain: Chain) -> None:
    holder, token = random_address(), chain.contract("PEN")
    transfer = "0x" + Web3.keccak(text="Transfer(address,address,uint256)").hex().removeprefix("0x")
    word = "0x" + "00" * 12 + holder[2:].lower()
    async with (
        hooked(service, box, "TOKEN_TRANSFER", contracts=[token], topics=[transfer, None, word]) as by_topic,
        hooked(service, box, "TOKEN_TRANSFER", to=[holder], selectors=["mint(address,uint256)"]) as by_function,
        hooked(service, box, "ADDRESS_ACTIVITY", addresses=[holder], topics=[[transfer]]) as activity,
    ):
        await chain.send(holder, value=1)
        await chain.send(token, call("mint(address,uint256)", random_address(), 1))
        await chain.send(token, call("mint(address,uint256)", chain.account(), 9))
        sent = await chain.send(token, call("transfer(address,uint256)", holder, 4))
        minted = await chain.send(token, call("mint(address,uint256)", holder, 5))
        wanted = [sent["transactionHash"], minted["transactionHash"]]
        assert [each["transactionHash"] for each in sort(await by_topic.received(2))] == wanted
        assert [each["transactionHash"] for each in sort(await activity.received(2))] == wanted
        assert [each["transactionHash"] for each in await by_function.received(1)] == wanted[1:]


async def test_webhook_without_config_waits_for_its_addresses(service: Service, box: Inbox, chain: Chain) -> None:
    holder, token = random_address(), chain.contract("DUSD")
    body = {"url": box.url("/later"), "chain": "dev", "event_type": "TOKEN_TRANSFER"}
    status, made = await service.send("POST", "/webhooks", body)
    assert (status, made["status"], made["config"]) == (201, "active", {"addresses": []})
    async with hooked(service, box, "TOKEN_TRANSFER", to=[holder]) as other:
        await chain.send(token, call("mint(address,uint256)", holder, 1))
        await other.received(1)
    path = f"/webhooks/{made['id']}"
    assert (await service.send("PATCH", path, {"add_addresses": [holder]}))[0] == 200
    last = await chain.send(token, call("mint(address,uint256)", holder, 2))
    (data,) = await Hook(box, made, "/later").received(1)
    assert data["transactionHash"] == last["transactionHash"]
    await service.send("DELETE", path)


async def test_internal_transfer_is_sent(service: Service, box: Inbox, chain: Chain) -> None:
    owner, weth = chain.account(9), chain.contract("WETH")
    await chain.send(weth, value=2 * ETHER, sender=owner)
    async with hooked(
        service, box, "INTERNAL_TRANSFER", addresses=[owner], direction="incoming", min_value=str(ETHER)
    ) as hook:
        await chain.send(weth, call("withdraw(uint256)", 5), sender=owner)
        receipt = await chain.send(weth, call("withdraw(uint256)", ETHER), sender=owner)
        (data,) = await hook.received(1)
    assert data["transactionHash"] == receipt["transactionHash"]
    assert (data["from"], data["to"], data["value"]) == (weth, owner, str(ETHER))
    assert (data["traceAddress"], data["valueFormatted"], data["callType"]) == ([0], "1", "call")


async def test_new_block_matches_the_chain(service: Service, box: Inbox, chain: Chain) -> None:
    async with hooked(service, box, "NEW_BLOCK") as hook:
        receipt = await chain.send(random_address(), value=1)
        number = int(receipt["blockNumber"], 16)
        received = await until(
            lambda: [each["data"] for each in hook.bodies() if each["data"]["blockNumber"] == number], within_s=30.0
        )
    block = await chain.call("eth_getBlockByNumber", receipt["blockNumber"], False)
    (data,) = received
    assert data["blockHash"] == block["hash"]
    assert data["parentHash"] == block["parentHash"]
    assert data["gasUsed"] == int(block["gasUsed"], 16)
    assert data["transactionCount"] == len(block["transactions"])


async def test_pending_transaction_of_an_address_is_sent_from_the_first_one_on(
    service: Service, box: Inbox, chain: Chain
) -> None:
    for _ in range(3):
        holder = random_address()
        async with hooked(service, box, "PENDING_TRANSACTION", addresses=[holder]) as hook:
            await chain.send(holder, value=7)
            (data,) = await hook.received(1)
        assert (data["to"], data["value"], data["direction"]) == (holder, "7", "incoming")


async def test_back_test_counts_the_events_that_were_sent(service: Service, box: Inbox, chain: Chain) -> None:
    holder, token = random_address(), chain.contract("DUSD")
    config = {"addresses": [holder]}
    async with hooked(service, box, "address_activity", **config) as hook:
        first = await chain.send(holder, value=1)
        await chain.fail(token, call("transferFrom(address,address,uint256)", holder, holder, 2**100))
        await chain.send(token, call("mint(address,uint256)", holder, 5))
        last = await chain.send(token, call("mint(address,uint256)", holder, 6))
        received = await hook.received(3)
    request = {
        "chain": "dev",
        "event_type": "address_activity",
        "config": config,
        "from_block": int(first["blockNumber"], 16),
        "to_block": int(last["blockNumber"], 16),
    }
    status, reply = await service.send("POST", "/webhooks/backtest", request)
    assert status == 200, reply
    conforms(reply, "BacktestResult")
    assert reply["events"] == len(received)
    assert reply["blocks_with_events"] == len({each["block_number"] for each in received})
    del request["from_block"], request["to_block"]
    status, newest = await service.send("POST", "/webhooks/backtest", request)
    assert (status, newest["events"]) == (200, len(received)), newest
    assert newest["to_block"] >= reply["to_block"]
    assert newest["from_block"] == max(0, newest["to_block"] - MAX_FULL_BLOCKS + 1)


async def test_webhook_shows_how_many_events_matched_in_a_day(service: Service, box: Inbox, chain: Chain) -> None:
    holder = random_address()
    async with hooked(service, box, "address_activity", addresses=[holder]) as hook:
        assert (await service.send("POST", f"/webhooks/{hook.made['id']}/test", {}))[0] == 202
        await chain.send(holder, value=1)
        await chain.send(holder, value=2)
        await hook.received(3)
        status, shown = await service.send("GET", f"/webhooks/{hook.made['id']}")
        assert (status, shown["health"]["events_last_day"]) == (200, 2)
