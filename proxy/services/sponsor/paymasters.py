"""The contracts that pay, and the keys that they listen to.

A key comes from where the settings say, when the process starts, and stays inside its `Signer`: it is in no setting, no log, no
message and no representation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import coincurve
import sha3

from proxy.chains.evm import address
from proxy.chains.registry import Network
from proxy.errors import NotFound


class Signer:
    """Signs for one paymaster. 102 µs each."""

    __slots__ = ("_key", "address")

    def __init__(self, secret: bytes) -> None:
        """ValueError for what is no key."""
        self._key = coincurve.PrivateKey(secret)
        point = self._key.public_key.format(compressed=False)[1:]
        self.address = bytes(sha3.keccak_256(point).digest()[12:])

    def __repr__(self) -> str:
        return f"<Signer {address.checksum(self.address)}>"

    def __reduce__(self) -> str:
        raise TypeError("a signer does not leave its process")

    def sign(self, message: bytes) -> bytes:
        """65 bytes: r, s and v, as contracts recover them."""
        signature = self._key.sign_recoverable(message, hasher=None)
        return signature[:64] + bytes((27 + signature[64],))


@dataclass(frozen=True, slots=True)
class Paymaster:
    """One contract on one network.

    `gas`: its limits for verification and for afterwards, where an operation brings none. `any_fee_wei`: up to so much for a
    unit of gas it pays whatever the prices are.
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
    def __init__(self, found: Iterable[Paymaster]) -> None:
        self._found: Mapping[tuple[str, str], Paymaster] = {(each.network, each.version): each for each in found}

    def __repr__(self) -> str:
        return f"<Paymasters {', '.join(f'{network} {version}' for network, version in self._found) or 'none'}>"

    def find(self, network: Network, version: str) -> Paymaster:
        found = self._found.get((network.id, version))
        if found is not None:
            return found
        others = self.versions(network)
        if others:
            raise NotFound(
                f"no paymaster is configured on {network.id} for entry point {version}, only for {', '.join(others)}"
            )
        raise NotFound(f"nothing is sponsored on {network.id}: no paymaster is configured there")

    def versions(self, network: Network) -> list[str]:
        return sorted(version for name, version in self._found if name == network.id)
