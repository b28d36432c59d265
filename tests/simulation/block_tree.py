"""A simulated chain: a tree of blocks that all its upstreams share, of which each sees a part.

Every value names where it comes from, so that the oracle can tell from a result alone which block and which branch it was read
at. A balance is the address, the block's number and a part of its hash; the answer of a contract is derived from the call.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tests.simulation.history import History

# Deep enough that a block is archive data (128) and may be pruned, on every branch.
FIRST_HEAD = 200
# Reorganisations replace fewer blocks than the chain's finality (`config/chains/dev.toml`).
DEEPEST_REORG = 3
CONTRACTS = [f"0x{0xC0 + n:040x}" for n in range(3)]
TOPICS = [f"0x{0xE0 + n:064x}" for n in range(2)]
_NUMBER_BITS, _BRANCH_BITS = 32, 32
STRIDE = 16


def digest_of(*parts: object) -> str:
    return hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=32).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    number: int
    hash: str
    parent: Block | None
    at_s: float
    # Hashes of the transactions.
    transactions: tuple[str, ...] = ()
    # The upstream that alone has this block; empty for blocks of the network.
    private_to: str = ""
    # The nearest ancestor whose number is a multiple of STRIDE: a short way to old blocks.
    far: Block | None = None
    # Made when they are first needed: see `json` and `logs`.
    _json: dict[str, Any] = field(default_factory=dict)
    _logs: list[dict[str, Any]] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<Block {self.number} {self.hash[:10]}{' of ' + self.private_to if self.private_to else ''}>"

    @property
    def parent_hash(self) -> str:
        return "0x" + "00" * 32 if self.parent is None else self.parent.hash

    @property
    def branch(self) -> int:
        """A number for the hash, as a part of values."""
        return int(self.hash[2:10], 16)

    @property
    def left_at_s(self) -> float:
        """When the first block of its private branch was made."""
        first = self
        while first.parent is not None and first.parent.private_to:
            first = first.parent
        return first.at_s

    def at(self, number: int) -> Block | None:
        """This block or its ancestor with this number."""
        found: Block | None = self
        while found is not None and found.number > number:
            is_far = found.far is not None and found.far.number >= number
            found = found.far if is_far else found.parent
        return found if found is not None and found.number == number else None

    def is_on(self, tip: Block) -> bool:
        """Whether it is that block or an ancestor of it."""
        return tip.at(self.number) is self

    def json(self) -> dict[str, Any]:
        """Shared by all callers, as are the logs."""
        if not self._json:
            self._json.update(self._made_json())
        return self._json

    def _made_json(self) -> dict[str, Any]:
        return {
            "number": hex(self.number),
            "hash": self.hash,
            "parentHash": self.parent_hash,
            "timestamp": hex(1_700_000_000 + self.number),
            "gasUsed": "0x5208",
            "gasLimit": "0x1c9c380",
            "baseFeePerGas": "0x7",
            "logsBloom": "0x" + ("01" if self.logs() else "00") * 256,
            "transactions": list(self.transactions),
            "uncles": [],
            "size": "0x220",
        }

    def logs(self) -> list[dict[str, Any]]:
        """Up to three logs, which follow from the hash."""
        if not self._logs:
            self._logs.extend(self._made_logs())
        return self._logs

    def _made_logs(self) -> list[dict[str, Any]]:
        count = int(self.hash[10:12], 16) % 4
        return [
            {
                "address": CONTRACTS[(self.branch + index) % len(CONTRACTS)],
                "topics": [TOPICS[(self.branch >> index) % len(TOPICS)]],
                "data": f"0x{self.branch:064x}",
                "blockNumber": hex(self.number),
                "blockHash": self.hash,
                "transactionHash": "0x" + digest_of("tx", self.hash, index),
                "transactionIndex": hex(index),
                "logIndex": hex(index),
                "removed": False,
            }
            for index in range(count)
        ]


class BlockTree:
    """Grows with time. Its tip is the network's, and never has a lower number than the tip before."""

    def __init__(self, name: str, history: History, rng: random.Random) -> None:
        self.name, self._history, self._rng = name, history, rng
        block: Block | None = None
        self._by_hash: dict[str, Block] = {}
        self._by_branch: dict[tuple[int, int], Block] = {}
        for number in range(FIRST_HEAD + 1):
            block = self.add(block, 0.0, salt=number)
        assert block is not None
        self.tip = block
        self._tips: list[Block] = [block]
        self._since: list[float] = [0.0]
        self._salt = 0
        # Transactions that are in no block, and all that any upstream has accepted.
        self.pool: dict[str, None] = {}
        self.accepted: dict[str, None] = {}
        self.reorgs = 0

    def __repr__(self) -> str:
        return f"<BlockTree {self.name} at {self.tip!r}, {self.reorgs} reorganisations>"

    def add(
        self,
        parent: Block | None,
        at_s: float,
        *,
        salt: int,
        transactions: tuple[str, ...] = (),
        private_to: str = "",
    ) -> Block:
        number = 0 if parent is None else parent.number + 1
        name = "0x" + digest_of("block", self.name, salt, private_to, "" if parent is None else parent.hash)
        far = None if parent is None else parent.far if parent.number % STRIDE else parent
        block = Block(number, name, parent, at_s, transactions, private_to, far)
        self._by_hash[name] = self._by_branch[number, block.branch] = block
        return block

    def find(self, block_hash: str) -> Block | None:
        return self._by_hash.get(block_hash)

    def tip_at(self, at_s: float) -> Block:
        """The network's tip at that time."""
        return self._tips[max(0, bisect_right(self._since, at_s) - 1)]

    def tips_since(self, at_s: float) -> list[Block]:
        """The network's tips from that time on."""
        return self._tips[max(0, bisect_right(self._since, at_s) - 1) :]

    def find_branch(self, number: int, branch: int) -> Block | None:
        """The block with this number and this part of its hash, on any branch."""
        return self._by_branch.get((number, branch))

    def grow(self, now_s: float) -> None:
        """One more block on the tip."""
        self._move_to(self._mine(self.tip, now_s, tuple(self.pool)), now_s)

    def reorganise(self, now_s: float) -> None:
        """Another branch overtakes the tip: some of the last blocks are replaced, and one more follows."""
        depth = self._rng.randint(1, DEEPEST_REORG)
        base = self.tip.at(self.tip.number - depth)
        assert base is not None
        lost = [name for block in self._above(base) for name in block.transactions]
        block = base
        for place in range(depth + 1):
            block = self._mine(block, now_s, tuple(lost) if place == depth else ())
        self.reorgs += 1
        self._history.fault(self.name, "reorganisation", f"of {depth} blocks above {base.number}")
        self._move_to(block, now_s)

    def _above(self, base: Block) -> Iterator[Block]:
        block = self.tip
        while block is not base:
            yield block
            assert block.parent is not None
            block = block.parent

    def _mine(self, parent: Block, now_s: float, transactions: tuple[str, ...]) -> Block:
        self._salt += 1
        for name in transactions:
            self.pool.pop(name, None)
        return self.add(parent, now_s, salt=self._salt, transactions=transactions)

    def _move_to(self, block: Block, now_s: float) -> None:
        assert block.number > self.tip.number
        self.tip = block
        self._tips.append(block)
        self._since.append(now_s)
        self._history.note(self.name, f"block {block.number} {block.hash[:10]}")


# Values that name their block


@cache
def owner_of(address: str) -> int:
    return int(digest_of("owner", address)[:12], 16)


def balance_of(address: str, block: Block) -> int:
    return (owner_of(address) << _NUMBER_BITS | block.number) << _BRANCH_BITS | block.branch


@dataclass(frozen=True, slots=True)
class Balance:
    """A balance, taken apart."""

    owner: int
    number: int
    branch: int

    @classmethod
    def of(cls, value: int) -> Balance:
        number = value >> _BRANCH_BITS & (1 << _NUMBER_BITS) - 1
        return cls(value >> _BRANCH_BITS + _NUMBER_BITS, number, value & (1 << _BRANCH_BITS) - 1)


def answer_of(data: str) -> str:
    """The answer of a contract to this data, of 64 bytes to 1 MB: the last digit of the data says how much."""
    return "0x" + digest_of("answer", data) * (1 << int(data[-1], 16))
