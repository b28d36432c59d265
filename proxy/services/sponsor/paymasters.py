"""Paymaster contracts and the keys that sign for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from proxy.chains.evm.signer import Signer
from proxy.chains.registry import Network
from proxy.errors import NotFound


@dataclass(frozen=True, slots=True)
class Paymaster:
    """One paymaster contract on one network.

    `gas`: the verification and post-op gas limits for operations that give none. `any_fee_wei`: fees up to this amount per
    unit of gas are paid whatever the current prices are.
    """

    network: str
    version: str
    address: bytes
    entry_point: bytes
    chain_id: int
    signer: Signer
    gas: tuple[int, int]
    any_fee_wei: int = 0


class Paymasters:
    def __init__(self, paymasters: Iterable[Paymaster]) -> None:
        self._by_version: Mapping[tuple[str, str], Paymaster] = {
            (each.network, each.version): each for each in paymasters
        }

    def __repr__(self) -> str:
        return f"<Paymasters {', '.join(f'{network} {version}' for network, version in self._by_version) or 'none'}>"

    def find(self, network: Network, version: str) -> Paymaster:
        paymaster = self._by_version.get((network.id, version))
        if paymaster is not None:
            return paymaster
        others = self.versions(network)
        if others:
            raise NotFound(
                f"no paymaster is configured on {network.id} for entry point {version}, only for {', '.join(others)}"
            )
        raise NotFound(f"sponsorship is not available on {network.id}: no paymaster is configured there")

    def versions(self, network: Network) -> list[str]:
        return sorted(version for name, version in self._by_version if name == network.id)
