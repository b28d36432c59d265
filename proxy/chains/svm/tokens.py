"""Accounts of the two token programs and of the metadata program, as bytes.

Metadata is untrusted. Nothing here raises for data that cannot be parsed: the result is None.

Token account: mint (32), owner (32), amount (8, little end first). Mint: authority (4 + 32), supply (8), decimals (1),
whether it is initialised (1), freeze authority (4 + 32). Token-2022 pads both to 165 bytes and puts a byte for the kind
of account and extensions behind them: kind (2), length (2), value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from proxy.chains.svm import address

TOKEN, TOKEN_2022 = (
    "TokenkegQfeZyiNwAJbNbGKPFXCWuBvf9Ss623VQ5DA",
    "TokenzQdBNbLqP5VEhdkAS6EPFLC1PHnBqCXEpPxuEb",
)
PROGRAMS = (TOKEN, TOKEN_2022)
METADATA_PROGRAM = "metaqbxxUerdq28cj1RbAWkYQm3ybzjb6a8bt518x1s"
# The part of a token account that is read.
ACCOUNT_BYTES = 72
_MINT_BYTES = 82
_SUPPLY, _DECIMALS, _INITIALISED = slice(36, 44), 44, 45
# Token-2022: offset of the extensions, of the kind of account before them, the kind of a mint, and the extension with a name.
_EXTENSIONS, _KIND_AT, _MINT_KIND = 166, 165, 1
_TOKEN_METADATA = 19
# Both kinds of metadata have two keys before the first text: the update authority and the mint.
_KEYS = 64
# The metadata program's accounts begin with their kind.
_METADATA_V1 = 4
# Longer names are ignored: the program allows 32 bytes, Token-2022 as many as fit into an account.
_LONGEST = 1024


@dataclass(frozen=True, slots=True)
class HeldToken:
    mint: bytes
    amount: int


@dataclass(frozen=True, slots=True)
class Mint:
    supply: int
    decimals: int

    @property
    def is_nft(self) -> bool:
        """A token without decimals and with a supply of one."""
        return self.decimals == 0 and self.supply == 1


@dataclass(frozen=True, slots=True)
class MintName:
    name: str | None = None
    symbol: str | None = None


def held(data: bytes) -> HeldToken | None:
    """The balance of a token account."""
    if len(data) < ACCOUNT_BYTES:
        return None
    return HeldToken(data[:32], int.from_bytes(data[64:72], "little"))


def mint(data: bytes) -> Mint | None:
    """The data of a mint; None if the account is not one."""
    is_extended = len(data) > _KIND_AT and data[_KIND_AT] == _MINT_KIND
    if len(data) != _MINT_BYTES and not is_extended:
        return None
    if data[_INITIALISED] != 1:
        return None
    return Mint(int.from_bytes(data[_SUPPLY], "little"), data[_DECIMALS])


def own_naming(data: bytes) -> MintName | None:
    """The name that a mint of Token-2022 carries itself."""
    at = _EXTENSIONS
    while at + 4 <= len(data):
        kind, size = int.from_bytes(data[at : at + 2], "little"), int.from_bytes(data[at + 2 : at + 4], "little")
        if kind == _TOKEN_METADATA:
            return _naming(data[at + 4 : at + 4 + size], _KEYS)
        if kind == 0:
            break
        at += 4 + size
    return None


@lru_cache(16_384)  # 0.15 ms each
def metadata_address(mint: bytes) -> bytes:
    """The account in which the metadata program stores a mint's name."""
    program = address.parse(METADATA_PROGRAM)
    assert program is not None
    return address.derived((b"metadata", program, mint), program)


def naming(data: bytes, mint: bytes) -> MintName | None:
    """The name in an account of the metadata program, if it is this mint's."""
    if not data or data[0] != _METADATA_V1 or data[33:65] != mint:
        return None
    return _naming(data, 1 + _KEYS)


def _naming(data: bytes, at: int) -> MintName | None:
    name, at = _text(data, at)
    symbol, _ = _text(data, at)
    return None if name is None or symbol is None else MintName(name, symbol)


def _text(data: bytes, at: int) -> tuple[str | None, int]:
    """A text with its length before it; it may be filled up with zeros."""
    start = at + 4
    size = int.from_bytes(data[at:start], "little")
    if start > len(data) or size > _LONGEST or start + size > len(data):
        return None, len(data)
    return data[start : start + size].rstrip(b"\0").decode("utf-8", "replace"), start + size
