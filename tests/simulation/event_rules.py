"""The rules for events of subscriptions: no gap, no double, no inversion; `removed` after reorganisations.

The events of one subscriber are checked over all its connections: it resumes where the last one ended.
"""

from __future__ import annotations

from typing import Any

from tests.simulation.block_tree import DEEPEST_REORG, Block, BlockTree
from tests.simulation.oracle import Oracle
from tests.simulation.sim_upstream import matches

# At the end, events of blocks that are older than this have arrived.
ARRIVES_S = 4.0


class HeadEvents:
    """Heads of `newHeads`. Each follows one that was announced before."""

    def __init__(self, oracle: Oracle, tree: BlockTree, who: str) -> None:
        self._oracle, self._tree, self._who = oracle, tree, who
        self._announced: dict[str, int] = {}
        self._first: Block | None = None
        self._last: Block | None = None
        # The first head of a connection may be a block that the last connection had announced.
        self._resumes_at: int | None = None
        self._is_first = True

    def __repr__(self) -> str:
        return f"<HeadEvents of {self._who}: {len(self._announced)} blocks>"

    @property
    def next_block(self) -> int | None:
        return None if self._last is None else self._last.number + 1

    def begins(self, name: str) -> None:
        """A connection has subscribed, from `next_block` on if that is known."""
        self._resumes_at, self._is_first = self.next_block, True

    def on_event(self, head: dict[str, Any]) -> None:
        block = self._tree.find(head["hash"])
        if block is None or block.number != int(head["number"], 16):
            self._violate(f"the head {head['number']} {head['hash'][:10]} does not exist")
            return
        if self._announced and not self._is_first and block.hash in self._announced:
            self._violate(f"{block!r} came twice")
        if self._is_first and self._resumes_at is not None and block.number > self._resumes_at:
            self._violate(f"resumed at {block.number}, not at {self._resumes_at}")
        follows = block.parent_hash in self._announced or self._reaches_below(block)
        if not follows and not (self._is_first and self._resumes_at is not None):
            self._violate(f"{block!r} does not follow any head that was announced; the last was {self._last!r}")
        if self._last is not None and block.number <= self._last.number:
            # Replaced blocks come again if the chain returns to their branch.
            self._announced = {each: number for each, number in self._announced.items() if number < block.number}
        self._announced[block.hash] = block.number
        self._last, self._is_first = block, False

    def _reaches_below(self, block: Block) -> bool:
        """Whether it is the first, or replaces the first that was announced and blocks before that."""
        if self._first is None:
            self._first = block
        return block.number <= self._first.number

    def ended(self) -> None:
        """The last head is the network's, as it was a few seconds ago or later."""
        expected = self._tree.tip_at(self._oracle.now_s - ARRIVES_S)
        if self._oracle.is_healed and (self._last is None or self._last.number < expected.number):
            self._violate(f"the last head was {self._last!r}, and the network is at {self._tree.tip!r}")

    def _violate(self, text: str) -> None:
        self._oracle.violate("events", f"heads of {self._who}: {text}")


class LogEvents:
    """Logs that were announced and not removed again. At the end they are those of the network's branch."""

    def __init__(self, oracle: Oracle, tree: BlockTree, who: str, wanted: dict[str, Any]) -> None:
        self._oracle, self._tree, self._who, self._wanted = oracle, tree, who, wanted
        self._live: dict[tuple[str, str], int] = {}
        self._since: int | None = None
        self._last = 0

    def __repr__(self) -> str:
        return f"<LogEvents of {self._who}: {len(self._live)} logs>"

    @property
    def next_block(self) -> int | None:
        """Resume as many blocks before the last log as a reorganisation can replace: `removed` is sent to the connection that
        got the log, and that one has ended."""
        return None if self._since is None else max(self._since, self._last) - DEEPEST_REORG

    def begins(self, name: str) -> None:
        """A connection has subscribed, from `next_block` on if that is known: the logs from there on come again."""
        first = self.next_block
        if first is None:
            # Blocks that arrive while the subscription begins may be part of it or not.
            self._since = self._tree.tip.number + 2
        else:
            self._live = {log: number for log, number in self._live.items() if number < first}

    def on_event(self, log: dict[str, Any]) -> None:
        name, number = (log["blockHash"], log["logIndex"]), int(log["blockNumber"], 16)
        block = self._tree.find(log["blockHash"])
        if block is None or {**log, "removed": False} not in block.logs() or not matches(self._wanted, log):
            self._violate(f"the log {log} does not exist or does not match")
            return
        if log["removed"]:
            if self._live.pop(name, None) is None:
                self._violate(f"log {log['logIndex']} of {block!r} was removed, and had not come")
            return
        if name in self._live:
            self._violate(f"log {log['logIndex']} of {block!r} came twice")
        self._live[name] = number
        self._last = max(self._last, number)

    def ended(self) -> None:
        if not self._oracle.is_healed or self._since is None:
            return
        last, tip = self._tree.tip_at(self._oracle.now_s - ARRIVES_S), self._tree.tip
        expected, block = set[tuple[str, str]](), last
        while block.number >= self._since and block.parent is not None:
            if block.is_on(tip):  # A reorganisation may have replaced the last ones a moment ago.
                expected |= {(block.hash, log["logIndex"]) for log in block.logs() if matches(self._wanted, log)}
            block = block.parent
        found = {name for name, number in self._live.items() if self._since <= number}
        blocks = {name: self._tree.find(name[0]) for name in found}
        tips = self._tree.tips_since(self._oracle.now_s - ARRIVES_S)
        on_branch = {name for name, at in blocks.items() if at is not None and any(map(at.is_on, tips))}
        if missing := expected - found:
            self._violate(f"{len(missing)} logs are missing, such as {self._shown(min(missing))}")
        if stale := found - on_branch:
            self._violate(f"{len(stale)} logs were not removed, such as {self._shown(min(stale))}")

    def _shown(self, name: tuple[str, str]) -> str:
        return f"{name[1]} of {self._tree.find(name[0])!r}"

    def _violate(self, text: str) -> None:
        self._oracle.violate("events", f"logs of {self._who}: {text}")
