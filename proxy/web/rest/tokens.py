"""Token balances and token metadata over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import orjson

from proxy.chains import addresses
from proxy.chains.registry import Network
from proxy.core.portfolio import Balances
from proxy.web.rest.endpoint import Answers, Asked
from proxy.web.rest.path_address import Holders


class Tokens(Protocol):
    """What each family's tokens can tell."""

    async def balances(self, network: Network, holder: bytes) -> Balances: ...
    async def metadata(self, network: Network, contract: bytes) -> dict[str, Any]: ...


class TokenAnswers:
    def __init__(self, families: Mapping[str, Tokens], holders: Holders) -> None:
        self._families = families
        self._holders = holders

    def answers(self) -> dict[str, Answers]:
        return {"list_token_balances": self._balances, "read_token_metadata": self._metadata}

    async def _balances(self, asked: Asked) -> Any:
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

    async def _metadata(self, asked: Asked) -> Any:
        network = asked.network()
        found = await self._families[network.family].metadata(network, await self._holders.contract(asked, network))
        return {"chain": asked.path["chain"], **found}
