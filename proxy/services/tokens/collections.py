"""NFT collections and their owners: owners and counts come from the index, descriptions from the contract.

A contract's standard is the one it declares by ERC-165, if it implements that correctly; else it is inferred from its events in
the index, or from a token that has an owner. Any other contract is not a collection.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

from proxy.chains.evm import abi, address, nfts
from proxy.chains.registry import Network
from proxy.core import display_text, units, uris
from proxy.core.paging import Page
from proxy.errors import NotFound
from proxy.services.multicall import Multicall
from proxy.services.tokens.token_contracts import NAME, SYMBOL, TokenContracts, about_a_block, token_of
from proxy.services.tokens.token_prices import TokenPrices
from proxy.store.postgres.holdings import Collection, HoldingStore, NftHolding
from proxy.store.valkey.cache import DataCache

# Counting the owners of a large collection takes a while, so it is not done for every block.
KEPT_S = 30.0
# JSON numbers beyond this lose precision in most clients.
LARGEST_INTEGER = 2**53 - 1
STANDARDS = {721: "ERC721", 1155: "ERC1155"}

_DESCRIBED = (NAME, SYMBOL, abi.call("decimals()"), abi.call("totalSupply()"), abi.call("contractURI()"))
# The ids of the first tokens in most collections.
_OWNERS = (abi.call("ownerOf(uint256)", 0), abi.call("ownerOf(uint256)", 1))


class ImageSource(Protocol):
    """Metadata of NFTs."""

    async def known(self, network: Network, nfts: Sequence[tuple[bytes, int]]) -> Sequence[Mapping[str, Any] | None]:
        """The known members of each NFT (name, image_url, image_gateway_url, description, traits, fetch_status); None if it
        cannot be read soon."""
        ...

    async def document(self, uri: str) -> Mapping[str, str] | None:
        """The text members of the JSON document at a URI."""
        ...


class FloorPriceSource(Protocol):
    async def find(self, network: Network, contract: str) -> Decimal | None:
        """The lowest asking price, in the network's coin."""
        ...


@dataclass(frozen=True, slots=True, repr=False)
class CollectionService:
    contracts: TokenContracts
    multicall: Multicall
    holdings: HoldingStore
    cache: DataCache
    prices: TokenPrices
    images: ImageSource
    floors: FloorPriceSource

    def __repr__(self) -> str:
        return f"<CollectionService of {self.contracts!r}>"

    # A collection

    async def collection(self, network: Network, contract: bytes) -> dict[str, Any]:
        async def read() -> dict[str, Any]:
            return await self._read(network, contract)

        collection: dict[str, Any] = await self.cache.once(
            network.id, "collection", contract.hex(), make=read, ttl_s=KEPT_S
        )
        return collection

    async def _read(self, network: Network, contract: bytes) -> dict[str, Any]:
        counted, indexed = await self.contracts.at_one_block(
            network, lambda: self.holdings.collection(network.id, contract)
        )
        block = min(indexed, await self.multicall.tip(network))
        calls = [(contract, data) for data in (*_DESCRIBED, *nfts.INTERFACES, *_OWNERS)]
        name, symbol, decimals, supply, uri, *rest = await self.multicall.read(network, calls, block=block)
        standard = _standard(rest[:4], counted) or _by_behaviour(rest[4:], decimals)
        if standard is None:
            raise NotFound(f"there is no NFT collection at {address.checksum(contract)} on {network.id}")
        token = token_of(contract, name, symbol, None)
        return {
            "contract": token.contract,
            "name": token.name,
            "symbol": token.symbol,
            "standard": standard,
            "total_supply": _total_supply(abi.uint(supply), counted),
            "num_owners": counted.owners,
            **await self._floor(network, token.contract),
            **await self._described(abi.text(uri)),
            "as_of_block": block,
        }

    async def _floor(self, network: Network, contract: str) -> dict[str, Any]:
        floor = await self.floors.find(network, contract)
        if floor is None:
            return {"floor_price_eth": None, "floor_price_usd": None}
        coin = await self.prices.coin(network)
        usd = None if coin is None else units.dollars(units.EXACT.multiply(floor, coin))
        return {"floor_price_eth": format(floor, "f"), "floor_price_usd": usd}

    async def _described(self, uri: str | None) -> dict[str, Any]:
        """The collection's contract-level metadata (ERC-7572)."""
        document = (await self.images.document(uri) if uri else None) or {}
        return {
            "banner_url": _image(document.get("banner_image") or document.get("banner_image_url")),
            "image_url": _image(document.get("image") or document.get("image_url")),
            "description": display_text.cleaned(document.get("description"), display_text.DESCRIPTION),
        }

    # NFTs of one owner

    async def owned(
        self, network: Network, holder: bytes, page: Page, *, contracts: Sequence[bytes] = (), detailed: bool = False
    ) -> dict[str, Any]:
        """A page of an owner's tokens in the index, of these contracts or of all, ordered by contract and id. `detailed`: with
        all that is known of each."""

        async def look() -> tuple[list[NftHolding], int]:
            rows = await self.holdings.nfts_of(
                network.id, holder, limit=page.limit, offset=page.offset, contracts=contracts
            )
            return rows, await self.holdings.count_nfts(network.id, holder, contracts)

        async def read() -> dict[str, Any]:
            (rows, total), block = await self.contracts.at_one_block(network, look)
            items = await self._items(network, rows, block, detailed=detailed)
            return {"nfts": items, "total": total, "as_of_block": block}

        name = f"{holder.hex()}/{page.number}/{page.limit}@{(await self.contracts.newest_block(network)).name}"
        if detailed:
            name += f"/{hashlib.sha256(b''.join(sorted(contracts))).hexdigest()}"
        keep_s = about_a_block(network)
        owned: dict[str, Any] = await self.cache.once(network.id, "owned", name, make=read, ttl_s=keep_s)
        return owned

    async def _items(
        self, network: Network, rows: Sequence[NftHolding], block: int, *, detailed: bool
    ) -> list[dict[str, Any]]:
        contracts = [*dict.fromkeys(row.contract for row in rows)]
        at = min(block, await self.multicall.tip(network))
        collections = await self.contracts.known(network, contracts, at)
        images = await self.images.known(network, [(row.contract, row.token_id) for row in rows])
        items = []
        for row, known in zip(rows, images, strict=True):
            seen = known or {}
            item = {
                "contract": address.checksum(row.contract),
                "token_id": str(row.token_id),
                "name": seen.get("name"),
                "collection_name": collections[row.contract].name,
                "image_url": seen.get("image_url"),
                "standard": STANDARDS[row.standard],
                "balance": str(row.amount),
            }
            if detailed:
                item |= {name: seen.get(name) for name in ("description", "image_gateway_url", "traits")}
                item |= {
                    "symbol": collections[row.contract].symbol,
                    "fetch_status": seen.get("fetch_status", "timeout"),
                }
            items.append(item)
        return items


def _standard(replies: Sequence[bytes | None], counted: Collection) -> str | None:
    """By ERC-165, else by its events."""
    standard = nfts.by_erc165(replies) or counted.standard
    return None if standard is None else STANDARDS[standard]


def _by_behaviour(owners: Sequence[bytes | None], decimals: bytes | None) -> str | None:
    """A contract with an owner of a token and without decimals is a collection from before ERC-165."""
    has_owner = any(owner not in (None, address.ZERO) for owner in map(abi.address, owners))
    return STANDARDS[721] if has_owner and abi.uint(decimals) is None else None


def _total_supply(reported: int | None, counted: Collection) -> int | None:
    """The supply that the contract reports, else the one counted by the index; None if JSON cannot carry the number."""
    supply = counted.supply if reported is None else reported
    return supply if supply <= LARGEST_INTEGER else None


def _image(uri: str | None) -> str | None:
    return uris.shown(uri) if uri else None
