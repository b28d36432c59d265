"""Count the events that a webhook config would have created in past blocks.

The blocks are read and matched as in the follower, with an index that contains only this config. The count is exact: the
receipts of matching transactions are fetched where failed ones create no events, and blocks are traced where necessary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.chains.evm import activity, facts, matching, payloads
from proxy.chains.evm.facts import ChainLog
from proxy.chains.evm.matching import Match, MatchBlock, MatchTransaction
from proxy.chains.evm.watch_index import KINDS, Watcher, WatchIndex
from proxy.chains.families import family_of
from proxy.chains.registry import Network
from proxy.errors import InvalidRequest, Unavailable
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.rpc.traces import MalformedTrace, TraceReader
from proxy.services.webhooks.webhooks import read_config, read_filter

# Limits of one back-test: blocks if only logs are read, if full blocks are read, and if blocks are traced.
MAX_BLOCKS, MAX_FULL_BLOCKS, MAX_TRACED_BLOCKS = 2_000, 200, 50
# Blocks read together.
BATCH = 20
# Limit of one back-test: receipts, each of which is a call to the network.
MAX_RECEIPTS = 20_000
_NEED_FULL_BLOCKS = frozenset({"activity", "mined"})


@dataclass(frozen=True, slots=True)
class BacktestResult:
    first: int
    last: int
    events: int
    blocks: int


class Backtest:
    def __init__(self, internal_calls: InternalCalls) -> None:
        self._internal_calls = internal_calls

    def __repr__(self) -> str:
        return f"<Backtest by {self._internal_calls!r}>"

    async def run(
        self, network: Network, event_type: str, config: Mapping[str, Any], *, first: int, last: int
    ) -> BacktestResult:
        if "webhooks" not in family_of(network).features:
            raise InvalidRequest(f"chain: webhooks are not available on {network.id}")
        if KINDS[event_type] == "pending":
            raise InvalidRequest(f"event_type: {event_type} cannot be tested on past blocks")
        index = WatchIndex()
        addresses = await read_config(event_type, config)
        index.put(Watcher("", event_type, read_filter(event_type, config), listed=addresses is not None))
        if addresses is not None:
            index.watch("", addresses)
        await self._check(network, first, last, most=self._most(index))
        counts: list[int] = []
        receipts = 0
        for start in range(first, last + 1, BATCH):
            end = min(start + BATCH - 1, last)
            if index.has("internal"):
                counts += await self._traced(network, index, start, end)
                continue
            found = await self._matches(network, index, start, end)
            uncertain = [_uncertain(each) for each in found]
            receipts += sum(map(len, uncertain))
            if receipts > MAX_RECEIPTS:
                raise InvalidRequest(f"to_block: more than {MAX_RECEIPTS} transactions match, use fewer blocks")
            counts += [
                len(each) - await self._failed(network, names) for each, names in zip(found, uncertain, strict=True)
            ]
        return BacktestResult(first, last, sum(counts), sum(count > 0 for count in counts))

    def _most(self, index: WatchIndex) -> int:
        if index.has("internal"):
            return MAX_TRACED_BLOCKS
        return MAX_FULL_BLOCKS if self._needs_full_blocks(index) else MAX_BLOCKS

    @staticmethod
    def _needs_full_blocks(index: WatchIndex) -> bool:
        watcher = index.find("")
        assert watcher is not None
        return watcher.kind in _NEED_FULL_BLOCKS or bool(watcher.filter.selectors)

    async def _check(self, network: Network, first: int, last: int, *, most: int) -> None:
        if last < first:
            raise InvalidRequest("to_block: must not be before from_block")
        if last - first >= most:
            raise InvalidRequest(f"to_block: this config can be tested on at most {most} blocks at once")
        head = int(await self._call(network, "eth_blockNumber"), 16)
        if last > head:
            raise InvalidRequest(f"to_block: the newest block is {head}")

    async def _matches(self, network: Network, index: WatchIndex, first: int, last: int) -> list[list[Match]]:
        """The matches of each block."""
        logs = await self._logs(network, index, first, last)
        transactions = await self._transactions(network, index, first, last)
        found = []
        for number in range(first, last + 1):
            of_block = logs.get(number, [])
            transfers, _ = facts.transfers_of(of_block)
            block = MatchBlock(transactions.get(number, []), transfers, of_block)
            found.append(matching.matched(index.tables, block))
        return found

    async def _traced(self, network: Network, index: WatchIndex, first: int, last: int) -> list[int]:
        """The number of internal transfers that match in each block."""
        traces = TraceReader(network, self._internal_calls)
        counts = []
        for number in range(first, last + 1):
            block = await self._call(network, "eth_getBlockByNumber", hex(number), False)
            if not isinstance(block, Mapping):
                raise Unavailable(f"cannot read these blocks of {network.id}: try again later")
            try:
                calls = await traces.calls(number, bytes.fromhex(block["hash"][2:]))
            except (RpcError, MalformedTrace) as exc:
                raise Unavailable(
                    f"no upstream of {network.id} has traces of block {number}: {str(exc)[:200]}"
                ) from None
            counts.append(len(matching.matched_calls(index.tables, calls)))
        return counts

    async def _logs(self, network: Network, index: WatchIndex, first: int, last: int) -> dict[int, list[ChainLog]]:
        if index.has("mined", "block"):
            return {}
        query: dict[str, Any] = {"fromBlock": hex(first), "toBlock": hex(last)}
        if not index.has("log"):
            query["topics"] = [sorted(facts.TOPICS)]
        found: dict[int, list[ChainLog]] = {}
        for log in msgspec.convert(await self._call(network, "eth_getLogs", query), list[ChainLog]):
            found.setdefault(int(log.block_number, 16), []).append(log)
        return found

    async def _transactions(
        self, network: Network, index: WatchIndex, first: int, last: int
    ) -> dict[int, list[MatchTransaction]]:
        if not self._needs_full_blocks(index):
            return {}
        calls = [("eth_getBlockByNumber", [hex(number), True]) for number in range(first, last + 1)]
        blocks = await self._internal_calls.call_many(network, calls)
        if any(not isinstance(block, Mapping) for block in blocks):
            raise Unavailable(f"cannot read these blocks of {network.id}: try again later")
        return {int(b["number"], 16): activity.read_transactions(b["transactions"]) for b in blocks}

    async def _failed(self, network: Network, hashes: list[str]) -> int:
        """The number of these transactions that failed."""
        if not hashes:
            return 0
        receipts = await self._internal_calls.call_many(
            network, [("eth_getTransactionReceipt", [each]) for each in hashes]
        )
        return sum(isinstance(each, Mapping) and each.get("status") == "0x0" for each in receipts)

    async def _call(self, network: Network, method: str, *params: Any) -> Any:
        try:
            return await self._internal_calls.call(network, method, *params)
        except RpcError as exc:
            raise Unavailable(f"cannot read these blocks of {network.id}: {exc.error.decode()[:200]}") from None


def _uncertain(found: list[Match]) -> list[str]:
    """The hashes of matching transactions that create an event only if they succeeded, one for each match."""
    return [
        match.fact.hash
        for match in found
        if isinstance(match.fact, MatchTransaction) and payloads.needs_success(match.watcher)
    ]
