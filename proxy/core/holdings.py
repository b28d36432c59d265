"""The effect of transfers on holdings: sums by holder and contract, and by token id for NFTs.

A `Transfer` is one movement, whichever event it came from. `HoldingChanges` are the sums of many, and all that the
index writes: at most two rows for a transfer, and one for a holder who trades a hundred times in a block. They pack
into bytes and can be reversed, which is how a dropped block is undone.

Keys are bytes in the order of the tables' keys (holder, contract, token id), so sorting them gives the order in which
rows are locked and two writers never deadlock. The zero address holds nothing: a transfer from it mints, a transfer to
it burns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

ZERO = bytes(20)
FUNGIBLE = 20
_ADDRESS = 20
_TOKEN_KEY, _NFT_KEY = 2 * _ADDRESS, 2 * _ADDRESS + 32


class Transfer(msgspec.Struct, gc=False):
    """`standard`: 20, 721 or 1155, or of coins its category in the history. `item`: the place in the log, if one log moves
    several tokens. `log_index`: for coins the index of the transaction."""

    standard: int
    contract: bytes
    sender: bytes
    recipient: bytes
    amount: int
    token_id: int
    transaction: str
    log_index: int
    item: int = 0
    block: int = 0


class HoldingChanges:
    """Sums. `tokens` by holder and contract; `nfts` by holder, contract and token id; `standards` by contract of an nft."""

    __slots__ = ("nfts", "standards", "tokens")

    def __init__(self) -> None:
        self.tokens: dict[bytes, int] = {}
        self.nfts: dict[bytes, int] = {}
        self.standards: dict[bytes, int] = {}

    def __repr__(self) -> str:
        return f"<HoldingChanges of {len(self.tokens)} tokens, {len(self.nfts)} nfts>"

    def __len__(self) -> int:
        return len(self.tokens) + len(self.nfts)

    def add(self, transfers: Iterable[Transfer]) -> None:
        tokens, nfts = self.tokens, self.nfts
        for transfer in transfers:
            contract, amount = transfer.contract, transfer.amount
            if transfer.standard == FUNGIBLE:
                sums, tail = tokens, contract
            else:
                sums, tail = nfts, contract + transfer.token_id.to_bytes(32, "big")
                self.standards[contract] = transfer.standard
            if transfer.sender != ZERO:
                key = transfer.sender + tail
                sums[key] = sums.get(key, 0) - amount
            if transfer.recipient != ZERO:
                key = transfer.recipient + tail
                sums[key] = sums.get(key, 0) + amount

    def include(self, other: HoldingChanges) -> None:
        for sums, more in ((self.tokens, other.tokens), (self.nfts, other.nfts)):
            for key, delta in more.items():
                sums[key] = sums.get(key, 0) + delta
        self.standards.update(other.standards)

    def taken_back(self) -> HoldingChanges:
        inverse = HoldingChanges()
        inverse.tokens = {key: -delta for key, delta in self.tokens.items()}
        inverse.nfts = {key: -delta for key, delta in self.nfts.items()}
        inverse.standards = dict(self.standards)
        return inverse

    def from_byte(self, first: int) -> HoldingChanges:
        """Those of holders whose first byte is not below this one."""
        rest = HoldingChanges()
        rest.tokens = {key: delta for key, delta in self.tokens.items() if key[0] >= first}
        rest.nfts = {key: delta for key, delta in self.nfts.items() if key[0] >= first}
        rest.standards = self.standards
        return rest

    def pack(self) -> bytes:
        parts = [b"t%b%b" % (key, _packed(delta)) for key, delta in self.tokens.items()]
        standards = {contract: standard.to_bytes(2, "big") for contract, standard in self.standards.items()}
        parts += [
            b"n%b%b%b" % (key, standards[key[_ADDRESS:_TOKEN_KEY]], _packed(delta)) for key, delta in self.nfts.items()
        ]
        return b"".join(parts)

    @classmethod
    def unpack(cls, data: bytes) -> HoldingChanges:
        changes = cls()
        for kind, key, standard, delta in _records(data):
            if kind == b"t":
                changes.tokens[key] = delta
            else:
                changes.nfts[key] = delta
                changes.standards[key[_ADDRESS:_TOKEN_KEY]] = standard
        return changes


def _packed(delta: int) -> bytes:
    """A length and the number: sums may outgrow the 32 bytes of each of their parts."""
    size = delta.bit_length() // 8 + 1
    return size.to_bytes(1, "big") + delta.to_bytes(size, "big", signed=True)


def _records(data: bytes) -> Iterator[tuple[bytes, bytes, int, int]]:
    at = 0
    while at < len(data):
        kind = data[at : at + 1]
        end = at + 1 + (_TOKEN_KEY if kind == b"t" else _NFT_KEY)
        key, standard = data[at + 1 : end], 0
        if kind == b"n":
            standard = int.from_bytes(data[end : end + 2], "big")
            end += 2
        at = end + 1 + data[end]
        yield kind, key, standard, int.from_bytes(data[end + 1 : at], "big", signed=True)
