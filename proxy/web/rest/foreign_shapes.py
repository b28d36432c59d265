"""Reads of other services, in their shapes, for the SDKs of their customers: NFTs as Alchemy has them, fees as Infura has them.

They are served at the URLs of those services if the alias is switched on (config/aliases), from the same index and estimates as
the operations of the API. Values that are not known here are null, such as a contract's deployer or whether it is spam.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from proxy.chains.evm import fees
from proxy.chains.families import family_of
from proxy.chains.registry import Network
from proxy.core.paging import Page
from proxy.errors import InvalidRequest, NotFound
from proxy.services.gas import GasPrices
from proxy.web.rest.endpoint import RestHandler, RestRequest
from proxy.web.rest.nfts import NftMetadataReader, token_id_of, with_nfts
from proxy.web.rest.path_address import not_an_address

# The most pages that a pageKey can name, as for `page`.
LAST_PAGE = 1_000_000
# Infura's names of the tiers.
_TIERS: Mapping[str, fees.Tier] = {"low": "slow", "medium": "standard", "high": "fast"}


class OwnedNftReader(Protocol):
    async def collection(self, network: Network, contract: bytes) -> dict[str, Any]: ...
    async def owned(
        self, network: Network, holder: bytes, page: Page, *, contracts: Sequence[bytes] = (), detailed: bool = False
    ) -> dict[str, Any]: ...


class AlchemyNfts:
    """getNFTsForOwner, getNFTMetadata and getContractMetadata of version 3."""

    def __init__(self, metadata: NftMetadataReader, collections: OwnedNftReader, *, is_on: bool) -> None:
        self._metadata = metadata
        self._collections = collections
        self._is_on = is_on

    def handlers(self) -> dict[str, RestHandler]:
        return {
            "list_alchemy_nfts": self._owned,
            "read_alchemy_nft": self._nft,
            "read_alchemy_contract": self._contract,
        }

    async def _owned(self, request: RestRequest) -> Any:
        network = self._network(request)
        holder = _address(request, network, "owner")
        contracts = [_parsed(network, text, "contractAddresses") for text in request.query["contractAddresses"] or ()]
        for each in contracts:
            request.require_contract(network, each)
        if not contracts:
            request.require_all_contracts()
        page = _page(request.query["pageKey"], request.query["pageSize"])
        owned = await self._collections.owned(network, holder, page, contracts=contracts, detailed=True)
        shown = _listed if request.query["withMetadata"] else _bare
        has_more = page.offset + len(owned["nfts"]) < owned["total"] and owned["nfts"] and page.number < LAST_PAGE
        return {
            "ownedNfts": [shown(each) for each in owned["nfts"]],
            "totalCount": owned["total"],
            "pageKey": f"{page.number + 1}-{page.limit}" if has_more else None,
            "validAt": {"blockNumber": owned["as_of_block"], "blockHash": None, "blockTimestamp": None},
        }

    async def _nft(self, request: RestRequest) -> Any:
        network = self._network(request)
        contract, token_id = _contract(request, network), token_id_of(request.query["tokenId"], "tokenId")
        nft = await self._metadata.read(network, contract, token_id, refresh=request.query["refreshCache"])
        try:
            collection = await self._collections.collection(network, contract)
        except NotFound:
            collection = {"contract": nft["contract"], "standard": nft["standard"]}
        return {**_nft(nft, _contract_of(collection)), "owners": [nft["owner"]] if nft["owner"] else None}

    async def _contract(self, request: RestRequest) -> Any:
        network = self._network(request)
        return _contract_of(await self._collections.collection(network, _contract(request, network)))

    def _network(self, request: RestRequest) -> Network:
        _require(self._is_on, "alchemy")
        return with_nfts(request)


class InfuraGas:
    """suggestedGasFees of Infura's gas API."""

    def __init__(self, prices: GasPrices, *, is_on: bool) -> None:
        self._prices = prices
        self._is_on = is_on

    def handlers(self) -> dict[str, RestHandler]:
        return {"read_infura_gas_fees": self._fees}

    async def _fees(self, request: RestRequest) -> Any:
        _require(self._is_on, "infura")
        estimated = (await self._prices.read(request.network())).fees
        tiers = {name: estimated.estimates[tier] for name, tier in _TIERS.items()}
        tips = [fees.gwei(each.max_priority_fee_wei) for each in tiers.values()]
        return {
            **{
                name: {
                    "suggestedMaxPriorityFeePerGas": fees.gwei(each.max_priority_fee_wei),
                    "suggestedMaxFeePerGas": fees.gwei(each.max_fee_wei),
                    "minWaitTimeEstimate": 0,
                    "maxWaitTimeEstimate": 1000 * each.seconds,
                }
                for name, each in tiers.items()
            },
            "estimatedBaseFee": fees.gwei(estimated.base_fee_wei),
            "networkCongestion": None,
            "latestPriorityFeeRange": [tips[0], tips[-1]],
            "historicalPriorityFeeRange": None,
            "historicalBaseFeeRange": None,
            "priorityFeeTrend": None,
            "baseFeeTrend": None,
            "version": "0.0.1",
        }


def _require(is_on: bool, alias: str) -> None:
    if not is_on:
        raise NotFound(f"the reads of {alias} are off here: the operator switches them on with aliases.{alias} = true")


# Parameters


def _parsed(network: Network, text: str, parameter: str) -> bytes:
    address = family_of(network).addresses.parse(text)
    if address is None:
        raise not_an_address(network, parameter)
    return address


def _address(request: RestRequest, network: Network, parameter: str) -> bytes:
    return _parsed(network, request.query[parameter], parameter)


def _contract(request: RestRequest, network: Network) -> bytes:
    contract = _address(request, network, "contractAddress")
    request.require_contract(network, contract)
    return contract


def _page(key: str | None, size: int) -> Page:
    """The key of a page is its number and size."""
    if not key:
        return Page(1, size)
    number, _, made_for = key.partition("-")
    if int(made_for) != size:
        raise InvalidRequest(f"parameter 'pageKey': is of pages of {made_for}, use the same pageSize", param="pageKey")
    if not 1 <= int(number) <= LAST_PAGE:
        raise InvalidRequest("parameter 'pageKey': must be the pageKey of an earlier reply", param="pageKey")
    return Page(int(number), size)


# Shapes


def _bare(owned: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "contractAddress": owned["contract"],
        "tokenId": owned["token_id"],
        "balance": owned["balance"],
        "isSpam": None,
        "spamClassifications": [],
    }


def _listed(owned: Mapping[str, Any]) -> dict[str, Any]:
    contract = {**owned, "name": owned["collection_name"]}
    return {**_nft(owned, _contract_of(contract)), "balance": owned["balance"], "acquiredAt": _ACQUIRED}


_ACQUIRED = {"blockTimestamp": None, "blockNumber": None}
_MINT = {"mintAddress": None, "blockNumber": None, "timestamp": None, "transactionHash": None}


def _nft(nft: Mapping[str, Any], contract: Mapping[str, Any]) -> dict[str, Any]:
    image, traits, status = nft["image_url"], nft["traits"], nft["fetch_status"]
    return {
        "contract": contract,
        "tokenId": nft["token_id"],
        "tokenType": nft["standard"],
        "name": nft["name"],
        "description": nft["description"],
        "tokenUri": nft.get("token_uri"),
        "image": {
            "cachedUrl": nft["image_gateway_url"],
            "thumbnailUrl": None,
            "pngUrl": None,
            "contentType": None,
            "size": None,
            "originalUrl": image,
        },
        "raw": {
            "tokenUri": nft.get("token_uri"),
            "metadata": {
                "name": nft["name"],
                "description": nft["description"],
                "image": image,
                "attributes": traits,
            },
            "error": None if status == "ok" else f"the metadata could not be read: {status}",
        },
        "collection": None,
        "mint": _MINT,
        "owners": None,
        "timeLastUpdated": None,
    }


def _contract_of(collection: Mapping[str, Any]) -> dict[str, Any]:
    supply = collection.get("total_supply")
    return {
        "address": collection["contract"],
        "name": collection.get("name"),
        "symbol": collection.get("symbol"),
        "totalSupply": None if supply is None else str(supply),
        "tokenType": collection["standard"],
        "contractDeployer": None,
        "deployedBlockNumber": None,
        "openSeaMetadata": {
            "floorPrice": None,
            "collectionName": collection.get("name"),
            "collectionSlug": None,
            "safelistRequestStatus": None,
            "imageUrl": collection.get("image_url") if "banner_url" in collection else None,
            "bannerImageUrl": collection.get("banner_url"),
            "description": collection.get("description") if "banner_url" in collection else None,
            "externalUrl": None,
            "twitterUsername": None,
            "discordUrl": None,
            "lastIngestedAt": None,
        },
        "isSpam": None,
        "spamClassifications": [],
    }
