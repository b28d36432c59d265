"""NFTs over HTTP."""

from __future__ import annotations

from typing import Any, Protocol

from proxy.chains.families import family_of
from proxy.chains.registry import Network
from proxy.core.paging import Page
from proxy.errors import InvalidRequest, NotFound
from proxy.web.rest.endpoint import RestHandler, RestRequest
from proxy.web.rest.path_address import PathAddresses

_LARGEST_ID = 2**256 - 1


class NftMetadataReader(Protocol):
    async def read(
        self, network: Network, contract: bytes, token_id: int, *, refresh: bool = False
    ) -> dict[str, Any]: ...


class CollectionReader(Protocol):
    async def collection(self, network: Network, contract: bytes) -> dict[str, Any]: ...
    async def owned(self, network: Network, holder: bytes, page: Page) -> dict[str, Any]: ...


class NftHandlers:
    def __init__(self, metadata: NftMetadataReader, collections: CollectionReader, holders: PathAddresses) -> None:
        self._metadata = metadata
        self._collections = collections
        self._holders = holders

    def answers(self) -> dict[str, RestHandler]:
        return {"read_nft": self._nft, "read_nft_collection": self._collection, "list_owned_nfts": self._owned}

    async def _nft(self, asked: RestRequest) -> Any:
        network = _with_nfts(asked)
        token_id, contract = _token_id(asked), await self._holders.contract(asked, network)
        return await self._metadata.read(network, contract, token_id, refresh=asked.query["refresh"])

    async def _collection(self, asked: RestRequest) -> Any:
        network = _with_nfts(asked)
        found = await self._collections.collection(network, await self._holders.contract(asked, network))
        return {"chain": asked.path["chain"], **found}

    async def _owned(self, asked: RestRequest) -> Any:
        network = _with_nfts(asked)
        holder = await self._holders.of(asked, network)
        found = await self._collections.owned(network, holder, asked.page)
        shown = family_of(network).addresses.show(holder)
        return {"address": shown, "chain": asked.path["chain"], "page": asked.page.number, **found}


def _with_nfts(asked: RestRequest) -> Network:
    network = asked.network()
    if "nfts" not in family_of(network).features:
        raise NotFound(f"NFTs are not read on {network.id}")
    return network


def _token_id(asked: RestRequest) -> int:
    text = asked.path["token_id"]
    found = int(text, 16 if text.startswith("0x") else 10)
    if found > _LARGEST_ID:
        raise InvalidRequest("parameter 'token_id': is more than 256 bits")
    return found
