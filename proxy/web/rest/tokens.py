"""Token balances and token metadata over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import orjson

from proxy.chains.families import family_of
from proxy.chains.family import TokenKind
from proxy.chains.registry import Network
from proxy.core.portfolio import Balances
from proxy.errors import NotFound
from proxy.web.rest.endpoint import RestHandler, RestRequest
from proxy.web.rest.path_address import PathAddresses


class TokenReader(Protocol):
    """Reads tokens of one kind (`TokenKind`)."""

    async def balances(self, network: Network, holder: bytes) -> Balances: ...
    async def metadata(self, network: Network, contract: bytes) -> dict[str, Any]: ...


class TokenHandlers:
    def __init__(self, readers: Mapping[TokenKind, TokenReader], holders: PathAddresses) -> None:
        self._readers = readers
        self._holders = holders

    def answers(self) -> dict[str, RestHandler]:
        return {"list_token_balances": self._balances, "read_token_metadata": self._metadata}

    async def _balances(self, asked: RestRequest) -> Any:
        network = asked.network()
        reader = self._reader(network)
        holder = await self._holders.of(asked, network)
        found = await reader.balances(network, holder)
        page, tokens = asked.page, found["tokens"]
        return {
            "address": family_of(network).addresses.show(holder),
            "chain": asked.path["chain"],
            "tokens": [orjson.Fragment(bytes(each)) for each in tokens[page.offset : page.offset + page.limit]],
            "page": page.number,
            "total": len(tokens),
            "as_of_block": found["as_of_block"],
            # Only where it is so: it hardly ever is.
            **({"truncated": True} if found.get("truncated") else {}),
        }

    async def _metadata(self, asked: RestRequest) -> Any:
        network = asked.network()
        reader = self._reader(network)
        found = await reader.metadata(network, await self._holders.contract(asked, network))
        return {"chain": asked.path["chain"], **found}

    def _reader(self, network: Network) -> TokenReader:
        kind = family_of(network).tokens
        if kind is None:
            raise NotFound(f"tokens are not supported on {network.id}")
        return self._readers[kind]
