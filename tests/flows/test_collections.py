"""NFT collections and owners over HTTP on the development chain, compared with sums of the contracts' logs by web3.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.flows.onchain import OnChain
from tests.flows.test_tokens import get
from tests.service import Service, until
from tests.shapes import conforms

STANDARD = {"erc721": "ERC721", "erc721-old": "ERC721", "erc1155": "ERC1155"}


@pytest.fixture(scope="module")
async def chain(service: Service) -> OnChain:
    """The chain, once the index has reached its current head."""
    found = OnChain(service.ready["upstream_url"])
    head = await found.run(lambda: int(found.web3.eth.block_number))

    async def is_indexed() -> bool:
        return bool((await owned(service, "0x" + "12" * 20))["as_of_block"] >= head)

    await until(is_indexed, within_s=60.0)
    return found


async def owned(service: Service, holder: str, query: str = "") -> Any:
    return conforms(await get(service, f"/nfts/dev/owned/{holder}{query}"), "OwnedNftList")


def holdings(chain: OnChain, service: Service, block: int) -> dict[tuple[str, str, int], int]:
    """Amounts by (owner, contract, token id)."""
    return {
        (owner, nft["address"], token_id): count
        for nft in service.ready["nfts"]
        for (owner, token_id), count in chain.owners(nft["address"], block).items()
    }


async def test_collections_match_their_contracts_and_logs(service: Service, chain: OnChain) -> None:
    for nft in service.ready["nfts"]:
        contract = nft["address"]
        found = conforms(await get(service, f"/nfts/dev/collection/{contract.lower()}"), "NftCollection")
        at = found["as_of_block"]
        held = await chain.run(partial(chain.owners, contract, at))
        supply = await chain.run(partial(chain.read, contract, "totalSupply", block=at))
        assert (found["contract"], found["chain"]) == (contract, "dev")
        assert found["standard"] == STANDARD[nft["kind"]]
        assert found["name"] == await chain.run(partial(chain.text, contract, "name"))
        assert found["symbol"] == await chain.run(partial(chain.text, contract, "symbol"))
        assert found["num_owners"] == len({owner for owner, _ in held})
        assert found["total_supply"] == (sum(held.values()) if supply is None else supply)
        assert (found["floor_price_eth"], found["floor_price_usd"]) == (None, None)


async def test_owned_tokens_of_all_accounts_match_the_logs(service: Service, chain: OnChain) -> None:
    seen = 0
    for holder in [account["address"] for account in service.ready["accounts"]][:6]:
        found = await owned(service, holder, "?limit=100")
        at = found["as_of_block"]
        wanted = await chain.run(partial(holdings, chain, service, at))
        mine = {holding[1:]: count for holding, count in wanted.items() if holding[0] == holder}
        listed = {(item["contract"], int(item["token_id"])): int(item["balance"]) for item in found["nfts"]}
        assert listed == mine
        assert found["total"] == len(mine) == len(found["nfts"])
        names = {nft["address"]: (nft["name"], STANDARD[nft["kind"]]) for nft in service.ready["nfts"]}
        assert {i["contract"]: (i["collection_name"], i["standard"]) for i in found["nfts"]} == {
            c: names[c] for c, _ in mine
        }
        seen += len(mine)
    assert seen > 10


async def test_pages_of_owned_tokens_do_not_overlap(service: Service, chain: OnChain) -> None:
    for account in service.ready["accounts"][:6]:
        whole = await owned(service, account["address"], "?limit=100")
        pages = [
            await owned(service, account["address"], f"?limit=2&page={n}") for n in range(1, whole["total"] // 2 + 2)
        ]
        places = [(item["contract"], item["token_id"]) for page in pages for item in page["nfts"]]
        assert places == [(item["contract"], item["token_id"]) for item in whole["nfts"]]
        assert {page["total"] for page in pages} == {whole["total"]}


async def test_metadata_on_the_chain_is_shown_in_the_list(service: Service, chain: OnChain) -> None:
    """The collection's first token has its metadata in its URI."""
    pictures = next(nft for nft in service.ready["nfts"] if nft["kind"] == "erc721")
    whole = await chain.run(lambda: chain.owners(pictures["address"], chain.web3.eth.block_number))
    holder = next(owner for owner, token_id in whole if token_id == 1)

    async def is_named() -> bool:
        found = (await owned(service, holder, "?limit=100"))["nfts"]
        item = next(i for i in found if (i["contract"], i["token_id"]) == (pictures["address"], "1"))
        return bool(item["name"] == "A Pipe" and item["image_url"].startswith("data:image/svg+xml"))

    await until(is_named)


async def test_address_without_a_collection_is_not_found(service: Service, chain: OnChain) -> None:
    token, account = service.ready["tokens"][0]["address"], service.ready["accounts"][0]["address"]
    for address in (token, account, "0x" + "12" * 20, service.ready["multicall"]):
        assert "no NFT collection" in await get(service, f"/nfts/dev/collection/{address}", 404)


async def test_owner_of_nothing_has_an_empty_list_and_a_name_is_resolved(service: Service, chain: OnChain) -> None:
    found = await owned(service, "0x" + "12" * 20)
    assert (found["nfts"], found["total"], found["page"]) == ([], 0, 1)
    for name, holder in service.ready["ens"]["names"].items():
        assert (await owned(service, name))["address"] == holder


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/nfts/dev/owned/0x12", "address"),
        ("/nfts/dev/owned/0x" + "12" * 20 + "?page=0", "page"),
        ("/nfts/dev/owned/0x" + "12" * 20 + "?limit=1000", "limit"),
        ("/nfts/dev/collection/0x12", "contract"),
        ("/nfts/dev/collection/alice", "contract"),
    ],
)
async def test_error_names_the_invalid_parameter(service: Service, path: str, names: str) -> None:
    assert f"'{names}'" in await get(service, path, 400)
