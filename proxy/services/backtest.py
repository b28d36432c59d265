"""How many events a config would have made in blocks of the past, before anybody subscribes with it.

The blocks are read and matched as the follower does it, by an index that holds this one config. What it says is exact: of
transactions that match, the receipts are asked for, because those that failed are no events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.chains.evm import activity, facts
from proxy.chains.evm.facts import Log
from proxy.chains.registry import Network
from proxy.core import matching
from proxy.core.matching import Block, Tx
from proxy.core.watching import KINDS, Index, Watcher
from proxy.errors import InvalidRequest, Unavailable
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.questions import Questions
from proxy.services.webhooks import read_config, read_filter

# Blocks of one back-test: of logs alone, and where whole blocks must be read.
MOST_BLOCKS, MOST_WHOLE_BLOCKS = 2_000, 200
# Blocks that are read together.
AT_ONCE = 20
# Events of one back-test: the receipts of more are not asked for.
MOST_EVENTS = 20_000
_WHOLE = frozenset({"activity", "mined"})
_NOT_NOW = frozenset({"pending", "internal"})


@dataclass(frozen=True, slots=True)
class Found:
    first: int
    last: int
    events: int
    blocks: int


class Backtest:
    def __init__(self, questions: Questions) -> None:
        self._questions = questions

    def __repr__(self) -> str:
        return f"<Backtest by {self._questions!r}>"

    async def run(
        self, network: Network, event_type: str, config: Mapping[str, Any], *, first: int, last: int
    ) -> Found:
        kind = KINDS[event_type]
        if kind in _NOT_NOW:
            raise InvalidRequest(f"event_type: blocks do not tell of {event_type}: it cannot be tried on the past")
        index = Index()
        addresses = await read_config(event_type, config)
        index.put(Watcher("", event_type, read_filter(event_type, config), listed=addresses is not None))
        if addresses is not None:
            index.watch("", addresses)
        await self._check(network, first, last, most=MOST_WHOLE_BLOCKS if self._is_whole(index) else MOST_BLOCKS)
        events = blocks = 0
        for start in range(first, last + 1, AT_ONCE):
            for count in await self._counts(network, index, start, min(start + AT_ONCE - 1, last)):
                events += count
                blocks += count > 0
        return Found(first, last, events, blocks)

    @staticmethod
    def _is_whole(index: Index) -> bool:
        watcher = index.find("")
        assert watcher is not None
        return watcher.kind in _WHOLE or bool(watcher.filter.selectors)

    async def _check(self, network: Network, first: int, last: int, *, most: int) -> None:
        if last < first:
            raise InvalidRequest("to_block: must not be before from_block")
        if last - first >= most:
            raise InvalidRequest(f"to_block: this config can be tried on {most} blocks at once")
        head = int(await self._ask(network, "eth_blockNumber"), 16)
        if last > head:
            raise InvalidRequest(f"to_block: the newest block is {head}")

    async def _counts(self, network: Network, index: Index, first: int, last: int) -> list[int]:
        """Of each block."""
        logs = await self._logs(network, index, first, last)
        transactions = await self._transactions(network, index, first, last)
        counts = []
        for number in range(first, last + 1):
            of_block = logs.get(number, [])
            transfers, _ = facts.transfers_of(of_block)
            block = Block(transactions.get(number, []), transfers, of_block)
            found = matching.matched(index.tables, block)
            counts.append(len(found) - await self._failed(network, found))
        return counts

    async def _logs(self, network: Network, index: Index, first: int, last: int) -> dict[int, list[Log]]:
        if index.has("mined", "block"):
            return {}
        asked: dict[str, Any] = {"fromBlock": hex(first), "toBlock": hex(last)}
        if not index.has("log"):
            asked["topics"] = [sorted(facts.TOPICS)]
        found: dict[int, list[Log]] = {}
        for log in msgspec.convert(await self._ask(network, "eth_getLogs", asked), list[Log]):
            found.setdefault(int(log.block_number, 16), []).append(log)
        return found

    async def _transactions(self, network: Network, index: Index, first: int, last: int) -> dict[int, list[Tx]]:
        if not self._is_whole(index):
            return {}
        calls = [("eth_getBlockByNumber", [hex(number), True]) for number in range(first, last + 1)]
        blocks = await self._questions.ask_many(network, calls)
        if any(not isinstance(block, Mapping) for block in blocks):
            raise Unavailable(f"the network {network.id} cannot be read there at the moment")
        return {int(b["number"], 16): activity.read_transactions(b["transactions"]) for b in blocks}

    async def _failed(self, network: Network, found: list[matching.Match]) -> int:
        """How many of them are of transactions that failed."""
        wanted = [m.fact.hash for m in found if isinstance(m.fact, Tx) and m.watcher.kind == "activity"]
        if not wanted:
            return 0
        receipts = await self._questions.ask_many(network, [("eth_getTransactionReceipt", [each]) for each in wanted])
        return sum(isinstance(each, Mapping) and each.get("status") == "0x0" for each in receipts)

    async def _ask(self, network: Network, method: str, *params: Any) -> Any:
        try:
            return await self._questions.ask(network, method, *params)
        except RpcError as exc:
            raise Unavailable(f"the network {network.id} cannot be read there: {exc.error.decode()[:200]}") from None
