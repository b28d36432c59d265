"""Token balances and metadata over HTTP on the development chain, compared with reads by web3.py at the same block."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from functools import partial
from typing import Any

import pytest

from tests.flows.onchain import EXACT, OnChain, formatted
from tests.http_client import CODE_OF
from tests.service import Service, until
from tests.shapes import conforms

# The shown form of a name with control characters.
SHOWN = {"odd": ("Odd[31m Coin", "ODD")}


@pytest.fixture(scope="module", autouse=True)
async def chain(service: Service) -> OnChain:
    """The chain, once the index has reached its current head."""
    found = OnChain(service.ready["upstream_url"])
    head = await found.run(lambda: int(found.web3.eth.block_number))
    await indexed(service, head, "0x" + "12" * 20)
    return found


async def get(service: Service, path: str, status: int = 200, *, key: str = "enterprise") -> Any:
    async with service.session.get(service.base + path, headers={"X-API-Key": service.keys[key]}) as response:
        body = await response.json()
        assert response.status == status, (path, response.status, body)
        if status == 200:
            return body
        assert body["error"]["code"] == CODE_OF[status]
        return body["error"]["message"]


async def balances(service: Service, address: str, query: str = "", **options: Any) -> Any:
    return conforms(await get(service, f"/tokens/dev/balances/{address}{query}", **options), "TokenBalanceList")


async def indexed(service: Service, block: int, address: str) -> Any:
    """The balances, once they are at this block or a newer one."""

    async def is_there() -> Any:
        found = await balances(service, address)
        return found if found["as_of_block"] >= block else None

    return await until(is_there, within_s=60.0)


def holders(service: Service) -> list[str]:
    return [account["address"] for account in service.ready["accounts"]]


def expected(chain: OnChain, service: Service, holder: str, block: int) -> list[dict[str, Any]]:
    prices = {
        feed["token"]: chain.price(feed["address"])
        for feed in service.ready["price_feeds"]
        if feed["token"] and feed["updated_at"] is None and int(feed["answer"]) > 0
    }
    items = []
    for token in service.ready["tokens"]:
        contract = token["address"]
        raw = chain.read(contract, "balanceOf", holder, block=block)
        if raw:
            decimals = chain.read(contract, "decimals", block=block)
            price = prices.get(contract)
            worth = (
                None if price is None or decimals is None else EXACT.multiply(Decimal(formatted(raw, decimals)), price)
            )
            items.append({**token, "raw": raw, "decimals": decimals, "worth": worth})
    return items


async def test_balances_of_all_accounts_equal_the_contracts(service: Service, chain: OnChain) -> None:
    block = await chain.run(lambda: int(chain.web3.eth.block_number))
    held = 0
    for holder in holders(service)[:6]:
        found = await indexed(service, block, holder)
        wanted = await chain.run(partial(expected, chain, service, holder, found["as_of_block"]))
        listed = {item["contract"]: item for item in found["tokens"]}
        assert set(listed) == {item["address"] for item in wanted}
        assert found["total"] == len(wanted)
        held += len(wanted)
        for item in wanted:
            one = listed[item["address"]]
            assert one["balance"] == str(item["raw"])
            decimals = item["decimals"]
            assert one["decimals"] == decimals
            assert one["formatted_balance"] == (None if decimals is None else formatted(item["raw"], decimals))
            if item["worth"] is None and item["kind"] != "weth":
                assert one["usd_value"] is None
            elif item["worth"] is not None:
                assert abs(Decimal(one["usd_value"]) - item["worth"]) <= Decimal("0.000000005")
    assert held > 10


async def test_order_is_by_value_then_symbol(service: Service) -> None:
    for holder in holders(service)[:6]:
        tokens = (await balances(service, holder))["tokens"]
        keys = [
            (
                -Decimal(t["usd_value"]) if t["usd_value"] is not None else Decimal(1),
                t["symbol"] is None,
                t["symbol"] or "",
            )
            for t in tokens
        ]
        assert keys == sorted(keys)


async def test_pages_are_cut_from_one_list(service: Service) -> None:
    holder = await richest(service)
    whole = await balances(service, holder)
    assert whole["total"] > 3
    pages = [await balances(service, holder, f"?page={n}&limit=2") for n in range(1, whole["total"] // 2 + 3)]
    assert [t["contract"] for page in pages for t in page["tokens"]] == [t["contract"] for t in whole["tokens"]]
    assert {page["total"] for page in pages} == {whole["total"]}
    assert pages[-1]["tokens"] == []


async def richest(service: Service) -> str:
    found = {holder: (await balances(service, holder))["total"] for holder in holders(service)[:6]}
    return max(found, key=lambda holder: found[holder])


async def test_transfer_and_interest_without_an_event_are_included(service: Service, chain: OnChain) -> None:
    tokens = {token["symbol"]: token["address"] for token in service.ready["tokens"]}
    holder = await richest(service)
    receiver = "0x" + "ab" * 19 + "cd"
    block = await chain.run(
        lambda: chain.send(holder, tokens["PEN"], "transfer", chain.web3.to_checksum_address(receiver), 12345)
    )
    found = await indexed(service, block, receiver)
    assert [(t["symbol"], t["balance"]) for t in found["tokens"]] == [("PEN", "12345")]
    assert found["address"] == chain.web3.to_checksum_address(receiver)
    block = await chain.run(lambda: chain.send(holder, tokens["RBS"], "rebase", 150))
    found = await indexed(service, block, holder)
    at = found["as_of_block"]
    grown = await chain.run(lambda: chain.read(tokens["RBS"], "balanceOf", holder, block=at))
    assert {t["symbol"]: t["balance"] for t in found["tokens"]}["RBS"] == str(grown)


async def test_read_after_a_transfer_waits_for_the_index(service: Service, chain: OnChain) -> None:
    token = next(token["address"] for token in service.ready["tokens"] if token["symbol"] == "PEN")
    holder, receiver = await richest(service), "0x" + "ab" * 19 + "ce"
    for count in range(1, 6):
        block = await chain.run(
            lambda: chain.send(holder, token, "transfer", chain.web3.to_checksum_address(receiver), 7)
        )
        found = await balances(service, receiver, f"?min_block={block}&min_block_wait=10")
        assert found["as_of_block"] >= block
        assert [(t["symbol"], t["balance"]) for t in found["tokens"]] == [("PEN", str(7 * count))]


async def test_index_that_does_not_reach_the_block_is_a_503(service: Service) -> None:
    path = f"/tokens/dev/balances/{await richest(service)}?min_block=1000000000&min_block_wait=0.2"
    async with service.session.get(f"{service.base}{path}", headers={"X-API-Key": service.keys["enterprise"]}) as reply:
        body = await reply.json()
        assert reply.status == 503, body
        assert int(reply.headers["Retry-After"]) >= 1
        assert int(reply.headers["X-Block-Number"]) == body["error"]["details"]["block"] < 1_000_000_000


async def test_address_is_accepted_in_any_case_and_shown_with_its_checksum(service: Service) -> None:
    holder = await richest(service)
    for text in (holder, holder.lower(), "0x" + holder[2:].upper()):
        found = await balances(service, text)
        assert found["address"] == holder
        assert found["total"] > 0


async def test_name_is_resolved_and_shown_as_the_address(service: Service) -> None:
    for name, holder in service.ready["ens"]["names"].items():
        found = await balances(service, name)
        assert found["address"] == holder
    message = await get(service, "/tokens/dev/balances/unregistered.eth", 404)
    assert "'address'" in message


async def test_address_that_holds_nothing_has_an_empty_list(service: Service) -> None:
    for address in ("0x" + "12" * 20, "0x" + "00" * 20, service.ready["multicall"]):
        found = await balances(service, address)
        assert (found["tokens"], found["total"]) == ([], 0)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/tokens/dev/balances/0x12", "address"),
        ("/tokens/dev/balances/0x" + "g" * 40, "address"),
        ("/tokens/dev/balances/EPjFWdd5AufqSSqeM2qN1xzybapC8G4wEGGkZwyTDt1v", "address"),
        ("/tokens/dev/balances/a%20b.eth", "address"),
        ("/tokens/dev/balances/0x" + "12" * 20 + "?page=0", "page"),
        ("/tokens/dev/balances/0x" + "12" * 20 + "?page=1000001", "page"),
        ("/tokens/dev/balances/0x" + "12" * 20 + "?page=x", "page"),
        ("/tokens/dev/balances/0x" + "12" * 20 + "?limit=101", "limit"),
        ("/tokens/dev/balances/0x" + "12" * 20 + "?limit=0", "limit"),
        ("/tokens/dev/balances/0x" + "12" * 20 + "?colour=red", "colour"),
        ("/tokens/dev/metadata/alice", "contract"),
        ("/tokens/dev/metadata/EPjFWdd5AufqSSqeM2qN1xzybapC8G4wEGGkZwyTDt1v", "contract"),
        ("/tokens/dev/metadata/0x" + "12" * 20 + "?page=1", "page"),
    ],
)
async def test_error_names_the_invalid_parameter(service: Service, path: str, names: str) -> None:
    assert f"'{names}'" in await get(service, path, 400)


async def test_metadata_of_every_token_equals_its_contract(service: Service, chain: OnChain) -> None:
    feeds = {feed["token"]: feed for feed in service.ready["price_feeds"]}
    for token in service.ready["tokens"]:
        contract = token["address"]
        found = conforms(await get(service, f"/tokens/dev/metadata/{contract.lower()}"), "TokenMetadata")
        at = found["as_of_block"]
        supply = await chain.run(partial(chain.read, contract, "totalSupply", block=at))
        decimals = await chain.run(partial(chain.read, contract, "decimals", block=at))
        texts = [await chain.run(partial(chain.text, contract, n)) for n in ("name", "symbol")]
        assert (found["contract"], found["chain"]) == (contract, "dev")
        assert (found["name"], found["symbol"]) == SHOWN.get(token["kind"], tuple(texts))
        assert found["decimals"] == decimals == token["decimals"]
        assert found["total_supply"] == (None if supply is None else str(supply))
        known = supply is not None and decimals is not None
        assert found["formatted_total_supply"] == (formatted(supply, decimals) if known else None)
        feed = feeds.get(contract)
        if feed is not None and feed["updated_at"] is None and int(feed["answer"]) > 0:
            price = await chain.run(partial(chain.price, feed["address"]))
            assert Decimal(found["price_usd"]) == price
            worth = EXACT.multiply(Decimal(formatted(supply, decimals)), price)
            assert abs(Decimal(found["market_cap_usd"]) - worth) <= Decimal("0.000000005")
        elif token["kind"] != "weth":
            assert (found["price_usd"], found["market_cap_usd"]) == (None, None)


async def test_address_without_a_token_contract_is_not_found(service: Service) -> None:
    for address in (holders(service)[0], "0x" + "12" * 20, "0x" + "00" * 20, service.ready["multicall"]):
        assert "no token contract" in await get(service, f"/tokens/dev/metadata/{address}", 404)


async def test_unknown_chain_and_chain_without_upstream_are_not_found(service: Service) -> None:
    for name in ("nowhere", "gnosis", "dev-nowhere"):
        await get(service, f"/tokens/{name}/balances/0x{'12' * 20}", 404)
        await get(service, f"/tokens/{name}/metadata/0x{'12' * 20}", 404)


async def test_test_key_reads_the_test_network_only(service: Service) -> None:
    token = service.ready["tokens"][0]["address"]
    for path in (f"/tokens/dev/metadata/{token}", f"/tokens/dev-testnet/metadata/{token}"):
        assert (await get(service, path, key="test"))["contract"] == token
    await get(service, f"/tokens/dev-mainnet/metadata/{token}", 403, key="test")


async def test_cached_answers_cost_the_units_of_the_price_table(service: Service) -> None:
    """An answer that takes upstream calls costs as much or more: the calls that its price does not cover are charged."""
    token = service.ready["tokens"][0]["address"]
    for path, units in ((f"/tokens/dev/balances/{token}", 5), (f"/tokens/dev/metadata/{token}", 2)):
        first, second = [await cost_of(service, path) for _ in range(2)]
        assert units == second <= first


async def cost_of(service: Service, path: str) -> int:
    async with service.session.get(service.base + path, headers={"X-API-Key": service.keys["enterprise"]}) as response:
        assert response.status == 200
        return int(response.headers["X-Compute-Units"])


async def test_concurrent_requests_get_the_same_reply(service: Service) -> None:
    holder = await richest(service)
    found = await asyncio.gather(*(balances(service, holder) for _ in range(50)))
    by_block: dict[int, Any] = {}
    for each in found:
        assert by_block.setdefault(each["as_of_block"], each) == each
