"""Solana tokens over HTTP, on a real virtual machine with the real token programs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from solders.keypair import Keypair
from solders.pubkey import Pubkey

from proxy.services.tokens import svm_tokens
from tests.http_client import Reply, request
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.shapes import conforms
from tests.spl import TOKEN_2022, Bank
from tests.svm_upstreams import SvmChain, SvmUpstream
from tests.web.worker import on_uvloop

NETWORK = "solana/mainnet"
OWNER = Keypair.from_seed(bytes([9] * 32)).pubkey()
OTHER = Keypair.from_seed(bytes([8] * 32)).pubkey()


class Solana:
    def __init__(self, harness: RpcHarness, bank: Bank) -> None:
        self.harness = harness
        self.bank = bank

    async def get(self, path: str) -> Reply:
        async with await self.harness.worker.connect() as client:
            return await client.send(request("GET", f"/v1{path}", key=self.harness.worker.keys["main"]))

    async def balances(self, owner: Any = OWNER, query: str = "") -> Any:
        reply = await self.get(f"/tokens/solana/balances/{owner}{query}")
        assert reply.status == 200, reply
        return conforms(reply.json, "TokenBalanceList")

    async def metadata(self, mint: Any) -> Any:
        reply = await self.get(f"/tokens/solana/metadata/{mint}")
        assert reply.status == 200, reply
        return conforms(reply.json, "TokenMetadata")


@asynccontextmanager
async def solana(**sections: Any) -> AsyncIterator[Solana]:
    chain = SvmChain()
    async with rpc_harness(1, chain=chain, kind=SvmUpstream, network=NETWORK, **sections) as harness:
        yield Solana(harness, Bank(chain.machine))


@on_uvloop
async def test_balances_of_both_programs_are_listed_with_their_names() -> None:
    async with solana() as api:
        bank = api.bank
        dollar, bare = bank.new_mint(6), bank.new_mint(9)
        new = bank.new_named_mint(2, "New Coin\u202e", "NEW")
        bank.name(dollar, "Dollar", "USD")
        bank.give(dollar, OWNER, 1_500_250_000)
        bank.give(bare, OWNER, 2**64 - 1)
        bank.give(new, OWNER, 12_345, TOKEN_2022)
        bank.give(dollar, OTHER, 7)
        listed = await api.balances()
        assert listed["address"] == str(OWNER)
        assert listed["total"] == 3
        assert listed["as_of_block"] == api.harness.chain.head + 32
        shown = [
            (t["contract"], t["name"], t["symbol"], t["decimals"], t["formatted_balance"]) for t in listed["tokens"]
        ]
        assert shown == [
            (str(new), "New Coin", "NEW", 2, "123.45"),
            (str(dollar), "Dollar", "USD", 6, "1500.25"),
            (str(bare), None, None, 9, "18446744073.709551615"),
        ]


@on_uvloop
async def test_accounts_of_one_mint_are_summed_and_empty_ones_left_out() -> None:
    async with solana() as api:
        mint, empty = api.bank.new_mint(0), api.bank.new_mint(0)
        for amount in (1, 20, 0, 300):
            api.bank.give(mint, OWNER, amount)
        api.bank.give(empty, OWNER, 0)
        listed = await api.balances()
        assert [(t["contract"], t["balance"]) for t in listed["tokens"]] == [(str(mint), "321")]


@on_uvloop
async def test_nft_is_not_listed_as_a_balance() -> None:
    async with solana() as api:
        nft, coin = api.bank.new_mint(0), api.bank.new_mint(0)
        api.bank.give(nft, OWNER, 1)
        api.bank.give(coin, OWNER, 1)
        api.bank.give(coin, OTHER, 1)
        assert [t["contract"] for t in (await api.balances())["tokens"]] == [str(coin)]


@on_uvloop
async def test_most_valuable_token_comes_first() -> None:
    async with solana() as first:
        cheap, dear = first.bank.new_mint(6), first.bank.new_mint(6)
    fixed = [
        {"network": NETWORK, "contract": str(cheap), "usd": "0.5"},
        {"network": NETWORK, "contract": str(dear), "usd": "1000.123456789"},
    ]
    async with solana(prices={"fixed": fixed}) as api:
        assert (api.bank.new_mint(6), api.bank.new_mint(6)) == (cheap, dear)  # derived from the same seeds
        api.bank.give(cheap, OWNER, 10**6)
        api.bank.give(dear, OWNER, 10**6)
        tokens = (await api.balances())["tokens"]
        assert [(t["contract"], t["usd_value"]) for t in tokens] == [(str(dear), "1000.12345679"), (str(cheap), "0.50")]
        assert (await api.metadata(dear))["market_cap_usd"] == "1000.12345679"


@on_uvloop
async def test_metadata_combines_the_mint_and_the_metadata_program() -> None:
    async with solana() as api:
        mint = api.bank.new_mint(6)
        api.bank.name(mint, "Dollar", "USD")
        api.bank.give(mint, OTHER, 25_000_001)
        assert await api.metadata(mint) == {
            "contract": str(mint),
            "chain": "solana",
            "name": "Dollar",
            "symbol": "USD",
            "decimals": 6,
            "total_supply": "25000001",
            "formatted_total_supply": "25.000001",
            "price_usd": None,
            "market_cap_usd": None,
            "logo_url": None,
            "as_of_block": api.harness.chain.head + 32,
        }


@on_uvloop
async def test_name_in_the_mint_takes_precedence() -> None:
    async with solana() as api:
        mint = api.bank.new_named_mint(3, "New Coin", "NEW")
        api.bank.name(mint, "Another", "ELSE")
        shown = await api.metadata(mint)
        assert (shown["name"], shown["symbol"], shown["decimals"]) == ("New Coin", "NEW", 3)


@on_uvloop
async def test_metadata_of_another_mint_is_ignored() -> None:
    async with solana() as api:
        mint = api.bank.new_mint(6)
        api.bank.name(mint, "Dollar", "USD", about=OTHER)
        shown = await api.metadata(mint)
        assert (shown["name"], shown["symbol"]) == (None, None)


@on_uvloop
async def test_list_is_paged() -> None:
    async with solana() as api:
        mints = sorted(str(api.bank.new_mint(0)) for _ in range(5))
        for mint in mints:
            api.bank.give(Pubkey.from_string(mint), OWNER, 2)
        pages = [await api.balances(query=f"?page={n}&limit=2") for n in (1, 2, 3, 4)]
        assert [[t["contract"] for t in page["tokens"]] for page in pages] == [mints[:2], mints[2:4], mints[4:], []]
        assert {page["total"] for page in pages} == {5}


@on_uvloop
async def test_owner_of_nothing_has_an_empty_list_and_other_accounts_are_no_mints() -> None:
    async with solana() as api:
        assert (await api.balances(OTHER))["tokens"] == []
        account = api.bank.give(api.bank.new_mint(0), OWNER, 5)
        for address in (OTHER, account, OWNER):
            (await api.get(f"/tokens/solana/metadata/{address}")).fault(404)


@pytest.mark.parametrize("address", ["0x" + "11" * 20, "1" * 31, "z" * 44, "name.eth"])
@on_uvloop
async def test_error_names_the_invalid_address_parameter(address: str) -> None:
    async with solana() as api:
        error = (await api.get(f"/tokens/solana/balances/{address}")).fault(400)
        assert "'address'" in error["message"]
        error = (await api.get(f"/tokens/solana/metadata/{address}")).fault(400)
        assert "'contract'" in error["message"]


@on_uvloop
async def test_many_mints_are_read_in_several_calls() -> None:
    async with solana() as api:
        for _ in range(60):
            api.bank.give(api.bank.new_mint(1), OWNER, 5)
        assert (await api.balances())["total"] == 60
        assert api.harness.count("getMultipleAccounts") == 2  # two accounts per mint, at most a hundred per call


@on_uvloop
async def test_owner_of_more_accounts_than_can_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svm_tokens, "MOST_BYTES", 500)
    async with solana() as api:
        mints = [api.bank.new_mint(1) for _ in range(3)]
        api.bank.give(mints[0], OWNER, 5)
        assert (await api.balances())["total"] == 1
        for mint in mints:
            api.bank.give(mint, OTHER, 5)
        (await api.get(f"/tokens/solana/balances/{OTHER}")).fault(400)


@on_uvloop
async def test_malformed_result_is_an_error_and_not_an_empty_list() -> None:
    async with solana() as api:
        api.bank.give(api.bank.new_mint(1), OWNER, 5)
        upstream = api.harness.upstreams[0]
        results: tuple[Any, ...] = (None, [], {"context": {"slot": 5}})
        for result in results:
            upstream.answers["getTokenAccountsByOwner"] = partial(lambda result, _: result, result)
            (await api.get(f"/tokens/solana/balances/{OWNER}")).fault(503)
        del upstream.answers["getTokenAccountsByOwner"]
        upstream.answers["getMultipleAccounts"] = lambda _: {"context": {"slot": 5}, "value": []}
        (await api.get(f"/tokens/solana/balances/{OWNER}")).fault(503)
