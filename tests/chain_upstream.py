"""A small chain with blocks, logs and reorganisations, behind a real JSON-RPC server.

Every event is recorded twice: as a log, which the service reads, and as moves, from which `holdings` computes the balances by
plain addition. Neither shares code with the service.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sha3

from tests.rpc_upstreams import REFUSALS, Refused, ScriptedUpstream

ZERO = bytes(20)
# The categories of native and internal transfers.
COINS = (1, 2)


def topic(signature: str) -> str:
    return "0x" + str(sha3.keccak_256(signature.encode()).hexdigest())


TRANSFER = topic("Transfer(address,address,uint256)")
SINGLE = topic("TransferSingle(address,address,address,uint256,uint256)")
BATCH = topic("TransferBatch(address,address,address,uint256[],uint256[])")
DEPOSIT = topic("Deposit(address,uint256)")
WITHDRAWAL = topic("Withdrawal(address,uint256)")


def word(value: int | bytes) -> str:
    return value.rjust(32, b"\0").hex() if isinstance(value, bytes) else f"{value:064x}"


def address(number: int) -> bytes:
    """The address of an account or contract, derived from a small number."""
    return hashlib.sha256(b"address %d" % number).digest()[:20]


@dataclass(frozen=True)
class Event:
    """A log and its moves: (standard, contract, from, to, token id, amount)."""

    contract: bytes
    topics: tuple[str, ...]
    data: str = ""
    moves: tuple[tuple[int, bytes, bytes, bytes, int, int], ...] = ()


def erc20(contract: bytes, sender: bytes, recipient: bytes, amount: int) -> Event:
    topics = (TRANSFER, "0x" + word(sender), "0x" + word(recipient))
    return Event(contract, topics, word(amount), ((20, contract, sender, recipient, 0, amount),))


def erc721(contract: bytes, sender: bytes, recipient: bytes, token: int) -> Event:
    topics = (TRANSFER, "0x" + word(sender), "0x" + word(recipient), "0x" + word(token))
    return Event(contract, topics, "", ((721, contract, sender, recipient, token, 1),))


def erc1155(contract: bytes, sender: bytes, recipient: bytes, token: int, amount: int) -> Event:
    topics = (SINGLE, "0x" + word(sender), "0x" + word(sender), "0x" + word(recipient))
    return Event(contract, topics, word(token) + word(amount), ((1155, contract, sender, recipient, token, amount),))


def erc1155_batch(contract: bytes, sender: bytes, recipient: bytes, tokens: Sequence[tuple[int, int]]) -> Event:
    topics = (BATCH, "0x" + word(sender), "0x" + word(sender), "0x" + word(recipient))
    arrays = [[token for token, _ in tokens], [amount for _, amount in tokens]]
    tails = ["".join(map(word, [len(array), *array])) for array in arrays]
    data = word(64) + word(64 + len(tails[0]) // 2) + "".join(tails)
    return Event(contract, topics, data, tuple((1155, contract, sender, recipient, t, a) for t, a in tokens))


def deposit(contract: bytes, recipient: bytes, amount: int) -> Event:
    return Event(
        contract, (DEPOSIT, "0x" + word(recipient)), word(amount), ((20, contract, ZERO, recipient, 0, amount),)
    )


def withdrawal(contract: bytes, sender: bytes, amount: int) -> Event:
    return Event(contract, (WITHDRAWAL, "0x" + word(sender)), word(amount), ((20, contract, sender, ZERO, 0, amount),))


def coins(sender: bytes, recipient: bytes, amount: int, *, failed: bool = False) -> Event:
    """A transaction that moves coins, or tries to."""
    return Event(recipient, (), "failed" if failed else "", ((1, b"", sender, recipient, 0, amount),))


def inner(sender: bytes, recipient: bytes, amount: int) -> Event:
    """A transaction that moves coins by a call inside it."""
    return Event(recipient, (), "", ((2, b"", sender, recipient, 0, amount),))


@dataclass(frozen=True)
class Block:
    number: int
    hash: str
    parent: str
    events: tuple[Event, ...]

    @property
    def time(self) -> int:
        return 1_700_000_000 + self.number

    def hash_at(self, index: int) -> str:
        """The hash of the transaction that emits the event."""
        return "0x" + hashlib.sha256(f"{self.hash} {index}".encode()).hexdigest()

    def transactions(self, *, full: bool) -> list[Any]:
        """One for each event."""
        return [self._transaction(index, event, full=full) for index, event in enumerate(self.events)]

    def _transaction(self, index: int, event: Event, *, full: bool) -> Any:
        if not full:
            return self.hash_at(index)
        category, _, sender, recipient, _, amount = event.moves[0] if event.moves else (0, b"", ZERO, ZERO, 0, 0)
        return {
            "hash": self.hash_at(index),
            "from": "0x" + sender.hex(),
            "to": "0x" + (recipient if category == 1 else event.contract).hex(),
            "value": hex(amount if category == 1 else 0),
            "nonce": "0x0",
            "input": "0x",
            "transactionIndex": hex(index),
        }

    def receipts(self) -> list[dict[str, Any]]:
        logs = {log["transactionHash"]: log for log in self.logs()}
        return [
            {
                "blockHash": self.hash,
                "transactionHash": self.hash_at(index),
                "status": "0x0" if event.data == "failed" else "0x1",
                "logs": [logs[self.hash_at(index)]] if event.topics else [],
            }
            for index, event in enumerate(self.events)
        ]

    def traces(self) -> list[dict[str, Any]]:
        """In the form of geth's callTracer."""
        return [
            {"txHash": self.hash_at(index), "result": {"type": "CALL", "value": "0x0", "calls": _calls(event)}}
            for index, event in enumerate(self.events)
        ]

    def header(self) -> dict[str, Any]:
        return {
            "number": hex(self.number),
            "hash": self.hash,
            "parentHash": self.parent,
            "timestamp": hex(self.time),
            "logsBloom": "0x" + ("f" if self.events else "0") * 512,
            "transactions": [],
        }

    def logs(self) -> list[dict[str, Any]]:
        return [
            {
                "address": "0x" + event.contract.hex(),
                "topics": list(event.topics),
                "data": "0x" + event.data,
                "blockNumber": hex(self.number),
                "blockHash": self.hash,
                "transactionHash": self.hash_at(index),
                "transactionIndex": hex(index),
                "logIndex": hex(index),
                "removed": False,
            }
            for index, event in enumerate(self.events)
            if event.topics
        ]


def _calls(event: Event) -> list[dict[str, str]]:
    return [
        {"type": "CALL", "from": "0x" + sender.hex(), "to": "0x" + recipient.hex(), "value": hex(amount)}
        for category, _, sender, recipient, _, amount in event.moves
        if category == 2
    ]


_serial = itertools.count()


def _block(number: int, parent: str, events: Iterable[Event]) -> Block:
    own = hashlib.sha256(f"block {number} {parent} {next(_serial)}".encode()).hexdigest()
    return Block(number, "0x" + own, parent, tuple(events))


@dataclass
class LittleChain:
    """The canonical chain, and every block that was ever part of it."""

    blocks: list[Block] = field(default_factory=lambda: [_block(0, "0x" + "0" * 64, ())])
    known: dict[str, Block] = field(default_factory=dict)
    # The chain id of the development networks.
    identity: str = "31337"

    @property
    def head(self) -> int:
        return len(self.blocks) - 1

    def mine(self, *blocks: Iterable[Event]) -> None:
        """Mine one block for each list of events."""
        for events in blocks:
            block = _block(len(self.blocks), self.blocks[-1].hash, events)
            self.blocks.append(block)
            self.known[block.hash] = block

    def drop(self, depth: int) -> None:
        """Drop the newest blocks; others may be mined in their place."""
        del self.blocks[len(self.blocks) - depth :]

    def hide_parents(self, first: int) -> None:
        """Let blocks from this one on report no parent."""
        for number, block in enumerate(self.blocks[first:], first):
            self.blocks[number] = self.known[block.hash] = replace(block, parent="0x" + "0" * 64)

    def holdings(self, first: int = 0, last: int | None = None) -> dict[tuple[bytes, ...], int]:
        """All non-zero balances, by (holder, contract) or (holder, contract, token id)."""
        held: Counter[tuple[bytes, ...]] = Counter()
        for block in self.blocks[first : None if last is None else last + 1]:
            for standard, contract, sender, recipient, token, amount in (m for e in block.events for m in e.moves):
                if standard in COINS:
                    continue
                rest = (contract,) if standard == 20 else (contract, token.to_bytes(32, "big"))
                held[sender, *rest] -= amount
                held[recipient, *rest] += amount
        return {key: amount for key, amount in held.items() if amount and key[0] != ZERO}

    def transfers(self, first: int = 0, last: int | None = None) -> list[tuple[Any, ...]]:
        """Every move of a token: block, hash, time, transaction, log, item, then standard, contract, from, to, token id and
        amount."""
        return [each for each in self.moves(first, last) if each[6] not in COINS]

    def moves(self, first: int = 0, last: int | None = None) -> list[tuple[Any, ...]]:
        """The same of tokens and coins, in the order of the history: native, internal, then tokens. The item of a native
        transfer that failed is 1."""
        found: list[tuple[Any, ...]] = []
        for block in self.blocks[first : None if last is None else last + 1]:
            inside = 0
            for rank in (1, 2, 0):
                for index, event in enumerate(block.events):
                    moves = [move for move in event.moves if (move[0] if move[0] in COINS else 0) == rank]
                    for item, move in enumerate(moves):
                        place = (inside if rank == 2 else index, 1 if event.data == "failed" else item)
                        found.append((block.number, block.hash, block.time, block.hash_at(index), *place, *move))
                    inside += rank == 2 and bool(moves)
        return found


class ChainUpstream(ScriptedUpstream):
    """One upstream of a small chain."""

    chain: LittleChain  # type: ignore[assignment]

    def __init__(self, chain: LittleChain) -> None:
        super().__init__(chain)  # type: ignore[arg-type]
        # Ranges with more logs are refused; 0 for no limit.
        self.max_logs = 0
        # Whether blocks list their transactions, one for each event.
        self.has_transactions = False

    def _eth_getBlockByNumber(self, params: list[Any]) -> dict[str, Any] | None:
        number = self._number(params[0])
        if not 0 <= number <= self.head:
            return None
        block = self.chain.blocks[number]
        found = block.header()
        return {**found, "transactions": block.transactions(full=params[1])} if self.has_transactions else found

    def _debug_traceBlockByHash(self, params: list[Any]) -> list[dict[str, Any]]:
        return self._known(params[0]).traces()

    def _known(self, name: str) -> Block:
        block = self.chain.known.get(name) or self.chain.blocks[0]
        if block.hash != name:
            raise Refused(-32000, "unknown block")
        return block

    def _eth_getLogs(self, params: list[Any]) -> list[dict[str, Any]]:
        log_filter = params[0]
        if "blockHash" in log_filter:
            blocks = [self._known(log_filter["blockHash"])]
        else:
            first, last = self._number(log_filter.get("fromBlock")), self._number(log_filter.get("toBlock"))
            if self.max_range and last - first + 1 > self.max_range:
                raise Refused(**REFUSALS[self.refusal](first, self.max_range))
            blocks = self.chain.blocks[first : min(last, self.head) + 1]
        logs = [log for block in blocks for log in block.logs() if _matches(log, log_filter)]
        if self.max_logs and len(logs) > self.max_logs and len(blocks) > 1:
            raise Refused(-32005, f"query returned more than {self.max_logs} results")
        return logs

    def _eth_getBlockReceipts(self, params: list[Any]) -> list[dict[str, Any]]:
        return self.chain.blocks[self._number(params[0])].receipts()


def _matches(log: dict[str, Any], log_filter: dict[str, Any]) -> bool:
    """By the first topic and the address: the service uses no other filters."""
    wanted = (log_filter.get("topics") or [None])[0]
    if wanted is not None and (not log["topics"] or log["topics"][0] not in wanted):
        return False
    return "address" not in log_filter or log["address"] == log_filter["address"].lower()
