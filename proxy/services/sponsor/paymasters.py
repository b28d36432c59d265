"""Paymaster contracts and the keys that sign for them.

A key is read at start-up from the source that the settings name, and stays inside its `Signer`: it never appears in the
settings, in logs, in messages or in a repr.
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
    """Signs for one paymaster. A signature takes 102 µs."""

    __slots__ = ("_key", "address")

    def __init__(self, secret: bytes) -> None:
        """Raises ValueError if `secret` is not a valid private key."""
        self._key = coincurve.PrivateKey(secret)
        point = self._key.public_key.format(compressed=False)[1:]
        self.address = bytes(sha3.keccak_256(point).digest()[12:])

    def __repr__(self) -> str:
        return f"<Signer {address.checksum(self.address)}>"

    def __reduce__(self) -> str:
        raise TypeError("a signer cannot be pickled: its key must not leave the process")

    def sign(self, message: bytes) -> bytes:
        """65 bytes, r, s and v, in the form that `ecrecover` takes."""
        signature = self._key.sign_recoverable(message, hasher=None)
        return signature[:64] + bytes((27 + signature[64],))


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
        raise NotFound(f"sponsorship is not available on {network.id}: no paymaster is configured there")

    def versions(self, network: Network) -> list[str]:
        return sorted(version for name, version in self._found if name == network.id)
