"""NFT collections and who owns what of them: the index counts, the contract describes itself.

A contract's standard is what ERC-165 says, where the contract speaks it properly; else what it was seen to do: the events in
the index, or an owner of a token. A contract that is neither is no collection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Protocol

from proxy.chains.evm import abi, address
from proxy.chains.registry import Network
from proxy.core import display_text, units, uris
from proxy.core.paging import Page
from proxy.errors import NotFound
from proxy.services.multicall import Multicall
from proxy.services.tokens.contracts import NAME, SYMBOL, TokenContracts, about_a_block, token_of
from proxy.services.tokens.token_prices import TokenPrices
from proxy.store.cache import DataCache
from proxy.store.holdings import Collection, HoldingStore, NftHolding

# Counting the owners of a large collection takes a while: it is not done for every block.
KEPT_S = 30.0
# JSON numbers beyond this are not exact where they are read.
LARGEST_INTEGER = 2**53 - 1
STANDARDS = {721: "ERC721", 1155: "ERC1155"}

_ERC165, _INVALID, _ERC721, _ERC1155 = (
    abi.call("supportsInterface(bytes4)", bytes.fromhex(each))
    for each in ("01ffc9a7", "ffffffff", "80ac58cd", "d9b67a26")
)
_DESCRIBED = (NAME, SYMBOL, abi.call("decimals()"), abi.call("totalSupply()"), abi.call("contractURI()"))
_ASKED = (_ERC165, _INVALID, _ERC721, _ERC1155)
# The first tokens of most collections.
_OWNED = (abi.call("ownerOf(uint256)", 0), abi.call("ownerOf(uint256)", 1))


class ImageSource(Protocol):
    """What is known of NFTs' metadata."""

    async def known(self, network: Network, nfts: Sequence[tuple[bytes, int]]) -> Sequence[Mapping[str, Any] | None]:
        """The metadata of each that was read before: its name and image_url."""
        ...

    async def document(self, uri: str) -> Mapping[str, str] | None:
        """What the JSON that a URI leads to says in words."""
        ...


class FloorPriceSource(Protocol):
    async def find(self, network: Network, contract: str) -> Decimal | None:
        """The lowest asking price, in the network's coin."""
        ...


class CollectionService:
    def __init__(
        self,
        contracts: TokenContracts,
        multicall: Multicall,
        holdings: HoldingStore,
        kept: DataCache,
        *,
        market: TokenPrices,
        pictures: ImageSource,
        floors: FloorPriceSource,
    ) -> None:
        self._contracts = contracts
        self._multicall = multicall
        self._holdings = holdings
        self._kept = kept
        self._market = market
        self._pictures = pictures
        self._floors = floors

    def __repr__(self) -> str:
        return f"<CollectionService of {self._contracts!r}>"

    # A collection

    async def collection(self, network: Network, contract: bytes) -> dict[str, Any]:
        async def read() -> dict[str, Any]:
            return await self._read(network, contract)

        found: dict[str, Any] = await self._kept.once(network.id, "collection", contract.hex(), make=read, ttl_s=KEPT_S)
        return found

    async def _read(self, network: Network, contract: bytes) -> dict[str, Any]:
        counted, indexed = await self._contracts.at_one_block(
            network, lambda: self._holdings.collection(network.id, contract)
        )
        block = min(indexed, await self._multicall.tip(network))
        calls = [(contract, data) for data in (*_DESCRIBED, *_ASKED, *_OWNED)]
        name, symbol, decimals, supply, uri, *rest = await self._multicall.read(network, calls, block=block)
        standard = _standard(rest[:4], counted) or _by_behaviour(rest[4:], decimals)
        if standard is None:
            raise NotFound(f"there is no NFT collection at {address.checksum(contract)} on {network.id}")
        token = token_of(contract, name, symbol, None)
        return {
            "contract": token.contract,
            "name": token.name,
            "symbol": token.symbol,
            "standard": standard,
            "total_supply": _integer(abi.uint(supply), counted),
            "num_owners": counted.owners,
            **await self._floor(network, token.contract),
            **await self._described(abi.text(uri)),
            "as_of_block": block,
        }

    async def _floor(self, network: Network, contract: str) -> dict[str, Any]:
        floor = await self._floors.find(network, contract)
        if floor is None:
            return {"floor_price_eth": None, "floor_price_usd": None}
        coin = await self._market.coin(network)
        usd = None if coin is None else units.dollars(units.EXACT.multiply(floor, coin))
        return {"floor_price_eth": format(floor, "f"), "floor_price_usd": usd}

    async def _described(self, uri: str | None) -> dict[str, Any]:
        """What the contract's own document says, as marketplaces read it (ERC-7572)."""
        found = (await self._pictures.document(uri) if uri else None) or {}
        return {
            "banner_url": _image(found.get("banner_image") or found.get("banner_image_url")),
            "image_url": _image(found.get("image") or found.get("image_url")),
            "description": display_text.cleaned(found.get("description"), display_text.DESCRIPTION),
        }

    # Of one owner

    async def owned(self, network: Network, holder: bytes, page: Page) -> dict[str, Any]:
        """A page of an owner's tokens, by contract and id, as the index has them."""

        async def look() -> tuple[list[NftHolding], int]:
            rows = await self._holdings.nfts_of(network.id, holder, limit=page.limit, offset=page.offset)
            return rows, await self._holdings.count_nfts(network.id, holder)

        async def read() -> dict[str, Any]:
            (rows, total), block = await self._contracts.at_one_block(network, look)
            return {"nfts": await self._items(network, rows, block), "total": total, "as_of_block": block}

        name = f"{holder.hex()}/{page.number}/{page.limit}@{(await self._contracts.at(network)).name}"
        keep_s = about_a_block(network)
        found: dict[str, Any] = await self._kept.once(network.id, "owned", name, make=read, ttl_s=keep_s)
        return found

    async def _items(self, network: Network, rows: Sequence[NftHolding], block: int) -> list[dict[str, Any]]:
        contracts = [*dict.fromkeys(row.contract for row in rows)]
        at = min(block, await self._multicall.tip(network))
        collections = await self._contracts.known(network, contracts, at)
        pictures = await self._pictures.known(network, [(row.contract, row.token_id) for row in rows])
        return [
            {
                "contract": address.checksum(row.contract),
                "token_id": str(row.token_id),
                "name": (known or {}).get("name"),
                "collection_name": collections[row.contract].name,
                "image_url": (known or {}).get("image_url"),
                "standard": STANDARDS[row.standard],
                "balance": str(row.amount),
            }
            for row, known in zip(rows, pictures, strict=True)
        ]


def _standard(answers: Sequence[bytes | None], counted: Collection) -> str | None:
    """By ERC-165: what speaks it answers yes to its own id and no to ffffffff. Else by the events that were seen."""
    erc165, invalid, erc721, erc1155 = map(abi.truth, answers)
    if erc165 is True and invalid is False:
        if erc721:
            return STANDARDS[721]
        if erc1155:
            return STANDARDS[1155]
    return None if counted.standard is None else STANDARDS[counted.standard]


def _by_behaviour(owners: Sequence[bytes | None], decimals: bytes | None) -> str | None:
    """What has an owner for a token, and no decimals, is a collection from before ERC-165."""
    has_owner = any(owner not in (None, address.ZERO) for owner in map(abi.address, owners))
    return STANDARDS[721] if has_owner and abi.uint(decimals) is None else None


def _integer(told: int | None, counted: Collection) -> int | None:
    """How many there are: what the contract says, or what the index counts. A number that JSON cannot carry is not told."""
    supply = counted.supply if told is None else told
    return supply if supply <= LARGEST_INTEGER else None


def _image(uri: str | None) -> str | None:
    return uris.shown(uri) if uri else None
