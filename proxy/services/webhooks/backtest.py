"""Count the events that a webhook config would have created in past blocks.

The blocks are read and matched as in the follower, with an index that contains only this config. The count is exact: the
receipts of matching transactions are fetched where failed ones create no events, and blocks are traced where necessary.

A back-test pays for its upstream calls as it makes them, and for the size of their results (`services/rpc/internal_calls.py`).
Its blocks are decoded and matched in short steps, in turn with other clients, and the bytes that it holds are memory of its
account. An account may run a few back-tests at a time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.chains.evm import activity, facts, matching, payloads
from proxy.chains.evm.facts import ChainLog
from proxy.chains.evm.matching import Match, MatchBlock, MatchTransaction
from proxy.chains.evm.watch_index import KINDS, Watcher, WatchIndex
from proxy.chains.families import family_of
from proxy.chains.registry import Network
from proxy.errors import InvalidRequest, RateLimited, Unavailable
from proxy.memory_budget import BudgetLine
from proxy.services.accounts.metering import meter_of_task
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.rpc.traces import MalformedTrace, TraceReader
from proxy.services.webhooks.webhooks import read_config, read_filter
from proxy.tasks import client_of_task
from proxy.turn_queue import TurnQueue

# Limits of one back-test: blocks if only logs are read, if full blocks are read, and if blocks are traced.
MAX_BLOCKS, MAX_FULL_BLOCKS, MAX_TRACED_BLOCKS = 2_000, 200, 50
# Blocks read together, and for which a range without a first block goes on if the account can pay for twice as many.
BATCH = 10
# Limit of one back-test: receipts, each of which is a call to the network.
MAX_RECEIPTS = 20_000
_NEED_FULL_BLOCKS = frozenset({"activity", "mined"})
# Errors of reading what an upstream sent.
_INVALID = (msgspec.DecodeError, ValueError, RecursionError)
# Full blocks that are requested at a time.
READ_AT_ONCE = 4
# Back-tests of one account that run in a worker.
MOST_OF_ACCOUNT = 4
# Addresses that are added to the index, and transactions or logs that are decoded or matched, in one step.
ADDRESSES_PER_STEP, ITEMS_PER_STEP = 500, 50
# Bytes that are counted as held per byte of logs, which are larger once decoded.
LOG_GROWTH = 3
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_logs_of = msgspec.json.Decoder(ChainLog).decode


class _FullBlock(msgspec.Struct):
    number: str
    transactions: list[msgspec.Raw]


_block = msgspec.json.Decoder(_FullBlock).decode


@dataclass(frozen=True, slots=True)
class BacktestResult:
    first: int
    last: int
    events: int
    blocks: int


class _Receipts:
    """Limits the receipts of one back-test."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, count: int) -> None:
        self._count += count
        if self._count > MAX_RECEIPTS:
            raise InvalidRequest(
                f"to_block: more than {MAX_RECEIPTS} transactions match, use fewer blocks", param="to_block"
            )


class Backtest:
    def __init__(self, internal_calls: InternalCalls, turns: TurnQueue, memory: BudgetLine) -> None:
        self._internal_calls = internal_calls
        self._turns = turns
        self._memory = memory
        # How many back-tests each account runs.
        self._running: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Backtest {self._running.total()} running, by {self._internal_calls!r}>"

    async def run(
        self, network: Network, event_type: str, config: Mapping[str, Any], *, first: int | None, last: int | None
    ) -> BacktestResult:
        """Test the blocks from `first` to `last`, newest first. Without a last one the range ends with the newest block, and
        without a first one it is as long as the account can pay for."""
        client = client_of_task.get()
        if self._running[client] >= MOST_OF_ACCOUNT:
            raise RateLimited(f"this account runs {MOST_OF_ACCOUNT} back-tests already: wait for one", retry_after_s=1)
        self._running[client] += 1
        if (meter := meter_of_task.get()) is not None:
            meter.pay_for_hits()
        try:
            report = await self._run(network, event_type, config, first=first, last=last)
            if meter is not None:
                await meter.pay(0)  # Pay the remaining debt: nothing is held any more.
            return report
        finally:
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]

    async def _turn(self) -> None:
        """Wait for the account's turn: the next step takes a moment of the loop's time."""
        await self._turns.wait(client_of_task.get())

    @contextmanager
    def _held(self, size: int) -> Iterator[None]:
        """Count what was read as memory of the account."""
        client = client_of_task.get()
        if not self._memory.take(client, size):
            raise RateLimited("this account holds too much memory: make fewer requests at a time", retry_after_s=1)
        try:
            yield
        finally:
            self._memory.give_back(client, size)

    async def _run(
        self, network: Network, event_type: str, config: Mapping[str, Any], *, first: int | None, last: int | None
    ) -> BacktestResult:
        if "webhooks" not in family_of(network).features:
            raise InvalidRequest(f"chain: webhooks are not available on {network.id}", param="chain")
        if KINDS[event_type] == "pending":
            raise InvalidRequest(f"event_type: {event_type} cannot be tested on past blocks", param="event_type")
        index = WatchIndex()
        addresses = await read_config(event_type, config)
        index.put(Watcher("", event_type, await read_filter(event_type, config), listed=addresses is not None))
        for start in range(0, len(addresses or ()), ADDRESSES_PER_STEP):
            await self._turn()
            index.watch("", (addresses or [])[start : start + ADDRESSES_PER_STEP])
        is_open = first is None
        first, last = await self._range(network, first, last, most=self._most(index))
        counts: list[int] = []
        receipts = _Receipts()
        while len(counts) <= last - first and not (is_open and counts and self._is_enough(len(counts))):
            end = last - len(counts)
            start = max(first, end - BATCH + 1)
            if index.has("internal"):
                counts += await self._traced(network, index, start, end)
            else:
                counts += [each async for each in self._counts(network, index, start, end, receipts)]
        return BacktestResult(last - len(counts) + 1, last, sum(counts), sum(count > 0 for count in counts))

    @staticmethod
    def _is_enough(tested: int) -> bool:
        """Whether the account may be unable to pay in time for as many blocks as the next step has."""
        meter = meter_of_task.get()
        return meter is not None and not meter.affords(2 * BATCH * meter.due // tested)

    def _most(self, index: WatchIndex) -> int:
        if index.has("internal"):
            return MAX_TRACED_BLOCKS
        return MAX_FULL_BLOCKS if self._needs_full_blocks(index) else MAX_BLOCKS

    @staticmethod
    def _needs_full_blocks(index: WatchIndex) -> bool:
        watcher = index.find("")
        assert watcher is not None
        return watcher.kind in _NEED_FULL_BLOCKS or bool(watcher.filter.selectors)

    async def _range(self, network: Network, first: int | None, last: int | None, *, most: int) -> tuple[int, int]:
        """The first and the last block to test, of which there are at most `most`."""
        if first is not None and last is not None:
            _check_range(first, last, most)
        head = await self._head(network)
        if last is None:
            last = head
        elif last > head:
            raise InvalidRequest(f"to_block: the newest block is {head}", param="to_block")
        if first is None:
            first = max(0, last - most + 1)
        _check_range(first, last, most)
        return first, last

    async def _counts(
        self, network: Network, index: WatchIndex, first: int, last: int, receipts: _Receipts
    ) -> AsyncIterator[int]:
        """The number of events in each block."""
        raw_logs = await self._logs(network, index, first, last)
        counts: list[tuple[int, list[str]]] = []
        # Decoded logs are larger than their JSON.
        with self._held(LOG_GROWTH * len(raw_logs)):
            logs = await self._by_block(network, raw_logs)
            # A few blocks at a time, each in its own request: a reply with all of them would be parsed in one long step.
            for start in range(first, last + 1, READ_AT_ONCE):
                numbers = range(start, min(start + READ_AT_ONCE, last + 1))
                blocks = await self._blocks(network, index, numbers)
                with self._held(sum(map(len, blocks))):
                    for number, block in zip(numbers, blocks, strict=True):
                        pieces = self._pieces(network, index, block, logs.pop(number, {}))
                        counts.append(await self._count(index, pieces, receipts))
        for count, uncertain in counts:
            yield count - await self._failed(network, uncertain)

    async def _count(
        self, index: WatchIndex, pieces: AsyncIterator[MatchBlock], receipts: _Receipts
    ) -> tuple[int, list[str]]:
        """The number of events in the pieces of a block, and the transactions of those that do not count if these failed."""
        count, uncertain = 0, list[str]()
        async for piece in pieces:
            matches = matching.matched(index.tables, piece)
            count += len(matches)
            names = _uncertain(matches)
            receipts.add(len(names))
            uncertain += names
        return count, uncertain

    async def _pieces(
        self, network: Network, index: WatchIndex, block: bytes, logs: dict[str, list[ChainLog]]
    ) -> AsyncIterator[MatchBlock]:
        """A block in pieces that are matched in a step each. The logs of a transaction are in its piece."""
        await self._turn()
        if index.has("block"):
            yield MatchBlock()
            return
        try:
            items = _block(block).transactions if block else []
            for start in range(0, len(items), ITEMS_PER_STEP):
                await self._turn()
                transactions = activity.decoded_transactions(items[start : start + ITEMS_PER_STEP])
                yield _piece([log for each in transactions for log in logs.pop(each.hash, ())], transactions)
        except _INVALID:
            raise _unreadable(network) from None
        part: list[ChainLog] = []
        for of_transaction in logs.values():
            part += of_transaction
            if len(part) >= ITEMS_PER_STEP:
                await self._turn()
                yield _piece(part)
                part = []
        if part:
            await self._turn()
            yield _piece(part)

    async def _traced(self, network: Network, index: WatchIndex, first: int, last: int) -> list[int]:
        """The number of internal transfers that match in each block."""
        traces = TraceReader(network, self._internal_calls, pause=self._turn)
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
            counts.append(0)
            for start in range(0, len(calls), ITEMS_PER_STEP):
                await self._turn()
                counts[-1] += len(matching.matched_calls(index.tables, calls[start : start + ITEMS_PER_STEP]))
        return counts

    async def _logs(self, network: Network, index: WatchIndex, first: int, last: int) -> bytes:
        """The logs of these blocks that may match, as JSON."""
        if index.has("mined", "block"):
            return b"[]"
        query: dict[str, Any] = {"fromBlock": hex(first), "toBlock": hex(last)}
        if not index.has("log"):
            query["topics"] = [sorted(facts.TOPICS)]
        try:
            return await self._internal_calls.raw(network, "eth_getLogs", query)
        except RpcError as exc:
            raise _unreadable(network, exc) from None

    async def _by_block(self, network: Network, logs: bytes) -> dict[int, dict[str, list[ChainLog]]]:
        """The logs of each block, by transaction."""
        blocks: dict[int, dict[str, list[ChainLog]]] = {}
        try:
            items = _items(logs)
            for start in range(0, len(items), ITEMS_PER_STEP):
                await self._turn()
                for item in items[start : start + ITEMS_PER_STEP]:
                    log = _logs_of(item)
                    of_block = blocks.setdefault(int(log.block_number, 16), {})
                    of_block.setdefault(log.transaction_hash, []).append(log)
        except _INVALID:
            raise _unreadable(network) from None
        return blocks

    async def _blocks(self, network: Network, index: WatchIndex, numbers: range) -> list[bytes]:
        """These blocks with their transactions, as JSON; empty if only logs are matched."""
        if not self._needs_full_blocks(index):
            return [b""] * len(numbers)
        return await asyncio.gather(*(self._block(network, number) for number in numbers))

    async def _block(self, network: Network, number: int) -> bytes:
        try:
            return await self._internal_calls.raw(network, "eth_getBlockByNumber", hex(number), True)
        except RpcError as exc:
            raise _unreadable(network, exc) from None

    async def _failed(self, network: Network, hashes: list[str]) -> int:
        """The number of these transactions that failed."""
        if not hashes:
            return 0
        receipts = await self._internal_calls.call_many(
            network, [("eth_getTransactionReceipt", [each]) for each in hashes]
        )
        return sum(isinstance(each, Mapping) and each.get("status") == "0x0" for each in receipts)

    async def _head(self, network: Network) -> int:
        try:
            return await self._internal_calls.quantity(network, "eth_blockNumber")
        except RpcError as exc:
            raise _unreadable(network, exc) from None

    async def _call(self, network: Network, method: str, *params: Any) -> Any:
        try:
            return await self._internal_calls.call(network, method, *params)
        except RpcError as exc:
            raise _unreadable(network, exc) from None


def _check_range(first: int, last: int, most: int) -> None:
    if last < first:
        raise InvalidRequest("to_block: must not be before from_block", param="to_block")
    if last - first >= most:
        raise InvalidRequest(f"to_block: this config can be tested on at most {most} blocks at once", param="to_block")


def _unreadable(network: Network, error: RpcError | None = None) -> Unavailable:
    reason = "try again later" if error is None else error.error.decode()[:200]
    return Unavailable(f"cannot read these blocks of {network.id}: {reason}")


def _piece(logs: list[ChainLog], transactions: Sequence[MatchTransaction] = ()) -> MatchBlock:
    return MatchBlock(transactions, facts.transfers_of(logs)[0], logs)


def _uncertain(matches: list[Match]) -> list[str]:
    """The hashes of matching transactions that create an event only if they succeeded, one for each match."""
    return [
        match.fact.hash
        for match in matches
        if isinstance(match.fact, MatchTransaction) and payloads.needs_success(match.watcher)
    ]
