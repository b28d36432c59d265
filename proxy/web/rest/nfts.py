"""/nfts: single NFTs, collections, and the NFTs of an owner."""

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
    def __init__(self, metadata: NftMetadataReader, collections: CollectionReader, addresses: PathAddresses) -> None:
        self._metadata = metadata
        self._collections = collections
        self._addresses = addresses

    def handlers(self) -> dict[str, RestHandler]:
        return {"read_nft": self._nft, "read_nft_collection": self._collection, "list_owned_nfts": self._owned}

    async def _nft(self, request: RestRequest) -> Any:
        network = with_nfts(request)
        token_id, contract = token_id_of(request.path["token_id"]), await self._addresses.contract(request, network)
        return await self._metadata.read(network, contract, token_id, refresh=request.query["refresh"])

    async def _collection(self, request: RestRequest) -> Any:
        network = with_nfts(request)
        collection = await self._collections.collection(network, await self._addresses.contract(request, network))
        return {"chain": request.path["chain"], **collection}

    async def _owned(self, request: RestRequest) -> Any:
        network = with_nfts(request)
        request.require_all_contracts()
        holder = await self._addresses.of(request, network)
        owned = await self._collections.owned(network, holder, request.page)
        shown = family_of(network).addresses.show(holder)
        return {"address": shown, "chain": request.path["chain"], "page": request.page.number, **owned}


def with_nfts(request: RestRequest) -> Network:
    network = request.network()
    if "nfts" not in family_of(network).features:
        raise NotFound(f"NFTs are not supported on {network.id}")
    return network


def token_id_of(text: str, parameter: str = "token_id") -> int:
    """The number of a token, in decimal or hex, which the API spec has checked."""
    token_id = int(text, 16 if text.startswith("0x") else 10)
    if token_id > _LARGEST_ID:
        raise InvalidRequest(f"parameter {parameter!r}: must be at most 256 bits", param=parameter)
    return token_id
