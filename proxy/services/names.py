"""Resolves ENS names to addresses, on networks that have an ENS registry.

Only resolvers on the chain are called. Off-chain names (EIP-3668) and wildcard names (ENSIP-10) do not resolve.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from proxy.chains.evm import abi, address, ens
from proxy.chains.registry import Network
from proxy.request_threads import request_threads
from proxy.store.valkey.cache import DataCache

# An owner may point a name elsewhere at any time, so a result is cached only for a burst of requests.
KEPT_S = 15.0
_KIND = "ens"


class NameContracts(Protocol):
    async def read(self, network: Network, calls: Sequence[tuple[bytes, bytes]]) -> list[bytes | None]:
        """The result of each call (contract, calldata); None if the contract reverts."""
        ...


class EnsNames:
    def __init__(self, contracts: NameContracts, cache: DataCache) -> None:
        self._contracts = contracts
        self._cache = cache

    def __repr__(self) -> str:
        return f"<EnsNames by {self._contracts!r}>"

    def are_on(self, network: Network) -> bool:
        return network.facts.ens is not None

    async def resolve(self, network: Network, text: str) -> bytes | None:
        """The address of a name, or None if it has none. Raises BadName if the text is not a valid name."""
        # In a thread, because the first name that is not plain loads large tables.
        name = ens.normalised(text) if ens.is_plain(text) else await request_threads.run(lambda: ens.normalised(text))

        async def look_up() -> str | None:
            resolved = await self._look_up(network, ens.namehash(name))
            return None if resolved is None else resolved.hex()

        cached: str | None = await self._cache.once(network.id, _KIND, name, make=look_up, ttl_s=KEPT_S)
        return None if cached is None else bytes.fromhex(cached)

    async def _look_up(self, network: Network, node: bytes) -> bytes | None:
        assert network.facts.ens is not None  # callers check `are_on` first
        registry = bytes.fromhex(network.facts.ens[2:])
        resolver = await self._address(network, registry, ens.ask_registry(node))
        return None if resolver is None else await self._address(network, resolver, ens.ask_resolver(node))

    async def _address(self, network: Network, contract: bytes, calldata: bytes) -> bytes | None:
        resolved = abi.address((await self._contracts.read(network, [(contract, calldata)]))[0])
        return None if resolved == address.ZERO else resolved
