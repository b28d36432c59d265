"""/tokens: token balances, token metadata, and the holders of a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import orjson

from proxy.chains.families import family_of
from proxy.chains.family import TokenKind
from proxy.chains.registry import Network
from proxy.core.paging import Page
from proxy.core.portfolio import Balances
from proxy.errors import NotFound
from proxy.web.rest.endpoint import RestHandler, RestRequest
from proxy.web.rest.path_address import PathAddresses


class TokenReader(Protocol):
    """Reads tokens of one kind (`TokenKind`)."""

    async def balances(self, network: Network, holder: bytes) -> Balances: ...
    async def metadata(self, network: Network, contract: bytes) -> dict[str, Any]: ...


class HolderReader(Protocol):
    async def listed(self, network: Network, contract: bytes, page: Page) -> dict[str, Any]: ...


class TokenHandlers:
    def __init__(
        self, readers: Mapping[TokenKind, TokenReader], holders: HolderReader, addresses: PathAddresses
    ) -> None:
        self._readers = readers
        self._holders = holders
        self._addresses = addresses

    def handlers(self) -> dict[str, RestHandler]:
        return {
            "list_token_balances": self._balances,
            "read_token_metadata": self._metadata,
            "list_token_holders": self._list_holders,
        }

    async def _balances(self, request: RestRequest) -> Any:
        network = request.network()
        request.require_all_contracts()
        reader = self._reader(network)
        holder = await self._addresses.of(request, network)
        balances = await reader.balances(network, holder)
        page, tokens = request.page, balances["tokens"]
        return {
            "address": family_of(network).addresses.show(holder),
            "chain": request.path["chain"],
            "tokens": [orjson.Fragment(bytes(each)) for each in tokens[page.offset : page.offset + page.limit]],
            "page": page.number,
            "total": len(tokens),
            "as_of_block": balances["as_of_block"],
            # Only included if true, which is rare.
            **({"truncated": True} if balances.get("truncated") else {}),
        }

    async def _metadata(self, request: RestRequest) -> Any:
        network = request.network()
        reader = self._reader(network)
        metadata = await reader.metadata(network, await self._addresses.contract(request, network))
        return {"chain": request.path["chain"], **metadata}

    async def _list_holders(self, request: RestRequest) -> Any:
        network = request.network()
        if "follower" not in family_of(network).features:
            raise NotFound(f"holders are not supported on {network.id}")
        contract = await self._addresses.contract(request, network)
        holders = await self._holders.listed(network, contract, request.page)
        return {"chain": request.path["chain"], "page": request.page.number, **holders}

    def _reader(self, network: Network) -> TokenReader:
        kind = family_of(network).tokens
        if kind is None:
            raise NotFound(f"tokens are not supported on {network.id}")
        return self._readers[kind]
