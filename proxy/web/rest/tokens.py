"""Token balances and token metadata over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import orjson

from proxy.chains import addresses
from proxy.chains.registry import Network
from proxy.core.portfolio import Balances
from proxy.web.rest.endpoint import RestHandler, RestRequest
from proxy.web.rest.path_address import PathAddresses


class TokenReader(Protocol):
    """What each family's tokens can tell."""

    async def balances(self, network: Network, holder: bytes) -> Balances: ...
    async def metadata(self, network: Network, contract: bytes) -> dict[str, Any]: ...


class TokenHandlers:
    def __init__(self, families: Mapping[str, TokenReader], holders: PathAddresses) -> None:
        self._families = families
        self._holders = holders

    def answers(self) -> dict[str, RestHandler]:
        return {"list_token_balances": self._balances, "read_token_metadata": self._metadata}

    async def _balances(self, asked: RestRequest) -> Any:
        network = asked.network()
        holder = await self._holders.of(asked, network)
        found = await self._families[network.family].balances(network, holder)
        page, tokens = asked.page, found["tokens"]
        return {
            "address": addresses.show(network.family, holder),
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
        found = await self._families[network.family].metadata(network, await self._holders.contract(asked, network))
        return {"chain": asked.path["chain"], **found}
