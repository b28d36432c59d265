"""Blocks and logs -> facts: which tokens moved, from whom, to whom.

Read from events alone, by their first topic and their shape:

    Transfer(from, to, value)                    three topics: ERC-20; four, with the token's id as the last: ERC-721
    TransferSingle, TransferBatch                ERC-1155
    Deposit(to, value), Withdrawal(from, value)  wrapped coins of WETH9's kind, which make and destroy without a Transfer.
                                                 Others emit both: then the Transfer counts

Any contract can emit anything under these names. A log of another shape (other topics, short data, arrays that lie
about their length, an address with more than 20 bytes) is *odd*: counted, but not a fact. Nothing here raises on a
contract's data. ABI decoding is by hand and by slices of hex: it runs for every log of every block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Annotated

import msgspec
import sha3

from proxy.core.holdings import FUNGIBLE, ZERO, Transfer

TRANSFER = "0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef"
TRANSFER_SINGLE = "0xc3d58168c5ae7397731d063d5bbf3d657854427343f4c083240f7aacaa2d0f62"
TRANSFER_BATCH = "0x4a39dc06d4c0dbc64b70af90fd698a233a518aa5d07e595d983b8c0526c8f7fb"
DEPOSIT = "0xe1fffcc4923d04b559f4d29a8bfc6cda04eb5b0d3c460751c2402c5c5cc9109c"
WITHDRAWAL = "0x7fcf532c15f0a6db0bd6d0e038bea71d30d808c7d98cb3bf7268a95bf5081b65"
TOPICS = frozenset((TRANSFER, TRANSFER_SINGLE, TRANSFER_BATCH, DEPOSIT, WITHDRAWAL))

# An address as a word: twelve zero bytes before it.
_PAD = "0x000000000000000000000000"
_WORD = 64
_fromhex = bytes.fromhex


# Numbers and hashes that are none make a reply malformed: neither is a contract's to choose. Numbers fit Postgres's bigint,
# indexes its integer, and times, which end in the year 4147, its timestamptz.
Number = Annotated[str, msgspec.Meta(pattern=r"\A0x[0-9a-fA-F]{1,15}\Z")]
Index = Annotated[str, msgspec.Meta(pattern=r"\A0x[0-9a-fA-F]{1,7}\Z")]
Time = Annotated[str, msgspec.Meta(pattern=r"\A0x[0-9a-fA-F]{1,9}\Z")]
Hash = Annotated[str, msgspec.Meta(pattern=r"\A0x[0-9a-fA-F]{64}\Z")]
Bloom = Annotated[str, msgspec.Meta(pattern=r"\A(0x[0-9a-fA-F]{1,512})?\Z")]


class ChainLog(msgspec.Struct, rename="camel", gc=False):
    """One log as an upstream returns it: its place on the chain and its contract's data."""

    address: str
    topics: list[str]
    block_number: Number
    block_hash: Hash
    transaction_hash: Hash
    log_index: Index
    data: str = "0x"
    removed: bool = False
    # Not every upstream has it.
    block_timestamp: Time | None = None


class Receipt(msgspec.Struct, rename="camel", gc=False):
    """The logs and outcome of one transaction. `status`: 0x0 if it failed; blocks before Byzantium do not say (EIP-658)."""

    block_hash: Hash
    logs: list[ChainLog]
    transaction_hash: Hash = ""
    status: Number | None = None


class Header(msgspec.Struct, rename="camel", gc=False):
    """One block; its transactions are left undecoded."""

    number: Number
    hash: Hash
    parent_hash: Hash
    timestamp: Time
    transactions: msgspec.Raw = msgspec.Raw(b"[]")
    logs_bloom: Bloom = ""
    gas_used: Number = "0x0"


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """Facts of one block, or of a range of final ones. `hash` and `time` are the last block's, `parent` the first's.

    `header` is set for a single block only: ranges are read if only logs are needed. `has_all_logs`: not only those with
    certain topics. `failed`: the hashes of its failed transactions; None if the receipts were not read.
    """

    first: int
    last: int
    parent: bytes
    hash: bytes
    time: int
    header: Header | None
    logs: list[ChainLog]
    transfers: list[Transfer]
    odd: int
    has_all_logs: bool = False
    failed: frozenset[str] | None = None

    @property
    def blocks(self) -> int:
        return self.last - self.first + 1


read_logs = msgspec.json.Decoder(list[ChainLog]).decode
read_receipts = msgspec.json.Decoder(list[Receipt]).decode
read_receipt: Callable[[bytes], Receipt | None] = msgspec.json.Decoder(Receipt | None).decode
read_header: Callable[[bytes], Header | None] = msgspec.json.Decoder(Header | None).decode


def facts_of(
    first: Header, last: Header, logs: list[ChainLog], *, alone: bool, has_all_logs: bool = False
) -> BlockFacts:
    """Facts of one block (`alone`) or of a range. ValueError for invalid numbers, or logs of other blocks."""
    low, high = int(first.number, 16), int(last.number, 16)
    _check(logs, low, high, last)
    transfers, odd = transfers_of(logs)
    return BlockFacts(
        low,
        high,
        _fromhex(first.parent_hash[2:]),
        _fromhex(last.hash[2:]),
        int(last.timestamp, 16),
        last if alone else None,
        logs,
        transfers,
        odd,
        has_all_logs,
    )


def _check(logs: list[ChainLog], low: int, high: int, last: Header) -> None:
    """Raise ValueError if a log is of another block, or of one that was dropped: the upstream is in the middle of a
    reorganisation."""
    blocks = {(log.block_number, log.block_hash) for log in logs}
    hashes: dict[int, str] = {}
    for text, block_hash in blocks:
        number = int(text, 16)
        if not low <= number <= high or hashes.setdefault(number, block_hash) != block_hash:
            raise ValueError(f"logs of block {number} among those of {low} to {high}")
    if hashes.get(high, last.hash) != last.hash or any(log.removed for log in logs):
        raise ValueError(f"logs of a block {high} that was replaced")


def bloom_mask(text: str) -> int:
    """The three bits that a topic, or a contract's address, sets in the bloom filter of its block (yellow paper, 4.3.1)."""
    digest = sha3.keccak_256(_fromhex(text[2:])).digest()
    mask = 0
    for at in (0, 2, 4):
        mask |= 1 << (int.from_bytes(digest[at : at + 2], "big") & 2047)
    return mask


def transfers_of(logs: Iterable[ChainLog]) -> tuple[list[Transfer], int]:
    """The transfers among the logs, in their order, and how many logs were odd."""
    transfers: list[Transfer] = []
    wrapped: set[int] = set()
    odd = 0
    for log in logs:
        topics = log.topics
        topic = topics[0] if topics else ""
        if topic not in TOPICS:
            continue
        try:
            if topic == TRANSFER and len(topics) == 3 and len(log.data) >= 2 + _WORD:
                transfers.append(
                    Transfer(
                        FUNGIBLE,
                        _fromhex(log.address[2:]),
                        _address(topics[1]),
                        _address(topics[2]),
                        int(log.data[2 : 2 + _WORD], 16),
                        0,
                        log.transaction_hash,
                        int(log.log_index, 16),
                        0,
                        int(log.block_number, 16),
                    )
                )
            elif topic == TRANSFER:
                transfers.append(_nft(log))
            elif topic in (DEPOSIT, WITHDRAWAL):
                transfers.append(_wrapped(log))
                wrapped.add(len(transfers) - 1)
            else:
                transfers += _multi(log)
        except ValueError:
            odd += 1
    return (_without_told_twice(transfers, wrapped) if wrapped else transfers), odd


def _address(topic: str) -> bytes:
    if topic[:26] != _PAD or len(topic) != 66:
        raise ValueError("no address")
    return _fromhex(topic[26:])


def _nft(log: ChainLog) -> Transfer:
    if len(log.topics) != 4 or len(log.topics[3]) != 66:
        raise ValueError("a Transfer of another shape")
    _, sender, recipient, token = log.topics
    return _moved(log, 721, sender, recipient, int(token[2:], 16), 1)


def _moved(
    log: ChainLog, standard: int, sender: str, recipient: str, token_id: int, amount: int, *, item: int = 0
) -> Transfer:
    return Transfer(
        standard,
        _fromhex(log.address[2:]),
        _address(sender),
        _address(recipient),
        amount,
        token_id,
        log.transaction_hash,
        int(log.log_index, 16),
        item,
        int(log.block_number, 16),
    )


def _wrapped(log: ChainLog) -> Transfer:
    if len(log.topics) != 2:
        raise ValueError("a deposit of another shape")
    is_deposit = log.topics[0] == DEPOSIT
    no_one = _PAD + ZERO.hex()
    sender, recipient = (no_one, log.topics[1]) if is_deposit else (log.topics[1], no_one)
    return _moved(log, FUNGIBLE, sender, recipient, 0, _word(log.data, 0))


def _without_told_twice(transfers: list[Transfer], wrapped: Set[int]) -> list[Transfer]:
    """Without the deposits and withdrawals (those at the places `wrapped`) that a Transfer of their transaction reports too."""
    seen = {_name(transfer) for index, transfer in enumerate(transfers) if index not in wrapped}
    return [transfer for index, transfer in enumerate(transfers) if index not in wrapped or _name(transfer) not in seen]


def _name(transfer: Transfer) -> tuple[str, bytes, bytes, bytes, int]:
    return transfer.transaction, transfer.contract, transfer.sender, transfer.recipient, transfer.amount


def _multi(log: ChainLog) -> list[Transfer]:
    if len(log.topics) != 4:
        raise ValueError("a transfer of another shape")
    sender, recipient = log.topics[2:]
    if log.topics[0] == TRANSFER_SINGLE:
        return [_moved(log, 1155, sender, recipient, _word(log.data, 0), _word(log.data, 1))]
    ids, amounts = _array(log.data, 0), _array(log.data, 1)
    if len(ids) != len(amounts):
        raise ValueError("as many amounts as tokens")
    return [
        _moved(log, 1155, sender, recipient, token, amount, item=item)
        for item, (token, amount) in enumerate(zip(ids, amounts, strict=True))
    ]


def _word(data: str, place: int) -> int:
    at = 2 + place * _WORD
    word = data[at : at + _WORD]
    if len(word) != _WORD:
        raise ValueError("short data")
    return int(word, 16)


def _array(data: str, place: int) -> list[int]:
    """A dynamic array of words, by its offset. Its length is trusted only as far as there is data."""
    offset = _word(data, place)
    if offset % 32 or offset > len(data):
        raise ValueError("an offset that leads nowhere")
    first = offset // 32
    count = _word(data, first)
    if count > len(data) // _WORD:
        raise ValueError("a length that cannot be")
    return [_word(data, first + 1 + index) for index in range(count)]
