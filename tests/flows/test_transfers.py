"""The history of transfers over HTTP, compared with a plain filter of the same transfers, and Alchemy's methods for it."""

from __future__ import annotations

import datetime
import itertools
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import orjson
import pytest

from proxy.chains.evm.address import checksum
from proxy.core.holdings import Transfer
from proxy.core.transfer_history import CATEGORIES, NAMES, OF_LOGS
from proxy.services.tokens import token_holders
from proxy.store.postgres import transfers as store
from proxy.store.postgres.transfers import BlockRow
from tests.flows.test_token_reads import Reads, contract, reads
from tests.http_client import Reply, request
from tests.shapes import conforms
from tests.sockets import connected
from tests.web.worker import on_uvloop

LAST = 1000
SPAN = 300
TIME = 1_700_000_000
PEOPLE = [bytes([0xA0 + n]) * 20 for n in range(4)]
CONTRACTS = [contract(n) for n in range(3)]


def some_transfers(rng: random.Random, count: int) -> list[Transfer]:
    found: list[Transfer] = []
    for block in sorted(rng.choices(range(LAST + 1), k=count // 3)):
        if any(each.block == block for each in found):
            continue
        for log in range(rng.randrange(1, 6)):
            standard = rng.choice(sorted(OF_LOGS))
            sender, recipient = rng.choices(PEOPLE, k=2)
            token = rng.choice((0, 7, 2**255)) if standard != 20 else 0
            amount = 1 if standard == 721 else rng.choice((0, 1, 10**6, 10**18, 2**256 - 1))
            name = f"0x{block:032x}{log // 2:032x}"
            found.append(
                Transfer(standard, rng.choice(CONTRACTS), sender, recipient, amount, token, name, log, 0, block)
            )
    return found


async def keep(api: Reads, found: list[Transfer]) -> None:
    """Write the transfers as the follower does."""
    number = await api.database.fetchval("select number from followed_networks")
    places: dict[int, dict[str, int]] = {}
    rows = []
    for each in found:
        hashes = places.setdefault(each.block, {})
        rows.append(store.packed(number, hashes.setdefault(each.transaction, len(hashes)), each))
    blocks = [
        BlockRow(block, block.to_bytes(32, "big"), TIME + 10 * block, b"".join(bytes.fromhex(h[2:]) for h in hashes))
        for block, hashes in places.items()
    ]
    async with api.database.transaction():
        await store.open_tables(api.database, number, 0, LAST, span=SPAN)
        await store.follow(api.database, number, OF_LOGS, at=5)
        await store.write(api.database, number, blocks, rows)


@asynccontextmanager
async def history(database: str, found: list[Transfer], **sections: Any) -> AsyncIterator[Reads]:
    async with reads(database, indexed=LAST, **sections) as api:
        for each in CONTRACTS:
            api.machine.token(each, 1, "Coin", "COIN", 6)
        await keep(api, found)
        yield api


async def pages(api: Reads, path: str, query: dict[str, Any], shape: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    cursor = ""
    for _ in range(200):
        text = "&".join(f"{name}={value}" for name, value in query.items())
        reply = await api.get(f"{path}?{text}{cursor}")
        assert reply.status == 200, reply
        page = conforms(reply.json, shape)
        assert len(page["transfers"]) <= query["limit"]
        found += page["transfers"]
        if page["next"] is None:
            return found
        cursor = f"&cursor={page['next']}"
    raise AssertionError("no end")


def key_of(each: Transfer) -> tuple[Any, ...]:
    return each.block, each.log_index, NAMES[each.standard], str(each.amount), checksum(each.sender)


def key_of_item(item: dict[str, Any]) -> tuple[Any, ...]:
    return item["block_number"], item["log_index"], item["category"], item["value"], item["from"]


def queries(rng: random.Random) -> Iterator[tuple[dict[str, Any], Any]]:
    """Filters, and whether they pass a transfer."""
    while True:
        query: dict[str, Any] = {"limit": rng.choice((1, 7, 100)), "order": rng.choice(("asc", "desc"))}
        tests: list[Any] = []
        if rng.random() < 0.4:
            names = rng.sample(sorted(CATEGORIES), k=rng.randrange(1, 3))
            query["category"] = ",".join(names)
            tests.append(lambda t, names=names: NAMES[t.standard] in names)
        if rng.random() < 0.3:
            other = rng.choice(PEOPLE)
            query["counterparty"] = checksum(other)
            tests.append(lambda t, other=other: other in (t.sender, t.recipient))
        if rng.random() < 0.3:
            query["min_value"] = least = rng.choice((1, 10**6, 10**30))
            tests.append(lambda t, least=least: t.amount >= least)
        if rng.random() < 0.5:
            low = rng.randrange(LAST)
            high = rng.randrange(low, LAST + 1)
            if rng.random() < 0.5:
                query |= {"from_block": low, "to_block": high}
            else:
                query |= {"from_time": _iso(low), "to_time": _iso(high)}
            tests.append(lambda t, low=low, high=high: low <= t.block <= high)
        yield query, lambda t, tests=tests: all(test(t) for test in tests)


def _iso(block: int) -> str:
    return datetime.datetime.fromtimestamp(TIME + 10 * block, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@on_uvloop
async def test_pages_of_an_address_and_a_contract_equal_a_plain_filter(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SCANNED", 40)
    monkeypatch.setattr(store, "MOST_ROWS", 20)
    rng = random.Random(1)
    found = some_transfers(rng, 600)
    async with history(database, found) as api:
        for (query, passes), _ in zip(queries(rng), range(25), strict=False):
            person, token = rng.choice(PEOPLE), rng.choice(CONTRACTS)
            direction = rng.choice(("in", "out", "both"))
            sides = {"in": ("recipient",), "out": ("sender",), "both": ("sender", "recipient")}[direction]
            expected = [t for t in found if passes(t) and any(getattr(t, side) == person for side in sides)]
            asked = {**query, "direction": direction}
            if rng.random() < 0.3:
                asked["contract"] = checksum(token)
                expected = [t for t in expected if t.contract == token]
            got = await pages(api, f"/transfers/ethereum/{checksum(person)}", asked, "TransferList")
            _compare(got, expected, query["order"])
            expected = [t for t in found if passes(t) and t.contract == token]
            path = f"/transfers/ethereum/contract/{checksum(token)}"
            _compare(await pages(api, path, query, "ContractTransferList"), expected, query["order"])


@on_uvloop
async def test_addresses_with_equal_hashes_in_the_index_have_their_own_pages(database: str) -> None:
    """The index keeps 30 bits of an address's hash."""
    async with history(database, []) as api:
        pair = await api.database.fetchval(
            "select array_agg(address) from generate_series(1, 150000) as n, substr(sha256(int4send(n)), 1, 20) as address"
            " group by hashtextextended(encode(address, 'hex'), 0) << 34 having count(*) > 1 limit 1"
        )
        found = [
            Transfer(20, CONTRACTS[0], pair[n % 2], PEOPLE[0], n, 0, f"0x{n:064x}", 0, 0, n) for n in range(1, LAST, 5)
        ]
        await keep(api, found)
        for order, person in itertools.product(("asc", "desc"), pair):
            path = f"/transfers/ethereum/{checksum(person)}"
            got = await pages(api, path, {"limit": 7, "order": order}, "TransferList")
            _compare(got, [t for t in found if t.sender == person], order)


@on_uvloop
async def test_block_that_the_index_has_no_bits_for_is_refused(database: str) -> None:
    async with history(database, []) as api:
        with pytest.raises(asyncpg.RaiseError, match="too high"):
            await store.open_tables(api.database, 1, 1 << 34, 1 << 34, span=SPAN)
        beyond = f"/transfers/ethereum/{checksum(PEOPLE[0])}?from_block={2**40}"
        assert (await api.get(beyond)).json["transfers"] == []


def _compare(got: list[dict[str, Any]], expected: list[Transfer], order: str) -> None:
    ordered = sorted(expected, key=lambda t: (t.block, t.log_index), reverse=order == "desc")
    assert [key_of_item(each) for each in got] == [key_of(each) for each in ordered]


@on_uvloop
async def test_transfer_has_the_fields_of_its_token_and_transaction(database: str) -> None:
    moved = Transfer(20, CONTRACTS[0], PEOPLE[0], PEOPLE[1], 1_500_000, 0, "0x" + "ab" * 32, 3, 0, 900)
    async with history(database, [moved]) as api:
        (item,) = await pages(api, f"/transfers/ethereum/{checksum(PEOPLE[1])}", {"limit": 5}, "TransferList")
        assert item == {
            "chain": "ethereum",
            "block_number": 900,
            "block_hash": "0x" + (900).to_bytes(32, "big").hex(),
            "timestamp": _iso(900),
            "tx_hash": "0x" + "ab" * 32,
            "log_index": 3,
            "from": checksum(PEOPLE[0]),
            "to": checksum(PEOPLE[1]),
            "contract": checksum(CONTRACTS[0]),
            "token_id": None,
            "value": "1500000",
            "formatted_value": "1.5",
            "symbol": "COIN",
            "decimals": 6,
            "category": "erc20",
            "standard": "ERC20",
            "direction": "in",
            "status": item["status"],
        }
        whole = (await api.get(f"/transfers/ethereum/{checksum(PEOPLE[1])}")).json
        assert (whole["total"], whole["next"], whole["block_number"]) == (1, None, LAST)
        coins = (await api.get(f"/transfers/ethereum/{checksum(PEOPLE[1])}?category=native")).json
        assert (coins["total"], coins["transfers"], coins["complete_from"]) == (None, [], {"native": None})
        assert whole["complete_from"] == {"native": None, "internal": None, "erc20": 5, "erc721": 5, "erc1155": 5}
        assert whole["complete_to"] == {
            **dict.fromkeys(("erc20", "erc721", "erc1155"), LAST),
            "native": None,
            "internal": None,
        }


@on_uvloop
async def test_transfers_of_a_transaction_come_from_the_block_of_its_receipt(database: str) -> None:
    one, two, other = "0x" + "01" * 32, "0x" + "02" * 32, "0x" + "03" * 32
    found = [
        Transfer(20, CONTRACTS[0], PEOPLE[0], PEOPLE[1], 5, 0, name, log, 0, 900)
        for log, name in enumerate((one, one, two))
    ]
    async with history(database, found) as api:

        def receipt(params: list[Any]) -> Any:
            if params[0] not in (one, two):
                return None
            return {"blockNumber": hex(900), "blockHash": "0x" + (900).to_bytes(32, "big").hex(), "status": "0x1"}

        api.harness.upstreams[0].answers["eth_getTransactionReceipt"] = receipt
        reply = await api.get(f"/transfers/ethereum/transaction/{one}")
        assert [each["log_index"] for each in conforms(reply.json, "TransactionTransferList")["transfers"]] == [0, 1]
        assert (await api.get(f"/transfers/ethereum/transaction/{other}")).status == 404


@on_uvloop
async def test_block_of_another_fork_is_unavailable_even_if_the_index_has_no_transfers_there(database: str) -> None:
    known = "0x" + "77" * 32
    async with history(database, []) as api:
        await api.database.execute(
            "insert into recent_blocks (network, number, hash) select number, 950, $1 from followed_networks",
            bytes.fromhex(known[2:]),
        )
        # The hash of each transaction is that of its block here. Receipts are cached, so that each case has its own.
        api.harness.upstreams[0].answers["eth_getTransactionReceipt"] = lambda params: {
            "blockNumber": hex(950),
            "blockHash": params[0],
            "status": "0x1",
        }
        for block_hash, status in ((known, 200), ("0x" + "88" * 32, 503)):
            reply = await api.get(f"/transfers/ethereum/transaction/{block_hash}")
            assert reply.status == status, reply


@pytest.mark.parametrize(
    "receipt",
    [
        {},
        {"blockNumber": None, "blockHash": None},
        {"blockNumber": 900, "blockHash": "0x" + "00" * 32},
        {"blockNumber": "0x384", "blockHash": "0xzz"},
        {"blockNumber": "0x384", "blockHash": {}},
        {"blockNumber": hex(2**70), "blockHash": "0x00"},
        {"blockNumber": "-0x" + "f" * 40, "blockHash": "0x00"},
    ],
)
@on_uvloop
async def test_receipt_that_does_not_name_an_indexed_block_is_unavailable(database: str, receipt: Any) -> None:
    async with history(database, []) as api:
        api.harness.upstreams[0].answers["eth_getTransactionReceipt"] = lambda params: receipt
        reply = await api.get(f"/transfers/ethereum/transaction/0x{'01' * 32}")
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")


@on_uvloop
async def test_holders_are_listed_by_their_sums(database: str) -> None:
    async with history(database, []) as api:
        for n, person in enumerate(PEOPLE):
            await api.hold([CONTRACTS[0]], person, amount=(n - 1) * 10**6)
        reply = await api.get(f"/tokens/ethereum/holders/{checksum(CONTRACTS[0])}?limit=1")
        listed = conforms(reply.json, "TokenHolderList")
        assert listed["total"] == 2
        assert listed["holders"] == [{"address": checksum(PEOPLE[3]), "balance": "2000000", "formatted_balance": "2"}]


@on_uvloop
async def test_long_list_of_holders_costs_more_than_the_price(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_holders, "PAID_ROWS", 1)
    monkeypatch.setattr(token_holders, "ROWS_PER_UNIT", 1)
    async with history(database, []) as api:
        for person in PEOPLE:
            await api.hold([CONTRACTS[0]], person, amount=10**6)
        reply = await api.get(f"/tokens/ethereum/holders/{checksum(CONTRACTS[0])}")
        assert int(reply.headers["x-compute-units"]) >= 20 + len(PEOPLE) - 1


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("cursor=AAAAAAFIEGAgAAADAAAAA!", "cursor"),
        ("cursor=__________8AAAAAAAAAAA", "cursor"),
        ("from_block=5&to_block=4", "to_block"),
        ("category=erc20,coins", "category"),
        ("counterparty=7EcDhSYGxXyscszYEp35KHN8vvw3svAuLKTzXwCFLtV", "counterparty"),
        ("min_value=" + "9" * 78, "min_value"),
        ("direction=up", "direction"),
        ("from_time=2026-02-31T00:00:00Z", "from_time"),
        ("limit=101", "limit"),
    ],
)
@on_uvloop
async def test_bad_parameter_is_named(database: str, query: str, param: str) -> None:
    async with history(database, []) as api:
        reply = await api.get(f"/transfers/ethereum/{checksum(PEOPLE[0])}?{query}")
        assert reply.status == 400, reply
        assert param in reply.json["error"]["message"], reply.json


# Alchemy's methods


async def rpc(api: Reads, method: str, *params: Any) -> Any:
    reply = await send(api, {"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
    assert reply.status == 200, reply
    return reply.json


async def send(api: Reads, body: Any) -> Reply:
    async with await api.harness.worker.connect() as client:
        key = api.harness.worker.keys["main"]
        return await client.send(request("POST", "/v1/rpc/ethereum/mainnet", orjson.dumps(body), key=key))


@on_uvloop
async def test_asset_transfers_are_paged_in_alchemys_form(database: str) -> None:
    rng = random.Random(2)
    found = some_transfers(rng, 600)
    async with history(database, found, rpc={"alchemy_methods": True}) as api:
        person = PEOPLE[0]
        expected = [t for t in found if t.sender == person and t.amount and t.standard in (20, 721)]
        asked = {"fromAddress": checksum(person), "category": ["erc20", "erc721"], "maxCount": "0x1e"}
        got: list[Any] = []
        while True:
            result = (await rpc(api, "alchemy_getAssetTransfers", asked))["result"]
            got += result["transfers"]
            if "pageKey" not in result:
                break
            asked["pageKey"] = result["pageKey"]
        assert [(int(t["blockNum"], 16), t["uniqueId"].split(":")[2]) for t in got] == [
            (t.block, str(t.log_index)) for t in expected
        ]
        assert len({each["uniqueId"] for each in got}) == len(got)
        coin = next(each for each in got if each["category"] == "erc20")
        assert coin["rawContract"]["decimal"] == "0x6"
        assert coin["value"] == int(coin["rawContract"]["value"], 16) / 10**6


@on_uvloop
async def test_every_hundred_transfers_cost_the_same(database: str) -> None:
    person, other = PEOPLE[:2]
    found = [
        Transfer(20, CONTRACTS[0], person, other, 5, 0, "0x" + "ab" * 32, number, 0, 900) for number in range(1, 351)
    ]
    async with history(database, found, rpc={"alchemy_methods": True}) as api:
        costs = []
        # The first call also describes the token.
        for count in (1, 1, 100, 101, 200, 350):
            asked = {"fromAddress": checksum(person), "category": ["erc20"], "maxCount": hex(count)}
            body = {"jsonrpc": "2.0", "id": 1, "method": "alchemy_getAssetTransfers", "params": [asked]}
            reply = await send(api, body)
            assert len(reply.json["result"]["transfers"]) == count
            costs.append(int(reply.headers["x-compute-units"]))
        assert costs[1:] == [10, 10, 20, 20, 40]


@on_uvloop
async def test_own_methods_are_called_in_batches_and_refuse_what_is_not_kept(database: str) -> None:
    async with history(database, [], rpc={"alchemy_methods": True}) as api:
        asked = {"fromAddress": checksum(PEOPLE[0]), "category": ["external"]}
        calls = [
            {"jsonrpc": "2.0", "id": 1, "method": "alchemy_getAssetTransfers", "params": [asked]},
            {"jsonrpc": "2.0", "id": 2, "method": "alchemy_getTokenMetadata", "params": [checksum(CONTRACTS[0])]},
            {"jsonrpc": "2.0", "id": 3, "method": "eth_chainId", "params": []},
        ]
        replies = {each["id"]: each for each in (await send(api, calls)).json}
        assert replies[1]["error"]["code"] == -32602
        assert "external" in replies[1]["error"]["message"]
        assert replies[2]["result"] == {"name": "Coin", "symbol": "COIN", "decimals": 6, "logo": None}
        assert "result" in replies[3]
        balances = await rpc(api, "alchemy_getTokenBalances", checksum(PEOPLE[0]), [checksum(CONTRACTS[0])])
        assert balances["result"]["tokenBalances"][0]["tokenBalance"] == f"0x{1:064x}"


@on_uvloop
async def test_balances_of_as_many_contracts_as_alchemy_takes(database: str) -> None:
    async with history(database, [], rpc={"alchemy_methods": True}) as api:
        costs = []
        for count in (1, 1500):
            others = [f"0x{number:040x}" for number in range(1, count)]
            params = [checksum(PEOPLE[0]), [*others, checksum(CONTRACTS[0])]]
            body = {"jsonrpc": "2.0", "id": 1, "method": "alchemy_getTokenBalances", "params": params}
            reply = await send(api, body)
            found = reply.json["result"]["tokenBalances"]
            assert [each["contractAddress"] for each in found[:-1]] == others
            assert found[-1]["tokenBalance"] == f"0x{1:064x}"
            costs.append(int(reply.headers["x-compute-units"]))
        assert costs[0] == 5
        assert costs[1] > 50, "the size of the calls and of their result is paid for"
        values = await rpc(api, "alchemy_getTokenBalances", *[0] * 6000)
        assert (values["error"]["code"], "values" in values["error"]["message"]) == (-32602, True), values
        refused = await rpc(api, "alchemy_getTokenBalances", checksum(PEOPLE[0]), ["0x" + "11" * 20] * 1501)
        assert (refused["error"]["code"], "up to 1500 addresses" in refused["error"]["message"]) == (-32602, True)


@on_uvloop
async def test_own_methods_are_called_over_a_websocket(database: str) -> None:
    moved = Transfer(20, CONTRACTS[0], PEOPLE[0], PEOPLE[1], 1_500_000, 0, "0x" + "ab" * 32, 3, 0, 900)
    async with (
        history(database, [moved], rpc={"alchemy_methods": True}) as api,
        connected(api.harness.worker) as client,
    ):
        asked = {"toAddress": checksum(PEOPLE[1]), "category": ["erc20"]}
        (found,) = (await client.call("alchemy_getAssetTransfers", asked))["result"]["transfers"]
        assert (found["hash"], found["value"]) == ("0x" + "ab" * 32, 1.5)
        described = await client.call("alchemy_getTokenMetadata", checksum(CONTRACTS[0]))
        assert described["result"]["symbol"] == "COIN"
        wrong = await client.call("alchemy_getAssetTransfers", {**asked, "category": ["coins"]})
        assert wrong["error"]["code"] == -32602
        plain = await client.call("eth_chainId")
        assert "result" in plain


@on_uvloop
async def test_own_methods_do_not_exist_unless_switched_on(database: str) -> None:
    async with history(database, []) as api:
        reply = await rpc(api, "alchemy_getTokenMetadata", checksum(CONTRACTS[0]))
        assert reply["error"]["code"] == -32601
