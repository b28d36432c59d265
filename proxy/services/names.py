"""ENS names where an address is expected, on networks that have a registry of them.

The name's resolver is asked on the chain. Names that are answered off the chain (EIP-3668), or by a parent for all that is
below it (ENSIP-10), stand for nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from proxy.chains.evm import abi, address, ens
from proxy.chains.registry import Network
from proxy.store.cache import DataCache

# An owner may point a name elsewhere at any time: it is kept for about as long as a request's own burst.
KEPT_S = 15.0
_KIND = "ens"


class NameContracts(Protocol):
    async def read(self, network: Network, calls: Sequence[tuple[bytes, bytes]]) -> list[bytes | None]:
        """What each call (contract, calldata) returns; None where the contract refuses it."""
        ...


class EnsNames:
    def __init__(self, contracts: NameContracts, kept: DataCache) -> None:
        self._contracts = contracts
        self._kept = kept

    def __repr__(self) -> str:
        return f"<EnsNames by {self._contracts!r}>"

    def are_on(self, network: Network) -> bool:
        return network.facts.ens is not None

    async def resolve(self, network: Network, text: str) -> bytes | None:
        """The address that a name stands for; None where it stands for none. BadName where the text is no name."""
        name = ens.normalised(text)

        async def look_up() -> str | None:
            found = await self._look_up(network, ens.namehash(name))
            return None if found is None else found.hex()

        kept: str | None = await self._kept.once(network.id, _KIND, name, make=look_up, ttl_s=KEPT_S)
        return None if kept is None else bytes.fromhex(kept)

    async def _look_up(self, network: Network, node: bytes) -> bytes | None:
        assert network.facts.ens is not None  # asked before
        registry = bytes.fromhex(network.facts.ens[2:])
        resolver = await self._address(network, registry, ens.ask_registry(node))
        return None if resolver is None else await self._address(network, resolver, ens.ask_resolver(node))

    async def _address(self, network: Network, contract: bytes, question: bytes) -> bytes | None:
        found = abi.address((await self._contracts.read(network, [(contract, question)]))[0])
        return None if found == address.ZERO else found
